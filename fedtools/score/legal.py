"""Linkability and singling out: data protection's criteria for anonymous data, as probabilities.

N. Vauquier, B. M. L. Srivastava, S. A. Hosseini, E. Vincent, "Legally validated evaluation
framework for voice anonymization" (Interspeech 2025). Linkability is computed by their own package,
except for ties; singling out is our own rule by their definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Risk(NamedTuple):
    """An attacker's success rates; NaN if no speaker has two items, or there is one speaker.

    Attributes:
        linked: how often a speaker's later item scores highest with its own first item among all
            speakers' first items. By chance 1 / speakers. If m first items tie for the highest
            score, one is guessed, which counts 1 / m. (The package counts it 1, so that constant
            scores link all.)
        singled: how often "scores above a threshold with this speaker's first item" is true of
            exactly one speaker's second item. By chance about 1 / 4.
        speakers: the number of speakers among whom an item is linked.
    """

    linked: float
    singled: float
    speakers: int


def risk(scores: np.ndarray, speakers: Sequence[str]) -> Risk:
    """Compute the risk of speakers with one or more items, from scores of all pairs of items.

    The threshold of a predicate is the highest score of the other speakers' first items. (The
    framework sets it by third items, including that of the predicate's own speaker, and lets one
    pass: chance is then exp(-1). There are too few personalised models for that.)

    Args:
        scores: (items, items), large if two items seem to be of one speaker; may be infinite.
        speakers: (items,), the speaker of each item.
    """
    from legal_eval.io import ScoreMatrix
    from legal_eval.metrics.linkability import count_beaters

    names, owner = np.unique(speakers, return_inverse=True)
    items = [np.flatnonzero(owner == number) for number in range(len(names))]
    first = np.array([own[0] for own in items])
    later = np.concatenate([own[1:] for own in items])
    if len(names) < 2 or not len(later):
        return Risk(float("nan"), float("nan"), len(names))
    own = scores[np.ix_(first, later)]
    matrix = ScoreMatrix(own, names.tolist(), names[owner[later]].tolist(), {})
    alike = (own == own[owner[later], np.arange(len(later))]).sum(0)
    # An item is linked only if no speaker beats its own.
    linked = float(np.mean((count_beaters(matrix) == 0) / alike))
    second = np.array([own[1] for own in items if len(own) > 1])
    isolated = []
    for number in range(len(names)):
        others = np.delete(scores[first[number], first], number)
        if len(items[number]) > 1:
            isolated.append((scores[first[number], second] > others.max()).sum() == 1)
    return Risk(linked, float(np.mean(isolated)) if isolated else float("nan"), len(names))
