"""Models of a run whose updates are compared, and inner products of these updates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.attack.options import WeightsAttack
from fedtools.attack.speakers.verify import Model, known_speakers
from fedtools.attack.updates import OF_STATISTICS, Update, Updates, multiply, parts_of
from fedtools.core.errors import UserError
from fedtools.core.progress import counted

OK, NOT_APPLICABLE = "ok", "not applicable"
# In addition to the parts: all weights as one vector.
ALL = "all"


class PartStatus(NamedTuple):
    """Tensors of a part, their number of values, and a status: ok, or why it has no figures."""

    part: str
    tensors: Sequence[str]
    values: int
    status: str


@dataclass(frozen=True)
class Models:
    """Models of a run, in the order of all rows and columns.

    Attributes:
        updates: name -> update as it was sent.
        undefended: the same without the defence; the same object where there is no defence.
        known: name -> what is known of the model.
        owner: (models,), the number of each model's experiment.
        given: (models,), whether each model belongs to a given cohort.
    """

    updates: dict[str, Update]
    undefended: dict[str, Update]
    known: dict[str, Model]
    owner: np.ndarray
    given: np.ndarray

    def without(self, bad: np.ndarray) -> Models:
        """Return the models that are not bad; `bad` is (models,) bool."""
        kept = [name for name, one in zip(self.updates, bad, strict=True) if not one]
        updates = {name: self.updates[name] for name in kept}
        before = {name: self.undefended[name] for name in kept} if self.defended else updates
        known = {name: self.known[name] for name in kept}
        return Models(updates, before, known, self.owner[~bad], self.given[~bad])

    @property
    def versions(self) -> list[Update]:
        """Return the updates to multiply: those sent, and with a defence undefended ones first."""
        sent = list(self.updates.values())
        return [*self.undefended.values(), *sent] if self.defended else sent

    @property
    def defended(self) -> bool:
        """Return whether there is a defence."""
        return self.undefended is not self.updates

    @property
    def people(self) -> list[str]:
        """Return the person of each model, or its speaker where the person is not known."""
        return [self.known[name].person or self.known[name].speaker for name in self.updates]


def find_models(
    joined: Updates,
    undefended: Updates | None,
    found: Sequence[Updates],
    table: Path | None,
    attacked: int,
) -> Models:
    """Return the models whose speakers are known; report refused models on stderr.

    Args:
        joined: updates of all experiments.
        undefended: the same without the defence, if there is one.
        found: updates of each experiment.
        table: what is known of the models, see `verify.read_models`; None: their speakers.
        attacked: number of attacked experiments, which come first; the others are a cohort.
    """
    names = [name for name in joined.models if name in joined.speakers]
    if not names:
        refused = [f"{name}: refused: {why}" for name, why in sorted(joined.refused.items())]
        more = f"; {refused[0]}" if refused else ""
        raise UserError(f"no model with a known speaker is left{more}")
    for name, reason in sorted(joined.refused.items()):
        print(f"{name}: refused: {reason}", file=sys.stderr)
    known = known_speakers(names, [joined.speakers[name] for name in names], table)
    owners = {name: number for number, one in enumerate(found) for name in one.models}
    owner = np.array([owners[name] for name in names], int)
    updates = {name: joined.models[name] for name in names}
    plain = {name: undefended.models[name] for name in names} if undefended else updates
    return Models(updates, plain, known, owner, owner >= attacked)


def products_of(
    models: Models, joined: Updates, options: WeightsAttack, scratch: Path
) -> tuple[dict[str, np.ndarray], Models, list[PartStatus]]:
    """Return products by part, the models that are left, and the status of each part.

    There are products of each part that any model changed, and of all weights together. They are
    of `Models.versions`. Models that are not finite, or changed nothing at all, are refused.
    """
    parts, described, versions = parts_of(joined.spec), list[PartStatus](), models.versions
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
        described.append(PartStatus(part, tensors, size, status))
        if moved:
            path = scratch / f"{part}.npy"
            if bad.any():
                np.save(path, np.load(path)[kept])
            # Kept on disk: products of thousands of models are larger than the models.
            found[part] = np.load(path, mmap_mode="r")
    if everything[kept].any():
        found[ALL] = everything[kept]
    return found, models.without(bad), described
