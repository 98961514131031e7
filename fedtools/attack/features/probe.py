"""Probe of the speaker information in features: a classifier trained on a part of them.

Attack II has nothing but the features that were sent, and an adversary in training may have been
weak. Here a new linear classifier is given the speakers of four fifths of a client's utterances and
names those of the last fifth: it shows which information is there, even if other attacks miss it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from fedtools.attack.features.figures import Figure, Speakers
from fedtools.core.seeds import generator

_PARTS = 5


def probe_speakers(
    attack: str, vectors: np.ndarray, speakers: Speakers, key: tuple[int | str, ...]
) -> Iterator[Figure]:
    """Yield the share of utterances whose speaker is named correctly.

    Chance is to name the most frequent speaker. Values of the vectors are standardised on the
    training part: with means far from 0 or very different deviations, training would not converge
    in reasonable time.

    Args:
        attack: name of the attack.
        vectors: (utterances, D).
        speakers: speakers of the utterances.
        key: (seed, ...), random seed.
    """
    numbers = speakers.numbers
    parts = parts_of(numbers, generator(*key, "probe"))
    right = _named(vectors, numbers, parts) == numbers
    chance = 100 * float(np.bincount(numbers).max()) / len(numbers)
    yield speakers.ratio(attack, "named%", right, np.ones(len(right)), chance, 100)


def _named(vectors: np.ndarray, numbers: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return the speaker of each utterance by a classifier trained on the other parts.

    A single utterance has no training data, and gets -1.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    named = np.full(len(numbers), -1)
    for part in np.unique(parts):
        tested = parts == part
        known = np.unique(numbers[~tested])
        if len(known) == 1:
            named[tested] = known
        elif len(known) > 1:
            model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit(vectors[~tested], numbers[~tested])
            named[tested] = model.predict(vectors[tested])
    return named


def parts_of(numbers: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the part in which each utterance is held out, balanced for each speaker."""
    order = np.lexsort((random.random(len(numbers)), numbers))
    found = np.empty(len(numbers), int)
    found[order] = np.arange(len(numbers)) % _PARTS
    return found
