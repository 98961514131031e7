"""Plots of a client's speakers by t-SNE: Zhu et al. (Interspeech 2022), figure 4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D

from fedtools.attack.features.sent import Victim
from fedtools.core.drawing import COLOURS, drawing
from fedtools.core.seeds import generator, seed64

_SPEAKERS, _UTTERANCES = 5, 40
_PERPLEXITY = 30.0
_KINDS = {"unadapted": "o", "personalised": "^"}


def draw_speakers(
    path: Path, victim: Victim, unadapted: np.ndarray, personalised: np.ndarray, seed: int
) -> None:
    """Draw the 5 speakers with the most utterances, at most 40 of each.

    Args:
        path: the PNG file.
        unadapted, personalised: vectors of the victim's utterances, (utterances, D) each.
        seed: random seed of the choice of utterances and of t-SNE.
    """
    sizes = np.bincount(victim.speakers)
    chosen = np.sort(np.argsort(-sizes, kind="stable")[:_SPEAKERS])
    rows, speakers = [], []
    for number, speaker in enumerate(chosen):
        own = np.flatnonzero(victim.speakers == speaker)
        random = generator(seed, "picture", victim.client, number)
        own = np.sort(random.permutation(own)[:_UTTERANCES])
        rows.append(own)
        speakers += [number] * len(own)
    rows = np.concatenate(rows)
    both = np.concatenate([unadapted[rows], personalised[rows]])
    places = _on_a_plane(both, seed64(seed, "picture", victim.client) % 2**32)
    halves = {"unadapted": places[: len(rows)], "personalised": places[len(rows) :]}
    names = [victim.speaker_names[speaker] for speaker in chosen]
    title = f"Client {victim.client}: features of {len(rows)} utterances, t-SNE"
    _plot(path, halves, np.array(speakers), names, title)


def _on_a_plane(vectors: np.ndarray, state: int) -> np.ndarray:
    """Map vectors, (points, D), to a plane by t-SNE: (points, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(_PERPLEXITY, (len(vectors) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=state).fit_transform(vectors)


def _plot(
    path: Path, places: dict[str, np.ndarray], speakers: np.ndarray, names: list[str], title: str
) -> None:
    """Draw utterances as points, a colour for each speaker.

    Args:
        path: the PNG file.
        places: "unadapted" (circles) and "personalised" (triangles) -> (utterances, 2).
        speakers: (utterances,) numbers of speakers from 0; at most as many as there are colours.
        names: names of the speakers.
        title: title of the picture.
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
