"""Speakers of a client on a plane, by t-SNE: Zhu et al. (Interspeech 2022), figure 4."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtools.attack.features import Victim
from fedtools.files.keyed import generator, seed64

_SPEAKERS, _UTTERANCES = 5, 40
_PERPLEXITY = 30.0


def draw_speakers(
    path: Path, victim: Victim, unadapted: np.ndarray, personalised: np.ndarray, seed: int
) -> None:
    """Draw the 5 speakers with the most utterances, at most 40 of each.

    Args:
        path: the PNG.
        unadapted, personalised: vectors of the victim's utterances, (utterances, D) each.
        seed: of the choice of utterances and of t-SNE.
    """
    from fedtools.report.speakers import plot_speakers

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
    plot_speakers(path, halves, np.array(speakers), names, title)


def _on_a_plane(vectors: np.ndarray, state: int) -> np.ndarray:
    """t-SNE of (points, D) vectors: (points, 2)."""
    from sklearn.manifold import TSNE

    perplexity = min(_PERPLEXITY, (len(vectors) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=state).fit_transform(vectors)
