"""A leakage card as a picture: darker cells reveal more."""

from __future__ import annotations

from pathlib import Path

from fedtools.core.drawing import drawing
from fedtools.report.card import Card, by_row

# Inches.
_ROW, _NAMES, _COLUMN, _HEAD = 0.2, 4.2, 1.5, 0.8
_COLOUR = "#0072B2"


def draw_card(path: Path, card: Card, title: str) -> None:
    """Draw all cells: values with their intervals, and below them the defences' costs.

    Args:
        path: the PNG.
        title: the name of what was attacked.
    """
    attacks, costs = by_row(card.cells), by_row(card.costs)
    rows, columns = len(attacks) + len(costs), len(card.defences)
    width = _NAMES + _COLUMN * columns
    with drawing(path, (width, _HEAD + _ROW * rows)) as figure:
        axes = figure.subplots()
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        for y, cells in enumerate([*attacks.values(), *costs.values()]):
            known = {cell.defence: cell for cell in cells}
            for x, name in enumerate(card.defences):
                if name not in known:
                    continue
                shade = 0.85 * known[name].leak if y < len(attacks) else 0.0
                axes.axvspan(
                    x, x + 1, 1 - (y + 1) / rows, 1 - y / rows, color=_COLOUR, alpha=shade, lw=0
                )
                colour = "white" if shade > 0.5 else "black"
                where = x + 0.5, y + 0.5
                axes.text(
                    *where, known[name].text, color=colour, size=6.5, ha="center", va="center"
                )
        axes.set_yticks(
            [y + 0.5 for y in range(rows)],
            [_name(key) for key in (*attacks, *costs)],
            fontsize=7,
        )
        names = [name.replace("+", " +\n").replace(",", ",\n") for name in card.defences]
        axes.set_xticks([x + 0.5 for x in range(columns)], names, fontsize=7)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(False)
        if costs:
            axes.axhline(len(attacks), color="black", linewidth=0.8)
        figure.suptitle(
            f"{title}: darker cells leak more, and white ones do not show a leak; "
            "the strongest layer and score in each",
            x=0.01,
            ha="left",
            fontsize=9,
        )


def _name(key: tuple[str, ...]) -> str:
    attack, of, attacker, measure = key
    parts = [f"{attack}: {of}", attacker if attacker != "-" else "", measure]
    return ", ".join(part for part in parts if part)
