"""The rows of the recipe's summary; see `fedtools.report.accuracies`.

Rows are the methods as configured, for each task and network; differences are to the first of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from runs import Run, Runs, network_title
from tables import varied

from fedtools.privacy.user_plan import FILE, UserPlan
from fedtools.report.accuracies import ERRORS, Row, read_counts


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
                varied(*setting) + _epsilon(found) + where,
                {run.seed: run.lasting for run in found},
                {run.seed: read_counts(run.path, run.lasting) for run in found if counted},
                statistics.fmean(cost["Comm."] for cost in costs) / len(sizes),
                statistics.fmean(
                    cost["Client epochs"] + share * cost["Server epochs"] for cost in costs
                ),
            )


def _epsilon(runs: Sequence[Run]) -> str:
    """Return the epsilon of runs with user-level privacy, for their name; "" of others."""
    if not (runs[0].path / FILE).exists():
        return ""
    spent = [UserPlan.read(run.path).epsilon for run in runs]
    found = {"no noise" if one is None else f"epsilon {one:.3g}" for one in spent}
    return f", {' and '.join(sorted(found))}"
