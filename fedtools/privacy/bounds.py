"""Bounds on what one word, utterance or user adds to a vector of counts, in whole steps.

A step is the grid of `plan`. All arithmetic is on integers, so that bounds hold exactly and sums do
not depend on their order. A vector within its bound is only rounded to the grid; a larger one is
scaled down as a whole, which keeps its distribution over words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

# Entries are clipped to this many steps, so that products fit into 64 bits.
_MANY = 1 << 41


@dataclass(frozen=True)
class Utterances:
    """Weighted word counts of a client's utterances, with one entry per utterance and word.

    Attributes:
        utterance: (entries,), int64: the utterance of each entry, from 0 and in order.
        word: (entries,), int64: the word's index in the public vocabulary.
        weight: (entries,), float64: the count, weighted over the N-best list (equation 3), above 0.
        number: the number of utterances, including those without words.
        size: the size of the vocabulary.
    """

    utterance: np.ndarray
    word: np.ndarray
    weight: np.ndarray
    number: int
    size: int

    @classmethod
    def of(cls, rows: Iterable[Mapping[int, float]], size: int) -> Utterances:
        """Create counts from one mapping per utterance, word -> weighted count.

        Raises:
            ValueError: see `entries`.
        """
        rows = list(rows)
        lengths = np.array([len(row) for row in rows], np.int64)
        words = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
        weights = np.fromiter(chain.from_iterable(r.values() for r in rows), float, lengths.sum())
        return cls.entries(
            np.repeat(np.arange(len(rows)), lengths), words, weights, len(rows), size
        )

    @classmethod
    def entries(
        cls, utterance: np.ndarray, word: np.ndarray, weight: np.ndarray, number: int, size: int
    ) -> Utterances:
        """Create counts from entries in any order; those of one word and utterance are added up.

        Bounding such entries one by one would let a word exceed its bound.

        Args:
            utterance, word, weight: (entries,), see the attributes; weights of 0 are dropped.
            number: the number of utterances.
            size: the size of the vocabulary.

        Raises:
            ValueError: if an index is out of range, or a weight negative or not finite.
        """
        utterance, word = np.asarray(utterance, np.int64), np.asarray(word, np.int64)
        weight = np.asarray(weight, np.float64)
        for name, index, end in (("utterance", utterance, number), ("word", word, size)):
            if index.size and not 0 <= index.min() <= index.max() < end:
                raise ValueError(f"{name} {index.min()} to {index.max()}, of {end}")
        if not (np.isfinite(weight).all() and (weight >= 0).all()):
            raise ValueError("a weight is negative or not finite")
        places, inverse = np.unique(utterance * size + word, return_inverse=True)
        sums = np.bincount(inverse, weight, len(places)) if len(places) else np.zeros(0)
        places, sums = places[sums > 0], sums[sums > 0]
        return cls(places // max(size, 1), places % max(size, 1), sums, number, size)

    def total(self) -> np.ndarray:
        """Return the sum over utterances without any bound, (size,), float64."""
        return np.bincount(self.word, self.weight, self.size).astype(np.float64)


def steps(weight: np.ndarray, grid: float) -> np.ndarray:
    """Round weights to whole steps, int64; `grid` is the length of a step."""
    rounded: np.ndarray = np.minimum(np.rint(weight / grid), _MANY)
    return rounded.astype(np.int64)


def bound_words(counts: np.ndarray, most: int) -> np.ndarray:
    """Clip each entry, of one word in one utterance, to at most `most` steps.

    Removing one entry changes the sum of all entries by at most `most` in L1.
    """
    bounded: np.ndarray = np.minimum(counts, most)
    return bounded


def bound_utterances(counts: np.ndarray, utterance: np.ndarray, most: int) -> np.ndarray:
    """Scale entries so that those of each utterance add up to at most `most` steps.

    Removing one utterance changes the sum of all entries by at most `most` in L1. Changing one,
    even by one word, changes it by at most twice as much, since its other words are rescaled.

    Args:
        counts: (entries,), int64, not negative.
        utterance: (entries,), the utterance of each entry.
        most: the bound.

    Returns:
        (entries,), int64.
    """
    sums = np.zeros(int(utterance.max(initial=-1)) + 1, np.int64)
    np.add.at(sums, utterance, counts)
    sums = sums[utterance]
    return np.where(sums > most, counts * most // np.maximum(sums, 1), counts)


def bound_user(counts: np.ndarray, spent: int, most: int) -> tuple[np.ndarray, int]:
    """Scale a client's counts of one round so that its whole history adds up to at most `most`.

    A round may use all of the remaining bound, which may leave nothing for later rounds. Removing
    the client from the experiment changes all its rounds together by at most `most` in L1; changing
    its history anywhere changes them by at most twice as much.

    Args:
        counts: (size,), int64, the round's new counts.
        spent: steps of this client's earlier rounds, which are private to it.
        most: the bound.

    Returns:
        The counts, and `spent` after this round.
    """
    left, total = max(most - spent, 0), int(counts.sum())
    if total > left:
        counts = np.minimum(counts, _MANY)
        counts = counts * left // max(int(counts.sum()), 1)
    return counts, spent + int(counts.sum())
