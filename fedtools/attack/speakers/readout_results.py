"""Read-out of the first layers of many models, compared with the truth of their clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtools.attack.options import WeightsAttack
from fedtools.attack.speakers.compared_updates import NOT_APPLICABLE, OK, Models, PartStatus
from fedtools.attack.speakers.readout import (
    First,
    as_first_layer_sees,
    constant_columns,
    first_layer,
    read_out,
)
from fedtools.attack.updates import NotApplicable, Updates
from fedtools.core.errors import UserError
from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation

READ = ("model", "speaker", "cosine", "centred", "others")
# Read-outs: of all values of the first layer's input, and of the constant values.
INPUT, CONSTANT = "input", "constant"


def read_inputs(
    federations: Sequence[Federation],
    joined: Updates,
    models: Models,
    options: WeightsAttack,
    out: Path,
) -> tuple[dict[str, np.ndarray], list[PartStatus]]:
    """Read out the first layer's input, `INPUT` and `CONSTANT`; write OUT/readout.tsv.

    `INPUT` has all values of the input, `CONSTANT` only the constant ones. The table is of updates
    as they were sent.

    Returns:
        name -> (versions, values), and the status of each read-out.
    """
    try:
        firsts = [first_layer(one, joined.spec) for one in federations]
    except NotApplicable as error:
        write_tsv(out / "readout.tsv", READ, [])
        return {}, [
            PartStatus(one, [], 0, f"{NOT_APPLICABLE}: {error}") for one in (INPUT, CONSTANT)
        ]
    first = firsts[0]
    vectors = read_out(models.versions, first)
    described = [PartStatus(INPUT, list(first.tensors), vectors.shape[1], OK)]
    begin, end = options.constant
    columns, truth = np.arange(begin - 1, end) if end else None, None
    try:
        found, truth = _truth(federations, first, models)
        columns = found if columns is None else columns
    except NotApplicable as error:
        if columns is None:
            described.append(PartStatus(CONSTANT, [], 0, f"{NOT_APPLICABLE}: {error}"))
            write_tsv(out / "readout.tsv", READ, [])
            return {INPUT: vectors}, described
    if columns[-1] >= vectors.shape[1]:
        problem = f"constant: {list(options.constant)}, but the input has {vectors.shape[1]} values"
        raise UserError(problem)
    own = vectors[:, columns]
    described.append(PartStatus(CONSTANT, list(first.tensors), len(columns), OK))
    rows = [] if truth is None else _compared(models, own[-len(truth) :], truth[:, columns])
    write_tsv(out / "readout.tsv", READ, rows)
    return {INPUT: vectors, CONSTANT: own}, described


def _truth(
    federations: Sequence[Federation], first: First, models: Models
) -> tuple[np.ndarray, np.ndarray]:
    """Return the constant columns of the input, and the first layer's input for each model.

    Shapes are (columns,) and (models, inputs); the latter is of the client's mean frame.
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


def _compared(models: Models, own: np.ndarray, truth: np.ndarray) -> list[dict[str, object]]:
    """Return rows of OUT/readout.tsv: the cosine of each read-out with the truth.

    `centred` is the cosine of both less their means over models, `others` the mean cosine with the
    truth of other people's models: the part of the cosine that is common to all.
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
    """Return cosines of all rows of one matrix with those of another; 0 for rows of zeros."""
    lengths = [np.linalg.norm(rows, axis=1, keepdims=True) for rows in (one, other)]
    (one, other) = (
        rows / np.where(length > 0, length, 1)
        for rows, length in zip((one, other), lengths, strict=True)
    )
    return one @ other.T
