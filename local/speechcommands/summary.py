"""The first table of a page of keyword spotting, and the last on the terminal; see fedtools.report.

Rows are the methods as configured, for each task and network; differences are to the first of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from runs import Run, Runs, network_title
from tables import varied

from fedtools.files.errors import UserError
from fedtools.report.results import Interval, relative_text
from fedtools.report.summary import Line, Summary, note, rate_of
from fedtools.score.crossed import Effects, differences, effects
from fedtools.score.last_evaluations import CLIP, LAST
from fedtools.score.utterances import Utterances

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


def rows_of(runs: Runs) -> list[Row]:
    """Return the rows of all methods, after those of servers alone, the federated ones first.

    Raises:
        UserError: if errors by clip are malformed, or do not give the accuracies.
    """
    return [row for place in runs.columns for row in _rows(runs, place)]


def _rows(runs: Runs, place: tuple[str, str]) -> Iterator[Row]:
    sizes = runs.data[place[0]].sizes
    where = f", {place[0]} {network_title(place[1])}" * (len(runs.columns) > 1)
    methods = [*runs.methods(True), *runs.methods(False)]
    for setting in [*runs.alone, *((one, "", "") for one in methods)]:
        if found := runs.get(*place, *setting):
            costs = [run.costs(sizes) for run in found]
            # An epoch of a server alone is shorter than one of all clients' clips.
            share = float(setting[2]) / sum(sizes.values()) if setting in runs.alone else 1
            counted = all((run.path / ERRORS).exists() for run in found)
            yield Row(
                " ".join(place),
                varied(*setting) + where,
                {run.seed: run.lasting for run in found},
                {run.seed: _counts(run) for run in found if counted},
                statistics.fmean(cost["Comm."] for cost in costs) / len(sizes),
                statistics.fmean(
                    cost["Client epochs"] + share * cost["Server epochs"] for cost in costs
                ),
            )


def _counts(run: Run) -> Utterances:
    path = run.path / ERRORS
    counts = Utterances.read(path, [CLIP], REMEDY)
    accuracy = accuracy_of(counts)
    # Recorded accuracies have four digits.
    if not abs(accuracy - run.lasting) <= 1e-4:
        problem = f"accuracy {accuracy:.4f}, but evaluate_test.tsv has {run.lasting:.4f}"
        raise UserError(problem, path=path, remedy=REMEDY)
    return counts


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
