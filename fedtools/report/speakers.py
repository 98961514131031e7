"""A picture of speakers' utterances before and after adaptation: Zhu et al. 2022, figure 4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from fedtools.report.plots import COLOURS, drawing

_KINDS = {"unadapted": "o", "personalised": "^"}


def plot_speakers(
    path: Path, places: dict[str, np.ndarray], speakers: np.ndarray, names: list[str], title: str
) -> None:
    """Draw utterances as points, a colour for each speaker.

    Args:
        path: the PNG.
        places: "unadapted" (circles) and "personalised" (triangles) -> (utterances, 2).
        speakers: (utterances,) numbers of speakers from 0; at most as many as there are colours.
        names: of the speakers.
        title: of the picture.
    """
    with drawing(path, (5.4, 3.6)) as figure:
        axes = figure.subplots()
        axes.grid(False)
        for kind, points in places.items():
            for speaker in range(len(names)):
                rows = speakers == speaker
                look = {"color": COLOURS[speaker], "marker": _KINDS[kind], "linestyle": "none"}
                axes.plot(*points[rows].T, **look, markeredgewidth=0, alpha=0.75)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(title, loc="left", fontsize=10)
        marks = [
            Line2D([], [], color="0.4", marker=marker, linestyle="none", label=kind)
            for kind, marker in _KINDS.items()
        ]
        marks += [
            Line2D([], [], color=COLOURS[number], linewidth=4, label=name)
            for number, name in enumerate(names)
        ]
        axes.legend(handles=marks, loc="upper left", bbox_to_anchor=(1.0, 1.0))
