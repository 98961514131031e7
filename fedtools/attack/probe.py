"""What features still tell of speakers, to a classifier that is taught with a part of them.

Attack II knows nothing but what was sent, and an adversary of training may have been a poor one. A
linear classifier that is new, and given the speakers of four fifths of a client's utterances, names
those of the last fifth: what it finds is there, whatever other attacks make of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedtools.attack.attributes import cross_validated
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
    numbers = speakers.numbers
    parts = parts_of(numbers, generator(*key, "probe"))
    told = cross_validated(vectors, vectors, numbers, speakers.count, parts, C=1.0)
    # A lone utterance has nobody to be told by.
    right = told.any(1) & (told.argmax(1) == numbers)
    chance = 100 * float(np.bincount(numbers).max()) / len(numbers)
    yield speakers.ratio(attack, "named%", right, np.ones(len(right)), chance, 100)


def parts_of(numbers: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """In which part each utterance is held out: of each speaker as many in one as in another."""
    order = np.lexsort((random.random(len(numbers)), numbers))
    found = np.empty(len(numbers), int)
    found[order] = np.arange(len(numbers)) % _PARTS
    return found
