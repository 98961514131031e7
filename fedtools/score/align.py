"""The alignment of a hypothesis with its reference that NIST's sclite makes, ties included."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# sclite's costs: a substitution costs less than a deletion and an insertion together, but more
# than either.
_SUBSTITUTION, _GAP = 4, 3
# sclite compares without regard to case (its -s is off), and knows ASCII's letters only.
_FOLD = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


class Counts(NamedTuple):
    """Counts of an alignment, in tokens: `correct + substitutions + deletions` = reference."""

    correct: int
    substitutions: int
    deletions: int
    insertions: int

    @classmethod
    def of(cls, operations: str) -> Counts:
        """Count the letters that `align` returned."""
        return cls(*(operations.count(letter) for letter in "CSDI"))

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the reference."""
        return self.correct + self.substitutions + self.deletions

    @property
    def errors(self) -> int:
        """Return the sum of substitutions, deletions and insertions."""
        return self.substitutions + self.deletions + self.insertions

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, self, other))


def count_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> Counts:
    """Count the steps of sclite's alignment of two token sequences; see `align`."""
    return Counts.of(align(reference, hypothesis))


def align(reference: Sequence[str], hypothesis: Sequence[str]) -> str:
    """Align two token sequences at the least cost: insertion and deletion 3, substitution 4.

    Among alignments of equal cost it is the one that sclite 2.10 takes: traced from the end,
    a pair of tokens before an insertion before a deletion. The choice matters, because alignments
    of equal cost can have different numbers of errors.

    Args:
        reference: tokens of the reference.
        hypothesis: tokens of the hypothesis; ASCII case is ignored, as sclite does by default.

    Returns:
        One letter for each step: C correct, S substituted, D deleted, I inserted.
    """
    numbers: dict[str, int] = {}
    ref, hyp = (
        [numbers.setdefault(token.translate(_FOLD), len(numbers)) for token in tokens]
        for tokens in (reference, hypothesis)
    )
    cost = _costs(ref, np.array(hyp, np.int64)).tolist()
    i, j = len(ref), len(hyp)
    letters = []
    while i or j:
        here = cost[i][j]
        same = i and j and ref[i - 1] == hyp[j - 1]
        if i and j and here == cost[i - 1][j - 1] + (0 if same else _SUBSTITUTION):
            i, j = i - 1, j - 1
            letters.append("C" if same else "S")
        elif j and here == cost[i][j - 1] + _GAP:
            j -= 1
            letters.append("I")
        else:
            i -= 1
            letters.append("D")
    return "".join(reversed(letters))


def _costs(ref: list[int], hyp: np.ndarray) -> np.ndarray:
    """Return the least cost of aligning each pair of prefixes, (reference + 1, hypothesis + 1)."""
    inserted = _GAP * np.arange(len(hyp) + 1)
    cost = np.empty((len(ref) + 1, len(hyp) + 1), np.int64)
    cost[0] = inserted
    for i, token in enumerate(ref, 1):
        cost[i] = cost[i - 1] + _GAP
        paired = cost[i - 1, :-1] + np.where(hyp == token, 0, _SUBSTITUTION)
        np.minimum(cost[i, 1:], paired, out=cost[i, 1:])
        # A run of insertions costs 3 each: a running minimum does in one step what a loop over
        # the row would.
        cost[i] = np.minimum.accumulate(cost[i] - inserted) + inserted
    return cost
