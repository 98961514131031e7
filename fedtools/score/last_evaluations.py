"""Which models of an experiment its accuracy is of: those of its last evaluations.

X.-C. Li et al. record accuracy every three rounds; their legends have the mean of "the final 5
communication rounds". Here that is the mean of the last five evaluations: of their accuracies, not
of their models or of what these predict together. Differences of methods are of the same five.
"""

from __future__ import annotations

from collections.abc import Iterable

LAST = 5
# Counts of clips by round and speaker, beside an experiment's accuracies.
SPEAKER_COLUMNS = ("round", "speaker", "clips", "errors")


def last_of(rounds: Iterable[int]) -> list[int]:
    """The rounds of the last evaluations; the start, round 0, only where it is all there is."""
    found = sorted(rounds)
    return [number for number in found if number][-LAST:] or found[:1]
