"""The pictures of keyword spotting's results: figures 2 and 3 of X.-C. Li et al. 2022."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from runs import Run, Runs, network_title, title_of
from tables import SYMBOLS, ablation, ablations, varied

from fedtools.core.drawing import drawing, every, line_style


def plot_accuracy(path: str | Path, runs: Runs, title: str) -> None:
    """Draw figure 2: accuracy by round, by task (rows), network (columns) and method (lines).

    Args:
        path: the PNG.
        runs: runs of at least one federated method; bands are standard deviations over seeds. If
            servers train alone, their final accuracy and that of centralised training are levels.
        title: the title of the whole figure.
    """
    methods = runs.methods(True)
    # A server's rounds are not those of a federation.
    levels = [*runs.alone, ("centralized", "", "")] if runs.alone else []
    networks = list(dict.fromkeys(network for _, network in runs.columns))
    # Rows of servers have long names.
    wide, most = (4.0, 2) if levels else (2.4, 3)
    size = wide * len(networks) + 1.2, 2.4 * len(runs.tasks) + 1.1
    with drawing(path, size) as figure:
        panels = figure.subplots(len(runs.tasks), len(networks), squeeze=False)
        for row, task in zip(panels, runs.tasks, strict=True):
            for axes, network in zip(row, networks, strict=True):
                for index, method in enumerate(methods):
                    if found := runs.get(task, network, method):
                        _line(axes, found, title_of(method), index)
                for index, setting in enumerate(levels, len(methods)):
                    if found := runs.get(task, network, *setting):
                        level(axes, found, varied(*setting), index)
                if levels:
                    _leave_out_untrained(axes)
                axes.set_title(f"{network_title(network)}, task {task}", fontsize=9)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            row[0].set_ylabel("Test accuracy (%)")
        for axes in panels[-1]:
            axes.set_xlabel("Round")
        shown = {line.get_label(): line for axes in panels.flat for line in axes.get_lines()}
        figure.suptitle(title, fontsize=10, wrap=True)
        names = [*map(title_of, methods), *(varied(*setting) for setting in levels)]
        names = [name for name in names if name in shown]
        columns = min(len(names), max(most, 2 * len(networks)))
        lines = [shown[name] for name in names]
        figure.legend(lines, names, loc="outside lower center", ncols=columns)


def _line(axes: Axes, runs: Sequence[Run], name: str, index: int) -> None:
    curve = mean_curve(runs)
    rounds = list(curve)
    means, spreads = (np.array(values) for values in zip(*curve.values(), strict=True))
    axes.plot(rounds, means, label=name, markevery=every(rounds), **line_style(index))
    if spreads.any():
        band = {"color": line_style(index)["color"], "alpha": 0.15, "linewidth": 0}
        axes.fill_between(rounds, means - spreads, means + spreads, **band)


def level(axes: Axes, runs: Sequence[Run], name: str, index: int) -> None:
    """Draw the mean final accuracy of runs as a dashed line across a panel."""
    mean, _ = mean_and_spread(run.lasting for run in runs)
    axes.axhline(mean, label=name, color=line_style(index)["color"], linestyle="--", linewidth=1)


def _leave_out_untrained(axes: Axes) -> None:
    """Begin the axis below the curves of trained models, or round 0 would press levels together."""
    trained = [
        accuracy
        for line in axes.get_lines()
        for number, accuracy in zip(*map(np.ravel, line.get_data()), strict=True)
        if number > 0 or line.get_linestyle() == "--"
    ]
    if trained:
        low, high = min(trained), max(trained)
        margin = max(0.05 * (high - low), 0.5)
        axes.set_ylim(low - margin, high + margin)


def plot_ablation(path: str | Path, runs: Runs, title: str) -> None:
    """Draw figure 3: FedAvg against ALT alone, and FedKWS-UI by its mu and its lambda.

    Panels are those that `ablations` names; bars are standard deviations over seeds.
    """
    panels = ablations(runs)
    with drawing(path, (3.2 * max(len(panels), 2), 3.9)) as figure:
        (row,) = figure.subplots(1, len(panels), squeeze=False)
        for axes, option in zip(row, panels, strict=True):
            if option in SYMBOLS:
                _draw_option(axes, runs, option, SYMBOLS[option])
            else:
                _draw_alt(axes, runs)
            axes.set_ylabel("Test accuracy (%)")
        figure.suptitle(title, fontsize=10, wrap=True)


def _draw_alt(axes: Axes, runs: Runs) -> None:
    places = [place for place in runs.columns if runs.get(*place, "alt")]
    for index, method in enumerate(("fedavg", "alt")):
        seeds = enumerate(runs.get(*place, method) for place in places)
        found = {at + (index - 0.5) * 0.25: own for at, own in seeds if own}
        points(axes, list(found), list(found.values()), title_of(method), index, "none")
    names = [f"{network_title(network)}, {task}" for task, network in places]
    axes.set_xticks(range(len(places)), names, rotation=30, ha="right")
    shown = (runs.get(*place, method) for place in places for method in ("fedavg", "alt"))
    axes.set_xlim(-0.6, len(places) - 0.4)
    _title_and_legend(axes, "ALT alone", shown)


def _draw_option(axes: Axes, runs: Runs, option: str, symbol: str) -> None:
    varied = {place: ablation(runs, *place, "fedkws_ui", option) for place in runs.columns}
    values = sorted({value for found in varied.values() for value in found}, key=float)
    index = 0
    for (task, network), found in varied.items():
        if found:
            # Equidistant, because the values are 0 and steps of a factor of ten.
            at = [values.index(value) for value in found]
            name = f"{network_title(network)}, {task}"
            points(axes, at, list(found.values()), name, index, "-")
            index += 1
    shown = (seeds for found in varied.values() for seeds in found.values())
    axes.set_xticks(range(len(values)), values)
    axes.set_xlabel(symbol)
    _title_and_legend(axes, f"FedKWS-UI by {symbol}", shown)


def points(
    axes: Axes, at: Sequence[float], runs: Sequence[Sequence[Run]], name: str, index: int, line: str
) -> None:
    """Draw final accuracies, means with standard deviations over seeds, at some places."""
    found = [mean_and_spread(run.lasting for run in seeds) for seeds in runs]
    means, spreads = [mean for mean, _ in found], [spread or 0.0 for _, spread in found]
    axes.errorbar(at, means, spreads, linestyle=line, capsize=2.5, label=name, **line_style(index))


def _title_and_legend(axes: Axes, title: str, found: Iterable[Sequence[Run]]) -> None:
    """Draw a panel's title, with the number of seeds that it shows, and its legend."""
    counts = sorted({len(runs) for runs in found if runs})
    seeds = f"{' or '.join(map(str, counts))} seed{'' if counts == [1] else 's'}"
    axes.set_title(f"{title} ({seeds})", fontsize=9, pad=26)
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.99)}
    axes.legend(ncols=2, fontsize=8, columnspacing=1, handletextpad=0.4, **place)


def mean_and_spread(values: Iterable[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation, which is None for a single value."""
    values = list(values)
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def mean_curve(runs: Sequence[Run]) -> dict[int, tuple[float, float]]:
    """Return round -> mean and standard deviation (0 for one seed), of all seeds' common rounds."""
    rounds = sorted(set.intersection(*(set(run.accuracy) for run in runs)))
    found = {at: mean_and_spread(run.accuracy[at] for run in runs) for at in rounds}
    return {at: (mean, spread or 0.0) for at, (mean, spread) in found.items()}
