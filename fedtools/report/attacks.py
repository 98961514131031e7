"""Attacks on several experiments side by side: means over clients, and over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from fedtools.files.errors import UserError
from fedtools.files.ledger import SERVER_ROW
from fedtools.files.tables import read_tsv, write_tsv


def merge_attacks(tables: Sequence[tuple[str, Path]], out: Path) -> None:
    """Write a table of attacks, a column for each name: the mean over clients.

    Args:
        tables: names, and what `fedtools attack features` wrote; those of one name are seeds, over
            which there is a standard deviation too.
        out: the table.

    Raises:
        UserError: if a table is missing or malformed.
    """
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    chances: dict[tuple[str, str], list[float]] = {}
    for name, path in tables:
        of_seed: dict[tuple[str, str], list[float]] = {}
        for line, row in enumerate(read_tsv(path, None), 2):
            try:
                key = row["attack"], row["measure"]
                if row["client"] == SERVER_ROW or row["value"] == "-":
                    continue
                of_seed.setdefault(key, []).append(float(row["value"]))
                if row["chance"] != "-":
                    chances.setdefault(key, []).append(float(row["chance"]))
            except (KeyError, ValueError):
                raise UserError("no row of attack features", path=path, line=line) from None
        for key, values in of_seed.items():
            found.setdefault(key, {}).setdefault(name, []).append(statistics.fmean(values))
    names = list(dict.fromkeys(name for name, _ in tables))
    rows = []
    for (attack, measure), values in found.items():
        chance = chances.get((attack, measure))
        rows.append(
            {
                "Attack": attack,
                "Measure": measure,
                "Chance": _digits(statistics.fmean(chance)) if chance else "-",
                **{name: _spread(values.get(name, [])) for name in names},
            }
        )
    write_tsv(out, ["Attack", "Measure", "Chance", *names], rows)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {_digits(statistics.stdev(values))}" if len(values) > 1 else ""
    return f"{_digits(statistics.fmean(values))}{spread}"


def _digits(value: float) -> str:
    """Rates of 0 to 1 need more of them than % and dB."""
    return f"{value:.1f}" if abs(value) >= 2 else f"{value:.2f}"
