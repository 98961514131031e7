"""Defences side by side: what each costs, and what it leaves of the attacks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtools.attack.attributes import COLUMNS as OF_ATTRIBUTES
from fedtools.attack.defences import NOTHING, UTILITY
from fedtools.attack.verify import COLUMNS, EASY
from fedtools.attack.weights import ALL, TOGETHER
from fedtools.files.errors import UserError
from fedtools.files.tables import known_number, read_tsv, write_tsv

# How the rates of `UTILITY` are called: another WER of the same model, of a search, is lower.
_RATES = {"wer": "greedy WER%"}


def merge_defences(defences: Sequence[tuple[str, Path]], utility: Path, out: Path) -> list[str]:
    """Write a table of defences, below what it costs to send nothing at all.

    The layer where A1 errs least without a defence, the first of them, is told of all; and the
    least of all layers, which is what an attacker has who knows where to look.

    Args:
        defences: their names, and folders with a1.tsv, and perhaps weights.tsv and attributes.tsv,
            which has no rows where sexes are not known.
        utility: what `fedtools attack utility` wrote.
        out: the table.

    Returns:
        its columns.

    Raises:
        UserError: if a table is missing or has no row of a defence.
    """
    costs = {row["defence"]: row for row in read_tsv(utility, UTILITY)}
    rows, fixed = [], ""
    for name in (NOTHING, *(name for name, _ in defences)):
        if name not in costs:
            raise UserError(f"no row of {name!r}", path=utility)
    for name, folder in defences:
        found = read_tsv(folder / "a1.tsv", COLUMNS, ("EER%", "low", "high"))
        layers = [row for row in found if row["trials"] == EASY and row["scores"] == "both"]
        if not layers:
            raise UserError(f"no row of {EASY} trials and both scores", path=folder / "a1.tsv")
        best = min(layers, key=_middle)
        fixed = fixed or best["layer"]
        told = next((row for row in layers if row["layer"] == fixed), None)
        row = {
            "Defence": name,
            **_cost(costs[name]),
            f"EER% of A1 at {fixed}": _rate(told) if told else "not sent",
            "Least EER%": f"{_rate(best)} at {best['layer']}",
        }
        if (path := folder / "weights.tsv").exists():
            row["EER% of updates"] = _of_updates(read_tsv(path, COLUMNS, ("EER%", "low", "high")))
        if (path := folder / "attributes.tsv").exists():
            row["Most accuracy% of sex"] = _most_accuracy(
                read_tsv(path, OF_ATTRIBUTES, ("accuracy%",))
            )
        rows.append(row)
    columns = list(rows[0])
    nothing = {**dict.fromkeys(columns, "-"), "Defence": NOTHING, **_cost(costs[NOTHING])}
    write_tsv(out, columns, [nothing, *rows])
    return columns


def _of_updates(rows: Sequence[dict[str, str]]) -> str:
    """Of all parts together, or of all weights as one vector where no regression was trained."""
    found = {row["layer"]: row for row in rows if row["trials"] == EASY}
    return next((f"{_rate(found[one])}" for one in (TOGETHER, ALL) if one in found), "not sent")


def _most_accuracy(layers: Sequence[Mapping[str, str]]) -> str:
    """Of the layer that tells sex best; "-" where no layer has figures."""
    if not layers:
        return "-"
    best = max(layers, key=lambda one: known_number(one["accuracy%"], -math.inf))
    return f"{best['accuracy%']} [{best['low']}, {best['high']}] at {best['layer']}"


def _cost(row: Mapping[str, str]) -> dict[str, str]:
    return {_RATES.get(row["rate"], row["rate"]): row["value"]}


def _middle(row: dict[str, str]) -> float:
    """The error rate, or the middle of its interval where there are too few trials to tell it."""
    if row["EER%"] != "-":
        return float(row["EER%"])
    return (known_number(row["low"], math.inf) + known_number(row["high"], math.inf)) / 2


def _rate(row: dict[str, str]) -> str:
    bounds = f"[{row['low']}, {row['high']}]"
    return bounds if row["EER%"] == "-" else f"{row['EER%']} {bounds}"
