"""False rejects at given false accepts, of clips and per hour of running speech: table and picture.

A figure is the mean over seeds of each model's false rejects at the threshold at which this model
has the given false accepts, because thresholds of different models are not comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from runs import Run, Runs, network_title, title_of
from scipy.stats import norm
from tables import by_value, cell, varied

from fedtools.core.errors import UserError
from fedtools.core.tables import format_markdown, number, read_tsv
from fedtools.federation.kws.running_speech import COLUMNS, CURVE
from fedtools.score.detection import AN_HOUR, DET, OF_CLIPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DET_FILE, ALARMS, HEARD = "det_test.tsv", "false_alarms_", "curve_"
NOTE = (
    "A clip, or a sliding window of speech, is accepted as the most probable keyword if its log "
    "odds are above a threshold. FR: clips of keywords below the threshold that gives the false "
    "accepts (FA) of the column, in %. FA are in % of the clips of negative classes, or per hour "
    "of speech whose transcripts have no keyword, where at most one word is accepted within the "
    "length of a clip. A column that amounts to less than one clip allows no false accept."
)
# Ticks and ends of the axes with normal deviate scales, in %.
_TICKS = (0.1, 1, 5, 20, 50, 80, 95, 99)
_ENDS = (0.05, 99.7)
_POINTS = 200

Curve = tuple[np.ndarray, np.ndarray]
"""False accepts, rising, and false rejects in %."""


def speech_of(runs: Runs) -> dict[str, float]:
    """Return name -> hours of the running speech that runs were tested on.

    Raises:
        UserError: if runs were tested on different hours of it.
    """
    found: dict[str, float] = {}
    for run in runs.having():
        for path in sorted(run.path.glob(f"{ALARMS}*.tsv")):
            name = path.stem.removeprefix(ALARMS)
            hours = (_row(run, name) or {})["hours"]
            if found.setdefault(name, hours) != hours:
                problem = f"{hours:g} hours of {name}, but other runs have {found[name]:g}"
                raise UserError(problem, path=path, remedy="run fedtools false-alarms again")
    return found


def threshold_table(runs: Runs) -> str:
    """Return the table of false rejects at given false accepts, "" if none were measured."""
    speech, rows = speech_of(runs), []
    for place in runs.places:
        settings = [at for at in runs.complete if at[:3] == place]
        for at in sorted(settings, key=lambda at: (at.option, by_value(at.value))):
            cells = [
                cell([value for run in runs.complete[at] for value in of(run)])
                for of in _columns(speech)
            ]
            if set(cells) != {"-"}:
                rows.append([at.task, network_title(at.network), varied(*at[2:]), *cells])
    header = ["Task", "Network", "Method", *(f"FR at FA {share:g} %" for share in OF_CLIPS)]
    for name, hours in speech.items():
        header += [f"{name} ({hours:.1f} h): FR at FA {rate:g} an hour" for rate in AN_HOUR]
    return format_markdown(header, rows, "lll" + "r" * (len(header) - 3)) if rows else ""


def _columns(speech: Iterable[str]) -> list[Callable[[Run], list[float]]]:
    """Return a function for each column that returns a run's value, as a list; [] if none."""

    def of_clips(share: float) -> Callable[[Run], list[float]]:
        return lambda run: [float(at(curve, share)) for curve in _det(run)]

    def an_hour(name: str, rate: float) -> Callable[[Run], list[float]]:
        column = f"rejects_at_{rate:g}"
        return lambda run: [row[column] for row in (_row(run, name),) if row]

    return [
        *(of_clips(share) for share in OF_CLIPS),
        *(an_hour(name, rate) for name in speech for rate in AN_HOUR),
    ]


def _row(run: Run, name: str) -> dict[str, float] | None:
    file = f"{ALARMS}{name}.tsv"
    return run.of_last(file, COLUMNS, COLUMNS[3:], "fedtools false-alarms")


def _det(run: Run) -> list[Curve]:
    """Read the DET curve of a run's clips, in %; return [] if it was not measured."""
    return _read(run.path / DET_FILE, DET, 100)


def _heard(run: Run, name: str) -> list[Curve]:
    return _read(run.path / f"{HEARD}{name}.tsv", (CURVE[0], CURVE[1], CURVE[2]), 1)


def _read(path: Path, columns: Sequence[str], scale: float) -> list[Curve]:
    if not path.exists():
        return []
    rows = read_tsv(path, columns)
    accepts, rejects = (
        np.array([scale * number(row, name, path, line) for line, row in enumerate(rows, 2)])
        for name in (columns[2], columns[1])
    )
    order = np.lexsort((-rejects, accepts))
    return [(accepts[order], rejects[order])]


def at(curve: Curve, accepts: float | np.ndarray) -> np.ndarray:
    """Return false rejects at the lowest threshold with no more false accepts, 100 % if none."""
    places = np.searchsorted(curve[0], accepts, "right") - 1
    return np.where(places >= 0, curve[1][places.clip(0)], 100.0)


# --- the picture ----------------------------------------------------------------------------------


def plot_thresholds(path: Path, runs: Runs, title: str) -> None:
    """Draw DET curves of clips, and false rejects by false accepts an hour, where measured.

    Args:
        path: the PNG.
        runs: runs with at least one of `places_drawn`.
        title: the title of the whole figure.
    """
    from fedtools.core.drawing import drawing

    speech, columns = speech_of(runs), places_drawn(runs)
    size = 3.2 * (1 + len(speech)) + 0.4, 2.7 * len(columns) + 0.8
    with drawing(path, size) as figure:
        panels = figure.subplots(len(columns), 1 + len(speech), squeeze=False)
        for row, place in zip(panels, columns, strict=True):
            _draw_place(row, runs, place, list(speech))
        panels[-1][0].set_xlabel("False accepts (%)")
        for axes in panels[-1][1:]:
            axes.set_xlabel("False accepts an hour")
        shown = {line.get_label(): line for axes in panels.flat for line in axes.get_lines()}
        figure.suptitle(title, fontsize=10, wrap=True)
        # A single panel has room for two names side by side.
        ncols = 4 if speech else 2
        names = list(shown)
        figure.legend(shown.values(), names, loc="outside lower center", ncols=ncols, fontsize=8)


def places_drawn(runs: Runs) -> list[tuple[str, str]]:
    """Return the tasks and networks for which a method without a changed option has a curve."""
    speech, found = speech_of(runs), list[tuple[str, str]]()
    for place in runs.columns:
        own = [run for one in runs.places if one[:2] == place for run in runs.get(*one)]
        if any(_det(run) or any(_heard(run, name) for name in speech) for run in own):
            found.append(place)
    return found


def _draw_place(row: Sequence[Axes], runs: Runs, place: tuple[str, str], speech: list[str]) -> None:
    """Draw the panels of a task and a network: of clips, and of each running speech."""
    from fedtools.core.drawing import line_style

    for index, method in enumerate((*runs.methods(True), *runs.methods(False))):
        seeds = runs.get(*place, method)
        style = {"color": line_style(index)["color"], "label": title_of(method)}
        if curves := [curve for run in seeds for curve in _det(run)]:
            deviates = np.linspace(_deviate(_ENDS[0]), _deviate(_ENDS[1]), _POINTS)
            row[0].plot(deviates, _mean(curves, 100 * norm.cdf(deviates)), **style)
        for axes, name in zip(row[1:], speech, strict=True):
            if curves := [curve for run in seeds for curve in _heard(run, name)]:
                most = max(float(accepts.max()) for accepts, _ in curves)
                accepts = np.geomspace(0.1, max(most, 1.0), _POINTS)
                axes.plot(accepts, _mean(curves, accepts), **style)
    ticks, texts = [_deviate(one) for one in _TICKS], [f"{one:g}" for one in _TICKS]
    for axes, what in zip(row, ["clips", *speech], strict=True):
        axes.set_title(f"{network_title(place[1])}, task {place[0]}: {what}", fontsize=9)
        axes.set_ylim(_deviate(_ENDS[0]), _deviate(_ENDS[1]))
        axes.set_yticks(ticks, texts)
    row[0].set_xticks(ticks, texts)
    row[0].set_ylabel("False rejects (%)")
    for axes in row[1:]:
        axes.set_xscale("log")


def _mean(curves: Sequence[Curve], accepts: np.ndarray) -> np.ndarray:
    """Return the mean over seeds of false rejects, as normal deviates within the picture."""
    mean = np.mean([at(curve, accepts) for curve in curves], 0)
    found: np.ndarray = norm.ppf(mean.clip(*_ENDS) / 100)
    return found


def _deviate(rate: float) -> float:
    return float(norm.ppf(rate / 100))
