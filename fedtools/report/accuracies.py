"""Accuracies of keyword spotting: the first table of a page, and the last on the terminal.

Rows are of places, such as a task and a network; differences are to the first of the same place.
What a page is made of is in one file beside it, see `fedtools.report.section`: the evaluations and
errors of each clip, for each place.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import SERVER_ROW, LedgerRow, read_ledger
from fedtools.report import section as sections
from fedtools.report.record import Strict
from fedtools.report.results import Interval, read_curve, relative_text
from fedtools.report.section import Section, Seeds
from fedtools.report.summary import Line, Summary, note, rate_of
from fedtools.score.crossed import Effects, differences, effects
from fedtools.score.last_evaluations import CLIP, LAST
from fedtools.score.utterances import Utterances
from fedtools.score.verification import binomial_bounds
from fedtools.tasks import facts_of

FORMAT: Final = "kws1 report 1"
# Written by fedtools clip-scores.
ERRORS = "errors_test.tsv"
REMEDY = "run fedtools clip-scores again"


@dataclass(frozen=True)
class Row:
    """A row of the summary.

    Attributes:
        place: the task and the network.
        name: as the table shows it.
        accuracy: seed -> accuracy in %.
        counts: seed -> errors by clip; empty if they were not counted.
        bytes: what a client sends and receives, mean over all clients.
        epochs: of a client, mean over all clients, and of the server.
    """

    place: str
    name: str
    accuracy: dict[int, float]
    counts: dict[int, Utterances]
    bytes: float
    epochs: float


def read_accuracy(path: Path) -> dict[int, float]:
    """Read round -> accuracy on all clips, in %; personal models are measured on own clips."""
    curve = read_curve(path, facts_of("kws", ""))
    rows = enumerate(read_tsv(path, facts_of("kws", "").header), 2)
    clips = {row["client"]: count(row, "clips", path, line) for line, row in rows}
    if clips and not all(clips.values()):
        raise UserError("an accuracy of no clips", path=path, remedy="run fedtools evaluate again")
    return {
        at: float(np.average(list(rates.values()), weights=[clips[client] for client in rates]))
        for at, rates in curve.items()
    }


def read_counts(experiment: Path, accuracy: float) -> Utterances:
    """Read errors by clip.

    Args:
        experiment: its folder.
        accuracy: of the same evaluations, as recorded; NaN if it was not.

    Raises:
        UserError: if they are missing or malformed, or do not give the accuracy.
    """
    path = experiment / ERRORS
    counts = Utterances.read(path, [CLIP], REMEDY)
    found = accuracy_of(counts)
    # Recorded accuracies have four digits.
    if not math.isnan(accuracy) and not abs(found - accuracy) <= 1e-4:
        problem = f"accuracy {found:.4f}, but evaluate_test.tsv has {accuracy:.4f}"
        raise UserError(problem, path=path, remedy=REMEDY)
    return counts


def read_rows(experiment: Experiment) -> list[LedgerRow]:
    """Read the ledger up to the last configured round, whose accuracy is reported."""
    return [row for row in read_ledger(experiment) if row.round <= experiment.options.rounds]


def costs_of(rows: Iterable[LedgerRow], clients: Collection[str]) -> tuple[float, float, float]:
    """Sum up a ledger: bytes of all messages, epochs of a client, and epochs of the server.

    Refused messages count, too, since they were sent. Epochs are the mean over all clients, sampled
    or not.
    """
    size = epochs = server = 0.0
    for row in rows:
        server += row.server_epochs
        if row.client != SERVER_ROW:
            size += row.bytes_down + row.bytes_up
            if row.client in clients:
                epochs += row.client_epochs / len(clients)
    return size, epochs, server


def accuracy_of(counts: Utterances) -> float:
    """Return the accuracy in %, the mean over evaluations; NaN without any."""
    measured = counts.tokens[CLIP].sum()
    return float(100 * (1 - counts.errors[CLIP].sum() / measured)) if measured else math.nan


def summary_of(rows: Sequence[Row]) -> Summary:
    """Return the summary of rows, in which those of one place follow each other."""
    lines = []
    for place in dict.fromkeys(row.place for row in rows):
        own = [row for row in rows if row.place == place]
        most = max(row.epochs for row in own)
        changes = differences([None if row is own[0] else _effects(row, own[0]) for row in own])
        lines += [
            Line(
                row.name,
                _rate(row),
                change,
                row.bytes,
                relative_text(row.epochs, most),
            )
            for row, change in zip(own, changes, strict=True)
        ]
    return Summary("Accuracy", lines, 1)


def note_of(rows: Sequence[Row]) -> str:
    """Return how to read the summary."""
    several = any(len(row.accuracy) > 1 for row in rows)
    same = " of the same task and network" * (len({row.place for row in rows}) > 1)
    text = note(
        "Accuracy",
        f"on the test clips, the mean of the last {LAST} evaluations (of all, if there are fewer), "
        f"with 95 % intervals over {'seeds and ' * several}test speakers",
        f"the first row{same}",
        "epochs of a client, mean over all clients, and of the server, relative to the largest"
        f"{same}",
        several,
    )
    if not all(row.counts for row in rows):
        text += " Without errors by clip (fedtools clip-scores), there are no intervals."
    return text


def _rate(row: Row) -> Interval:
    if not row.counts:
        return Interval(statistics.fmean(row.accuracy.values()), None, None)
    errors, clips = _errors(row, list(row.counts))
    rate = rate_of(errors, clips)
    low, high = (None if bound is None else 100 - bound for bound in (rate.high, rate.low))
    if low is not None and low == high:
        # All speakers are alike, as in a perfect row: each is an independent trial at best.
        low, high = binomial_bounds(1 - rate.value / 100, len(clips))
    return Interval(100 - rate.value, low, high)


def _effects(row: Row, other: Row) -> Effects | None:
    """Return the difference over the seeds that both have; None if they have none in common."""
    seeds = [seed for seed in row.accuracy if seed in other.accuracy]
    if not seeds:
        return None
    if not (row.counts and other.counts):
        gap = statistics.fmean(row.accuracy[seed] - other.accuracy[seed] for seed in seeds)
        return Effects(gap, len(seeds))
    (ours, clips), (theirs, _) = _errors(row, seeds), _errors(other, seeds)
    if _clips(row) != _clips(other):
        raise UserError(f"test clips of {row.name} are not those of {other.name}", remedy=REMEDY)
    # Accuracy is the negative of errors, hence the order; all clips count as one client's.
    return effects(theirs, ours, clips, np.zeros(len(clips), int))


def _errors(row: Row, seeds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return errors, (seeds, speakers), means over evaluations, and clips, (speakers,)."""
    if len({tuple(row.counts[seed].keys) for seed in row.counts}) != 1:
        raise UserError(f"test clips of {row.name} differ between seeds", remedy=REMEDY)
    found = [row.counts[seed].by_speaker(CLIP) for seed in seeds]
    evaluations = [row.counts[seed].tokens[CLIP].max() for seed in seeds]
    errors = [one / times for (_, _, one), times in zip(found, evaluations, strict=True)]
    return np.array(errors), found[0][1] / evaluations[0]


def _clips(row: Row) -> Sequence[tuple[str, str, str]]:
    return next(iter(row.counts.values())).keys


# --- the file beside a page ---


@dataclass(frozen=True)
class _Row(Strict):
    place: str
    name: str
    seeds: Seeds
    bytes: float
    epochs: float


@dataclass(frozen=True)
class _Record(Strict):
    format: Literal["kws1 report 1"]
    section: Section
    rows: list[_Row]


def write_record(path: Path, section: Section, rows: Sequence[Row]) -> None:
    """Write what a section is made of."""
    seeds, systems = sections.numbered(row.counts for row in rows)
    kept = [
        _Row(row.place, row.name, own, float(row.bytes), float(row.epochs))
        for row, own in zip(rows, seeds, strict=True)
    ]
    sections.write_record(path, _Record(FORMAT, section, kept), systems)


def read_record(path: Path) -> tuple[Section, list[Row]]:
    """Read the file that `write_record` writes.

    Raises:
        UserError: if it is not such a file.
    """
    record, errors = sections.read_record(path, _Record, CLIP, "clips")
    rows = []
    for row, own in zip(record.rows, errors, strict=True):
        if not all(map(is_whole, own.values())):
            problem = f"{row.name!r}: no errors of clips for each seed"
            raise UserError(problem, path=path, line=1)
        if min(row.bytes, row.epochs) < 0:
            raise UserError(f"{row.name!r}: costs below 0", path=path, line=1)
        accuracy = {seed: accuracy_of(one) for seed, one in own.items()}
        rows.append(Row(row.place, row.name, accuracy, own, row.bytes, row.epochs))
    return record.section, rows


def is_whole(counts: Utterances) -> bool:
    """Return whether each clip was evaluated as often, and was not wrong more often."""
    tokens = counts.tokens[CLIP]
    if not len(tokens) or tokens.min() < 1 or tokens.min() != tokens.max():
        return False
    return bool((counts.errors[CLIP] <= tokens).all())
