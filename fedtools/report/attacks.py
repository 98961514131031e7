"""Attacks on several experiments side by side: means over clients, and over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv, with_deviation, write_tsv
from fedtools.score.bootstrap import AVERAGE
from fedtools.score.crossed import mean_bounds


def merge_attacks(tables: Sequence[tuple[str, Path]], out: Path) -> None:
    """Write a table of attacks, a column for each name: the mean over clients, with its interval.

    Args:
        tables: names, and tables that `fedtools attack features` wrote; tables of one name are
            seeds, whose values are averaged, with a standard deviation, and an interval over seeds
            and speakers.
        out: the table.

    Raises:
        UserError: if a table is missing or malformed, or has no means over clients.
    """
    found: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    for name, path in tables:
        for key, figures in _means(path).items():
            found.setdefault(key, {}).setdefault(name, []).append(figures)
    names = list(dict.fromkeys(name for name, _ in tables))
    rows = []
    for (attack, measure), of_names in found.items():
        chances = [seed["chance"] for seeds in of_names.values() for seed in seeds]
        rows.append(
            {
                "Attack": attack,
                "Measure": measure,
                "Chance": _mean(chances) or "-",
                **{name: _cell(of_names.get(name, [])) for name in names},
            }
        )
    write_tsv(out, ["Attack", "Measure", "Chance", *names], rows)


def _means(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Read attack and measure -> mean over clients, its bounds and chance; NaN if not known."""
    found = {}
    for line, row in enumerate(read_tsv(path, None), 2):
        try:
            key = row["attack"], row["measure"]
            if row["client"] == AVERAGE:
                cells = {name: row[name] for name in ("value", "low", "high", "chance")}
                found[key] = {
                    name: math.nan if cell == "-" else float(cell) for name, cell in cells.items()
                }
        except (KeyError, ValueError):
            raise UserError("not a row of attack features", path=path, line=line) from None
    if not found:
        remedy = "run fedtools attack features again"
        raise UserError(f"no row of {AVERAGE}", path=path, remedy=remedy)
    return found


def _cell(seeds: Sequence[Mapping[str, float]]) -> str:
    """Format the mean, the deviation over seeds, and an interval if all seeds have one."""
    if not seeds:
        return "-"
    figure = with_deviation([seed["value"] for seed in seeds], _digits)
    low, high = map(_digits, _bounds(seeds))
    return figure + (f" [{low}, {high}]" if low and high else "")


def _bounds(seeds: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the bounds of a mean over seeds; NaN, NaN if a seed has none."""
    values, lows, highs = ([seed[name] for seed in seeds] for name in ("value", "low", "high"))
    low, high = mean_bounds(values, lows, highs)
    if any(seed["value"] in (seed["low"], seed["high"]) for seed in seeds):
        # Exact bounds of a share of 0 or 100 % are on one side, not around it.
        low, high = min(low, statistics.fmean(lows)), max(high, statistics.fmean(highs))
        low, high = max(low, 0.0), min(high, 100.0)
    return low, high


def _mean(values: Sequence[float]) -> str:
    """Format the mean of some values; "" if one is not known."""
    return _digits(statistics.fmean(values))


def _digits(value: float) -> str:
    """Format a number, with more digits for rates of 0 to 1 than for % and dB; "" for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.2f}"
