"""Are two updates of one speaker? By the cosine of what clients changed, part by part or together.

No speech is needed, and no model is run. The vectors of two models are centred on those of a cohort
of other people (`fedtools.attack.cohort`); a logistic regression of all parts' cosines, trained on
pairs of the cohort, makes them one log-likelihood ratio. Beside them, where a first layer with a
bias allows it, what is constant in a client's input is read out (`fedtools.attack.readout`).

OUT/weights.tsv           figures, as of the other attacks on models
OUT/weights.<part>.<kind> a score for each trial, and its DET curve
OUT/parts.tsv             each part of the models: its tensors, and why it has no figures
OUT/readout.tsv           cosine of what was read out with the truth, by model
OUT/weights.png           equal error rates by part
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.attack.cohort import Block, blocks, combine, cosines, score_pairs
from fedtools.attack.defences import Defence
from fedtools.attack.knowledge import ANY
from fedtools.attack.options import Weights
from fedtools.attack.readout import (
    First,
    as_first_layer_sees,
    constant_columns,
    first_layer,
    read_out,
)
from fedtools.attack.updates import (
    OF_STATISTICS,
    NotApplicable,
    Update,
    Updates,
    behind_defence,
    find_updates,
    join,
    multiply,
    parts_of,
)
from fedtools.attack.verify import COLUMNS, Model, decide, draw_rates, known_speakers
from fedtools.federation.federation import Federation
from fedtools.files.atomic import scratch_dir
from fedtools.files.errors import UserError
from fedtools.files.progress import counted
from fedtools.files.sections import Bootstrap
from fedtools.files.tables import write_tsv

PARTS = ("part", "tensors", "values", "status")
READ = ("model", "speaker", "cosine", "centred", "others")
OK, NOT_APPLICABLE = "ok", "not applicable"
# Beside the parts: all weights as one vector, all parts together, what a first layer tells of all
# values of its input, and of those that are constant.
ALL, TOGETHER, INPUT, CONSTANT = "all", "together", "input", "constant"


@dataclass(frozen=True)
class Look:
    """How updates are looked at.

    Attributes:
        rounds: in which models were sent.
        defence: what clients did to them first, see `fedtools.attack.defences`; the cohort's, too.
        resamples: of intervals.
        seed: of everything random.
    """

    rounds: Sequence[int]
    defence: str = ""
    resamples: int = Bootstrap.resamples
    seed: int = 0


class Told(NamedTuple):
    """What is told of a part: its tensors, their values, and why it has no figures."""

    part: str
    tensors: Sequence[str]
    values: int
    status: str


@dataclass(frozen=True)
class _Models:
    """The models of a run, in the order of all rows and columns.

    Attributes:
        updates: of each, by its name.
        known: what is known of it.
        owner: the number of its experiment.
        given: whether it is of a cohort that was given.
    """

    updates: dict[str, Update]
    known: dict[str, Model]
    owner: np.ndarray
    given: np.ndarray

    def without(self, bad: np.ndarray) -> _Models:
        """Those that are not bad, (models,) bool."""
        kept = [name for name, one in zip(self.updates, bad, strict=True) if not one]
        return _Models(
            {name: self.updates[name] for name in kept},
            {name: self.known[name] for name in kept},
            self.owner[~bad],
            self.given[~bad],
        )

    @property
    def people(self) -> list[str]:
        """The person of each, or the speaker where persons are not known."""
        return [self.known[name].person or self.known[name].speaker for name in self.updates]


def attack(
    attacked: Sequence[Federation],
    cohort: Sequence[Federation],
    table: Path | None,
    out: Path,
    options: Weights,
    look: Look,
) -> list[Mapping[str, object]]:
    """Decide trials of models by their updates; write the files above.

    Args:
        attacked: experiments whose models are compared.
        cohort: experiments of other people; without one, it is the attacked ones' other people.
        table: what is known of the models, of the cohort too, see `verify.read_models`; None: their
            speakers.

    Returns:
        the rows of OUT/weights.tsv: none where the clients send no tensors.

    Raises:
        UserError: if nothing is left to be compared.
    """
    Defence.parse(look.defence)
    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("weights.*"):
        # Of parts that there may be no more.
        path.unlink()
    federations = [*attacked, *cohort]
    with scratch_dir(out) as scratch, ExitStack() as settings:
        for federation in federations:
            settings.enter_context(federation.settings())
        try:
            found = _read(federations, look, scratch)
        except NotApplicable as error:
            _write_parts(out, [Told(ALL, [], 0, f"{NOT_APPLICABLE}: {error}")])
            write_tsv(out / "weights.tsv", COLUMNS, [])
            return []
        joined = join(found, [one.experiment.path for one in federations])
        models = _models(joined, found, table, len(attacked))
        products, models, told = _multiplied(models, joined, options, scratch)
        vectors, more = _read_out(federations, joined, models, options, out)
        told += more
        some = blocks(models.people, models.given, look.seed)
        rows = _decide(models, some, products, vectors, told, out, options, look)
    _write_parts(out, told)
    draw_rates(out / "weights.png", rows, "Attack on updates, by part of the model")
    return rows


def _read(federations: Sequence[Federation], look: Look, scratch: Path) -> list[Updates]:
    """What the clients of each experiment changed, as it is seen behind the defence."""
    found = []
    for number, federation in enumerate(federations):
        updates = find_updates(federation, look.rounds)
        if look.defence not in ("", "none"):
            path = scratch / f"{number}.safetensors"
            updates = behind_defence(
                federation, updates, look.rounds, look.defence, look.seed, path
            )
        found.append(updates)
    return found


def _models(
    joined: Updates, found: Sequence[Updates], table: Path | None, attacked: int
) -> _Models:
    """The models whose speakers are known; who was refused is told on stderr."""
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
    return _Models(updates, known, owner, owner >= attacked)


def _multiplied(
    models: _Models, joined: Updates, options: Weights, scratch: Path
) -> tuple[dict[str, np.ndarray], _Models, list[Told]]:
    """The products of each part that any model changed, those of all weights together among them.

    Models that are not finite, or changed nothing at all, are refused.
    """
    parts, told = parts_of(joined.spec), list[Told]()
    squares, everything = {}, np.zeros((len(models.updates),) * 2)
    some = multiply(list(models.updates.values()), parts, options.piece_mb << 20)
    for one in counted(some, "updates", "parts", len(parts)):
        squares[one.part] = one.squares
        np.save(scratch / f"{one.part}.npy", one.products)
        if not one.part.endswith(OF_STATISTICS):
            everything += one.products
    bad = np.zeros(len(models.updates), bool)
    for index, name in enumerate(models.updates):
        lengths = {part: one[index] for part, one in squares.items()}
        wrong = next((part for part, one in lengths.items() if not np.isfinite(one)), "")
        if wrong or not any(lengths.values()):
            bad[index] = True
            why = f"NaN or Inf in {wrong}" if wrong else "nothing was changed"
            print(f"{name}: refused: {why}", file=sys.stderr)
    kept = np.ix_(~bad, ~bad)
    found = {}
    for part, names in parts.items():
        size = sum(int(np.prod(joined.spec[name][0])) for name in names)
        moved = squares[part][~bad].any()
        status = OK if moved else f"{NOT_APPLICABLE}: no client changes it"
        told.append(Told(part, names, size, status))
        if moved:
            path = scratch / f"{part}.npy"
            if bad.any():
                np.save(path, np.load(path)[kept])
            # On disk: of thousands of models they are larger than models.
            found[part] = np.load(path, mmap_mode="r")
    if everything[kept].any():
        found[ALL] = everything[kept]
    return found, models.without(bad), told


def _read_out(
    federations: Sequence[Federation],
    joined: Updates,
    models: _Models,
    options: Weights,
    out: Path,
) -> tuple[dict[str, np.ndarray], list[Told]]:
    """What is read out of the first layer, by its name, (models, values); write OUT/readout.tsv.

    Of all values of the input, and of those alone that are constant.
    """
    try:
        firsts = [first_layer(one, joined.spec) for one in federations]
    except NotApplicable as error:
        write_tsv(out / "readout.tsv", READ, [])
        return {}, [Told(one, [], 0, f"{NOT_APPLICABLE}: {error}") for one in (INPUT, CONSTANT)]
    first = firsts[0]
    vectors = read_out(list(models.updates.values()), first)
    told = [Told(INPUT, list(first.tensors), vectors.shape[1], OK)]
    begin, end = options.constant
    columns, truth = np.arange(begin - 1, end) if end else None, None
    try:
        found, truth = _truth(federations, first, models)
        columns = found if columns is None else columns
    except NotApplicable as error:
        if columns is None:
            told.append(Told(CONSTANT, [], 0, f"{NOT_APPLICABLE}: {error}"))
            write_tsv(out / "readout.tsv", READ, [])
            return {INPUT: vectors}, told
    if columns[-1] >= vectors.shape[1]:
        problem = f"constant: {list(options.constant)}, of {vectors.shape[1]} values of the input"
        raise UserError(problem)
    own = vectors[:, columns]
    told.append(Told(CONSTANT, list(first.tensors), len(columns), OK))
    rows = [] if truth is None else _compared(models, own, truth[:, columns])
    write_tsv(out / "readout.tsv", READ, rows)
    return {INPUT: vectors, CONSTANT: own}, told


def _truth(
    federations: Sequence[Federation], first: First, models: _Models
) -> tuple[np.ndarray, np.ndarray]:
    """The constant values of the input, and what the first layer is given of each model's client.

    The former are (columns,), the latter (models, inputs).
    """
    columns: np.ndarray | None = None
    truth = np.zeros((len(models.updates), first.shape[1]))
    updates = list(models.updates.values())
    for number, federation in enumerate(federations):
        own = np.flatnonzero(models.owner == number)
        clients = sorted({updates[index].client for index in own})
        if not clients:
            continue
        found, means = constant_columns(federation, clients)
        columns = found if columns is None else np.intersect1d(columns, found)
        for at in sorted({updates[index].number for index in own}):
            some = [index for index in own if updates[index].number == at]
            frames = np.stack([means[updates[index].client] for index in some])
            truth[some] = as_first_layer_sees(federation, first, at, frames)
    if columns is None or not columns.size:
        raise NotApplicable("nothing in the clients' input is constant")
    return columns, truth


def _compared(models: _Models, own: np.ndarray, truth: np.ndarray) -> list[dict[str, object]]:
    """Rows of OUT/readout.tsv: the cosine of what was read out with the truth.

    `centred` is that of both less their means over models, `others` the mean cosine with the truth
    of other people's models: what the cosine owes to what all have in common.
    """
    people = np.array(models.people)
    found = _cosines(own, truth)
    centred = np.diagonal(_cosines(own - own.mean(0), truth - truth.mean(0)))
    rows = []
    for index, name in enumerate(models.updates):
        other = found[index, people != people[index]]
        cells = found[index, index], centred[index], other.mean() if len(other) else np.nan
        values = zip(READ[2:], (f"{one:.4f}" for one in cells), strict=True)
        rows.append({"model": name, "speaker": models.known[name].speaker, **dict(values)})
    return rows


def _cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Cosines of all rows of one matrix with those of another; 0 of zeros."""
    lengths = [np.linalg.norm(rows, axis=1, keepdims=True) for rows in (one, other)]
    (one, other) = (
        rows / np.where(length > 0, length, 1)
        for rows, length in zip((one, other), lengths, strict=True)
    )
    return one @ other.T


def _decide(
    models: _Models,
    some: Sequence[Block],
    products: Mapping[str, np.ndarray],
    vectors: Mapping[str, np.ndarray],
    told: list[Told],
    out: Path,
    options: Weights,
    look: Look,
) -> list[Mapping[str, object]]:
    """The figures of all parts, and of all together."""
    names = list(models.updates)
    attacked = {
        name: models.known[name] for name, one in zip(names, models.given, strict=True) if not one
    }
    chosen = {"others": options.others, "seed": look.seed}

    def matrices() -> Iterator[tuple[str, str, str, np.ndarray]]:
        for part, values in products.items():
            yield ANY, part, "cosine", score_pairs(values, some, cosines)
        layers = [values for part, values in products.items() if part != ALL]
        for name, rows in vectors.items():
            rows = rows - rows.mean(0)
            layers.append(rows @ rows.T)
            yield ANY, name, "cosine", score_pairs(layers[-1], some, cosines)
        try:
            ratios, _ = combine(layers, models.people, some, **chosen)
        except UserError as error:
            told.append(Told(TOGETHER, [], 0, f"{NOT_APPLICABLE}: {error}"))
            return
        told.append(Told(TOGETHER, [], 0, OK))
        yield ANY, TOGETHER, "regression", ratios

    files = {"cosine": "weights", "regression": "weights"}
    return decide(
        out, "weights", attacked, names, matrices(), files, resamples=look.resamples, **chosen
    )


def _write_parts(out: Path, told: Sequence[Told]) -> None:
    """Write OUT/parts.tsv; tell on stderr what has no figures."""
    rows = []
    for one in told:
        cells = {"part": one.part, "tensors": len(one.tensors), "values": one.values}
        rows.append({**cells, "status": one.status})
        if one.status != OK:
            print(f"{one.part}: {one.status}", file=sys.stderr)
    write_tsv(out / "parts.tsv", PARTS, rows)
