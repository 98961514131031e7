"""The matched-pair sentence segment word error test between two systems.

L. Gillick and S. Cox, "Some statistical issues in the comparison of speech recognition
algorithms", ICASSP 1989; the segmentation is that of NIST's sc_stats. It is symmetric here:
sc_stats overlooks a second system's insertions after the last word.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The number of words in a row, correct in both systems, that separates two segments.
_BUFFER = 2


@dataclass(frozen=True)
class Mapsswe:
    """The outcome: `difference` is the mean of A's errors minus B's over `segments` segments.

    `z` is its distance from zero in standard errors, and `p` is two-tailed; both are NaN if all
    segments have the same difference, other than zero.
    """

    segments: int
    difference: float
    z: float
    p: float


def mapsswe(pairs: Sequence[tuple[str, str]]) -> Mapsswe:
    """Test whether two systems make equally many errors.

    Args:
        pairs: for each utterance, the operations (see `align.align`) of system A and of system B
            against the same reference.
    """
    differences = [a - b for pair in pairs for a, b in segment_errors(*pair)]
    count = len(differences)
    if not any(differences):
        return Mapsswe(count, 0.0, 0.0, 1.0)
    mean = statistics.fmean(differences)
    if len(set(differences)) == 1:
        return Mapsswe(count, mean, math.nan, math.nan)
    z = mean / (statistics.stdev(differences) / math.sqrt(count))
    return Mapsswe(count, mean, z, math.erfc(abs(z) / math.sqrt(2)))


def segment_errors(a: str, b: str) -> list[tuple[int, int]]:
    """Return the errors of A and B in each segment of one utterance that has an error of either.

    Segments are separated by at least two words in a row that both systems have right, without an
    insertion between them, and by the utterance's ends.
    """
    segments = []
    open_errors = [0, 0]
    correct = 0
    for steps in zip(_by_word(a), _by_word(b), strict=True):
        # A step is one reference word with the insertions before it.
        insertions = [step.count("I") for step in steps]
        if any(insertions):
            correct = 0
        wrong = [step[-1:] in ("S", "D") for step in steps]
        open_errors = [sum(errors) for errors in zip(open_errors, insertions, wrong, strict=True)]
        correct = 0 if any(wrong) else correct + 1
        if correct == _BUFFER and any(open_errors):
            segments.append(tuple(open_errors))
            open_errors = [0, 0]
    return [*segments, tuple(open_errors)] if any(open_errors) else segments


def _by_word(operations: str) -> list[str]:
    """Split after each reference word; the last part holds the insertions after the last word."""
    parts = [""]
    for letter in operations:
        parts[-1] += letter
        if letter != "I":
            parts.append("")
    return parts
