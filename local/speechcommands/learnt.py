"""What a federation has saved a server: the clips that it would have had to label itself."""

from __future__ import annotations

import statistics

from runs import Runs
from tables import varied

# Where the recipe's own rows of larger servers are.
PAGE = "RESULTS-first.md"


def learnt(runs: Runs) -> str:
    """Return how many labelled clips are worth as much as the first method of clients, as a text.

    Without servers that train alone, and methods of clients, it is empty.
    """
    lines = [line for place in runs.columns if (line := _of(runs, place))]
    if not lines:
        return ""
    sizes = " ".join(f"{float(value):.0f}" for *_, value in runs.alone)
    more = f'`--server_clips "{sizes} 67 270"` measures servers with more, as in {PAGE}.'
    return " ".join([*lines, more] if len(runs.alone) == 1 else lines)


def _of(runs: Runs, place: tuple[str, str]) -> str:
    """Return the text of one task and network."""
    alone = {
        int(float(setting[2])): _accuracy(runs, place, *setting)
        for setting in runs.alone
        if runs.get(*place, *setting)
    }
    methods = [one for one in runs.methods(True) if runs.get(*place, one)]
    if not alone or not methods:
        return ""
    # Not the best one, which the test clips would choose.
    method = methods[0]
    reached = _accuracy(runs, place, method, "", "")
    clients = len(runs.data[place[0]].sizes)
    enough = min((size for size, accuracy in alone.items() if accuracy >= reached), default=None)
    fewer = max((size for size in alone if enough is None or size < enough), default=None)
    bounds = [f"more than {fewer:,}"] if fewer else []
    bounds += [f"at most {enough:,}"] if enough else []
    shown = ", ".join(f"{size:,} clips: {accuracy:.1f} %" for size, accuracy in alone.items())
    return (
        f"{varied(method, '', '')} reaches {reached:.1f} % with {clients} clients, whose clips "
        f"stay with them. For as much, the server would have had to label {' and '.join(bounds)} "
        f"clips itself ({shown})."
    )


def _accuracy(runs: Runs, place: tuple[str, str], *setting: str) -> float:
    return statistics.fmean(run.lasting for run in runs.get(*place, *setting))
