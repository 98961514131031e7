"""Attacks on several experiments side by side: means over clients, and over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtools.files.errors import UserError
from fedtools.files.tables import read_tsv, with_deviation, write_tsv
from fedtools.score.bootstrap import AVERAGE


def merge_attacks(tables: Sequence[tuple[str, Path]], out: Path) -> None:
    """Write a table of attacks, a column for each name: the mean over clients, with its interval.

    Args:
        tables: names, and what `fedtools attack features` wrote; those of one name are seeds, over
            which values and bounds are averaged, and there is a standard deviation too.
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
    """Attack and measure -> the mean over clients, its bounds and chance; NaN is not known."""
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
            raise UserError("no row of attack features", path=path, line=line) from None
    if not found:
        remedy = "run fedtools attack features again"
        raise UserError(f"no row of {AVERAGE}", path=path, remedy=remedy)
    return found


def _cell(seeds: Sequence[Mapping[str, float]]) -> str:
    """Mean, standard deviation over several seeds, and the means of the bounds where all know."""
    if not seeds:
        return "-"
    figure = with_deviation([seed["value"] for seed in seeds], _digits)
    low, high = (_mean([seed[name] for seed in seeds]) for name in ("low", "high"))
    return figure + (f" [{low}, {high}]" if low and high else "")


def _mean(values: Sequence[float]) -> str:
    """Written out; "" if one is not known."""
    return _digits(statistics.fmean(values))


def _digits(value: float) -> str:
    """Rates of 0 to 1 need more of them than % and dB; of what is not known there are none."""
    if math.isnan(value):
        return ""
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.2f}"
