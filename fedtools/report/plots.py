"""The plots of RESULTS.md: error rate by round, and by model and test data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedtools.core.drawing import drawing, every, line_style
from fedtools.report.results import Method


def plot_wer(path: str | Path, methods: Sequence[Method], title: str) -> None:
    """Draw the validation error rate of each method by round, the mean over clients and seeds.

    A band goes from the lowest to the highest of several seeds.

    If all methods begin with the same figure in round 0 (the same model), it is a dashed line,
    named after the only method without an experiment, if there is one.

    Args:
        path: the PNG; the same input gives the same bytes.
        methods: at least one has a curve; those without are left out.
        title: of the plot.
    """
    curves = {method.name: method.curve for method in methods if method.curve}
    with drawing(path, (6.4, 3.4)) as figure:
        axes = figure.subplots()
        for index, (name, curve) in enumerate(curves.items()):
            means = [_mean(values) for values in curve.values()]
            axes.plot(list(curve), means, label=name, markevery=every(curve), **line_style(index))
            low, high = map(min, curve.values()), map(max, curve.values())
            colour = line_style(index)["color"]
            axes.fill_between(list(curve), [*low], [*high], color=colour, alpha=0.15, linewidth=0)
        _draw_start(axes, methods, curves)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("Round")
        axes.margins(x=0.02)
        rate = next(run.unit.title for method in methods for run in method.runs)
        axes.set_ylabel(f"{rate} on validation data,\nmean over clients (%)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def plot_cross(path: str | Path, maps: Mapping[str, Mapping[tuple[str, str], float]]) -> None:
    """Draw WER of each client's model on each client's data, a map for each name.

    Args:
        path: the PNG; the same input gives the same bytes.
        maps: name -> (model's client, data's client) -> WER, %.
    """
    # Shades show the loss relative to the best model on the same data, since differences between
    # data are larger than those between models.
    lost = {name: _lost(rates) for name, rates in maps.items()}
    most = max(max(one.values()) for one in lost.values())
    with drawing(path, (0.6 + 2.1 * len(maps), 2.4)) as figure:
        rows = figure.subplots(1, len(maps), squeeze=False)
        for axes, (name, rates) in zip(rows[0], maps.items(), strict=True):
            _draw_map(axes, rates, lost[name], most or 1.0)
            axes.set_title(name, fontsize=9)


def _lost(rates: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    best: dict[str, float] = {}
    for (_, data), rate in rates.items():
        best[data] = min(rate, best.get(data, rate))
    return {(model, data): rate - best[data] for (model, data), rate in rates.items()}


def _draw_map(
    axes: Axes,
    rates: Mapping[tuple[str, str], float],
    lost: Mapping[tuple[str, str], float],
    most: float,
) -> None:
    clients = sorted({model for model, _ in rates})
    shades = [[lost[model, data] for data in clients] for model in clients]
    axes.imshow(shades, "Blues", vmin=0, vmax=most)
    axes.grid(False)
    for y, model in enumerate(clients):
        for x, data in enumerate(clients):
            colour = "white" if lost[model, data] > 0.6 * most else "black"
            text = f"{rates[model, data]:.1f}"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(clients)), clients)
    axes.set_yticks(range(len(clients)), clients)
    axes.set_xlabel("test data of")
    axes.set_ylabel("model of")


def _draw_start(
    axes: Axes, methods: Sequence[Method], curves: Mapping[str, Mapping[int, Sequence[float]]]
) -> None:
    starts = {round(_mean(curve[0]), 4) if 0 in curve else None for curve in curves.values()}
    if len(starts) != 1 or None in starts:
        return
    others = [method.name for method in methods if method.runs[0].experiment is None]
    name = others[0] if len(others) == 1 else "Start"
    axes.axhline(starts.pop(), color="0.35", linestyle="--", linewidth=1, label=f"{name} (round 0)")


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
