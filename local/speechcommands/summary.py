"""The first table of a page of keyword spotting, and the last on the terminal; see fedtools.report.

Rows are the methods as configured, for each task and network; differences are to the first of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from differences import accuracy_difference, accuracy_interval, is_counted, paired
from runs import Run, Runs, network_title
from tables import varied

from fedtools.report.results import Interval, relative_text
from fedtools.report.summary import Line, Summary, note
from fedtools.score.crossed import Difference
from fedtools.score.last_evaluations import LAST


def summary_of(runs: Runs) -> Summary:
    """Return the summary of all methods, the federated ones first."""
    return Summary("Accuracy", [one for place in runs.columns for one in _lines(runs, place)], 1)


def note_of_summary(runs: Runs) -> str:
    """Return how to read the summary."""
    several = any(len(found) > 1 for found in runs.complete.values())
    same = " of the same task and network" * (len(runs.columns) > 1)
    text = note(
        "Accuracy",
        f"on the test clips, the mean of the last {LAST} evaluations (of all, if there are fewer), "
        f"with 95 % intervals over {'seeds and ' * several}test speakers",
        f"the first row{same}",
        "epochs of a client, mean over all clients, and of the server, relative to the largest"
        f"{same}",
        several,
    )
    if not all(map(is_counted, runs.having())):
        text += " Without counts by speaker (fedtools clip-scores), there are no intervals."
    return text


def _lines(runs: Runs, place: tuple[str, str]) -> Iterator[Line]:
    """Yield the rows of one task and network."""
    settings = [(one, "", "") for one in [*runs.methods(True), *runs.methods(False)]]
    rows = {one: found for one in settings if (found := runs.get(*place, *one))}
    sizes = runs.data[place[0]].sizes
    costs = {one: [run.costs(sizes) for run in found] for one, found in rows.items()}
    epochs = {
        one: statistics.fmean(cost["Client epochs"] + cost["Server epochs"] for cost in own)
        for one, own in costs.items()
    }
    where = f", {place[0]} {network_title(place[1])}" * (len(runs.columns) > 1)
    first = next(iter(rows.values()), [])
    for setting, found in rows.items():
        yield Line(
            varied(*setting) + where,
            _rate(found),
            None if found is first else _difference(found, first),
            statistics.fmean(one["Comm."] for one in costs[setting]) / len(sizes),
            relative_text(epochs[setting], max(epochs.values())),
        )


def _rate(runs: Sequence[Run]) -> Interval:
    if all(map(is_counted, runs)):
        return accuracy_interval(runs)
    return Interval(statistics.fmean(run.lasting for run in runs), None, None)


def _difference(runs: Sequence[Run], others: Sequence[Run]) -> Difference | None:
    """Return the difference over the seeds that both have; None if they have none in common."""
    if all(map(is_counted, [*runs, *others])):
        return accuracy_difference(runs, others)
    gaps = [run.lasting - other.lasting for run, other in paired(runs, others)]
    return Difference(statistics.fmean(gaps), math.nan, math.nan, math.nan) if gaps else None
