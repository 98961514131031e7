"""What features still tell of speakers, to a classifier that is taught with a part of them.

Attack II knows nothing but what was sent, and an adversary of training may have been a poor one. A
linear classifier that is new, and given the speakers of four fifths of a client's utterances, names
those of the last fifth: what it finds is there, whatever other attacks make of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from fedtools.attack.figures import Figure, Speakers
from fedtools.files.seeds import generator

_PARTS = 5


def probe_speakers(
    attack: str, vectors: np.ndarray, speakers: Speakers, key: tuple[int | str, ...]
) -> Iterator[Figure]:
    """The share of utterances whose speaker is named rightly; chance names the most frequent one.

    Each value of the vectors is standardised by those that are taught: with means far from 0, or
    deviations far apart, a classifier learns nothing in any reasonable time.

    Args:
        attack: its name.
        vectors: (utterances, D).
        speakers: of these.
        key: (seed, ...) of everything random.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    numbers = speakers.numbers
    parts, right = parts_of(numbers, generator(*key, "probe")), np.zeros(len(numbers))
    for part in range(_PARTS):
        held = parts == part
        if not held.any() or len(np.unique(numbers[~held])) < 2:
            # Of one speaker alone all are this one's.
            right[held] = numbers[held] == (numbers[~held][0] if (~held).any() else -1)
            continue
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(vectors[~held], numbers[~held])
        right[held] = model.predict(vectors[held]) == numbers[held]
    chance = 100 * float(np.bincount(numbers).max()) / len(numbers)
    yield speakers.ratio(attack, "named%", right, np.ones(len(right)), chance, 100)


def parts_of(numbers: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """In which part each utterance is held out: of each speaker as many in one as in another."""
    order = np.lexsort((random.random(len(numbers)), numbers))
    found = np.empty(len(numbers), int)
    found[order] = np.arange(len(numbers)) % _PARTS
    return found
