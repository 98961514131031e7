"""Linkability and singling out: what data protection asks of anonymous data, as probabilities.

N. Vauquier, B. M. L. Srivastava, S. A. Hosseini, E. Vincent, "Legally validated evaluation
framework for voice anonymization" (Interspeech 2025). Linkability is computed by their own package,
but for ties; singling out is a rule of ours by their definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Risk(NamedTuple):
    """What an attacker achieves; NaN where no speaker has two items, or there is one speaker.

    Attributes:
        linked: how often a speaker's second item scores highest with its first, of all speakers'.
            By chance 1 / speakers. Where m first items score highest alike, one is guessed: that
            counts 1 / m. (The package counts it 1, so that scores that tell nothing link all.)
        singled: how often "scores above a threshold with this speaker's first item" is true of one
            single speaker's second item. By chance about 1 / 4.
        speakers: among whom a second item is linked.
    """

    linked: float
    singled: float
    speakers: int


def risk(scores: np.ndarray, speakers: Sequence[str]) -> Risk:
    """The risk of speakers with one or more items, of scores of all pairs of items.

    The threshold of a predicate is the highest score of the others' first items. (The framework
    sets it by third items, of the predicate's own speaker too, and lets one pass: chance is then
    exp(-1). Personalised models are too few for that.)

    Args:
        scores: (items, items), large where two seem to be of one speaker; may be infinite.
        speakers: (items,), of each item.
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
    # Among all speakers whoever is beaten once is not linked.
    linked = float(np.mean((count_beaters(matrix) == 0) / alike))
    second = np.array([own[1] for own in items if len(own) > 1])
    isolated = []
    for number in range(len(names)):
        others = np.delete(scores[first[number], first], number)
        if len(items[number]) > 1:
            isolated.append((scores[first[number], second] > others.max()).sum() == 1)
    return Risk(linked, float(np.mean(isolated)) if isolated else float("nan"), len(names))
