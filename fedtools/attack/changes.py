"""The models of a run whose updates are compared, and the products of what they changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.attack.options import Weights
from fedtools.attack.updates import OF_STATISTICS, Update, Updates, multiply, parts_of
from fedtools.attack.verify import Model, known_speakers
from fedtools.files.errors import UserError
from fedtools.files.progress import counted

OK, NOT_APPLICABLE = "ok", "not applicable"
# Beside the parts: all weights as one vector.
ALL = "all"


class Told(NamedTuple):
    """What is told of a part: its tensors, their values, and why it has no figures."""

    part: str
    tensors: Sequence[str]
    values: int
    status: str


@dataclass(frozen=True)
class Models:
    """The models of a run, in the order of all rows and columns.

    Attributes:
        updates: of each, by its name, as it was sent.
        undefended: the same without the defence; the very same where there is none.
        known: what is known of it.
        owner: the number of its experiment.
        given: whether it is of a cohort that was given.
    """

    updates: dict[str, Update]
    undefended: dict[str, Update]
    known: dict[str, Model]
    owner: np.ndarray
    given: np.ndarray

    def without(self, bad: np.ndarray) -> Models:
        """Those that are not bad, (models,) bool."""
        kept = [name for name, one in zip(self.updates, bad, strict=True) if not one]
        updates = {name: self.updates[name] for name in kept}
        before = {name: self.undefended[name] for name in kept} if self.defended else updates
        known = {name: self.known[name] for name in kept}
        return Models(updates, before, known, self.owner[~bad], self.given[~bad])

    @property
    def versions(self) -> list[Update]:
        """What is multiplied: of each model what was sent; behind a defence, without it before."""
        sent = list(self.updates.values())
        return [*self.undefended.values(), *sent] if self.defended else sent

    @property
    def defended(self) -> bool:
        """Whether there is a defence."""
        return self.undefended is not self.updates

    @property
    def people(self) -> list[str]:
        """The person of each, or the speaker where persons are not known."""
        return [self.known[name].person or self.known[name].speaker for name in self.updates]


def find_models(
    joined: Updates,
    undefended: Updates | None,
    found: Sequence[Updates],
    table: Path | None,
    attacked: int,
) -> Models:
    """The models whose speakers are known; who was refused is told on stderr.

    Args:
        joined: what was sent in all experiments.
        undefended: the same without the defence, if there is one.
        found: what was sent in each.
        table: what is known of the models, see `verify.read_models`; None: their speakers.
        attacked: how many of the experiments, the first ones, are; the others are a cohort.
    """
    names = [name for name in joined.models if name in joined.speakers]
    if not names:
        refused = [f"{name}: refused: {why}" for name, why in sorted(joined.refused.items())]
        more = f"; {refused[0]}" if refused else ""
        raise UserError(f"no model is left whose speaker is known{more}")
    for name, reason in sorted(joined.refused.items()):
        print(f"{name}: refused: {reason}", file=sys.stderr)
    known = known_speakers(names, [joined.speakers[name] for name in names], table)
    owners = {name: number for number, one in enumerate(found) for name in one.models}
    owner = np.array([owners[name] for name in names], int)
    updates = {name: joined.models[name] for name in names}
    plain = {name: undefended.models[name] for name in names} if undefended else updates
    return Models(updates, plain, known, owner, owner >= attacked)


def products_of(
    models: Models, joined: Updates, options: Weights, scratch: Path
) -> tuple[dict[str, np.ndarray], Models, list[Told]]:
    """The products of each part that any model changed, those of all weights together among them.

    Models that are not finite, or changed nothing at all, are refused. Products are of
    `Models.versions`.
    """
    parts, told, versions = parts_of(joined.spec), list[Told](), models.versions
    squares, everything = {}, np.zeros((len(versions),) * 2)
    count = len(versions) // len(models.updates)
    some = multiply(versions, parts, options.piece_mb << 20, count)
    for one in counted(some, "updates", "parts", len(parts)):
        squares[one.part] = one.squares
        np.save(scratch / f"{one.part}.npy", one.products)
        if not one.part.endswith(OF_STATISTICS):
            everything += one.products
    names = list(models.updates)
    bad = np.zeros(len(names), bool)
    for index in range(len(versions)):
        lengths = {part: one[index] for part, one in squares.items()}
        wrong = next((part for part, one in lengths.items() if not np.isfinite(one)), "")
        place = index % len(names)
        if not bad[place] and (wrong or not any(lengths.values())):
            bad[place] = True
            why = f"NaN or Inf in {wrong}" if wrong else "nothing was changed"
            print(f"{names[place]}: refused: {why}", file=sys.stderr)
    whole = np.tile(~bad, len(versions) // len(names))
    kept = np.ix_(whole, whole)
    found = {}
    for part, tensors in parts.items():
        size = sum(int(np.prod(joined.spec[name][0])) for name in tensors)
        moved = squares[part][whole].any()
        status = OK if moved else f"{NOT_APPLICABLE}: no client changes it"
        told.append(Told(part, tensors, size, status))
        if moved:
            path = scratch / f"{part}.npy"
            if bad.any():
                np.save(path, np.load(path)[kept])
            # On disk: of thousands of models they are larger than models.
            found[part] = np.load(path, mmap_mode="r")
    if everything[kept].any():
        found[ALL] = everything[kept]
    return found, models.without(bad), told
