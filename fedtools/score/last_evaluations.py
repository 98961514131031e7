"""The last evaluations of an experiment, over which its accuracy is averaged.

X.-C. Li et al. record accuracy every three rounds; their legends have the mean of "the final 5
communication rounds". Here that is the mean of the last five evaluations: of their accuracies, not
of their models or predictions. Differences of methods are over the same five.
"""

from __future__ import annotations

from collections.abc import Iterable

LAST = 5
# Columns of the clips' counts by round and speaker, which are kept next to the accuracies.
SPEAKER_COLUMNS = ("round", "speaker", "clips", "errors")
# The rate in the file of errors by clip, over the same evaluations.
CLIP = "clip"


def last_of(rounds: Iterable[int]) -> list[int]:
    """Return the rounds of the last evaluations; round 0, the start, only if there is no other."""
    found = sorted(rounds)
    return [number for number in found if number][-LAST:] or found[:1]
