"""Choosing the weights of an N-best list on validation data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.files.errors import UserError
from fedtools.files.nbest import Hypothesis
from fedtools.score.align import count_errors


@dataclass(frozen=True)
class Weights:
    """The best weights found, and the word error rate (a fraction) that they give."""

    lm_weight: float
    word_score: float
    wer: float


def best_weights(
    nbest: Mapping[str, Sequence[Hypothesis]],
    reference: Mapping[str, str],
    lm_weights: Sequence[float],
    word_scores: Sequence[float] = (0.0,),
    where: str | Path | None = None,
) -> Weights:
    """The weights whose rescored N-best lists have the fewest word errors; the first on a tie.

    Args:
        nbest: utterance -> hypotheses.
        reference: utterance -> words, the very same utterances.
        lm_weights: candidates; the LM's scores are natural logarithms.
        word_scores: candidates for what is added for each word.
        where: the file of the hypotheses, for messages.

    Raises:
        UserError: if the two have other utterances, or the reference has no words.
    """
    if different := sorted(set(nbest) ^ set(reference)):
        place = "reference" if different[0] in nbest else "N-best list"
        raise UserError(
            f"utterance {different[0]!r} is missing in the {place} ({len(different)} differ)",
            path=where,
            remedy="decode and tune on the same data directory",
        )
    length = sum(len(words.split()) for words in reference.values())
    if not length:
        remedy = "tune on a set with transcripts"
        raise UserError("the reference has no words", path=where, remedy=remedy)
    shape = (len(nbest), max(map(len, nbest.values())))
    acoustic, lm = np.full(shape, -np.inf), np.zeros(shape)
    words, errors = np.zeros(shape), np.zeros(shape, dtype=int)
    for row, (utterance, hypotheses) in enumerate(nbest.items()):
        spoken = reference[utterance].split()
        for column, hypothesis in enumerate(hypotheses):
            found = hypothesis.words.split()
            acoustic[row, column], lm[row, column] = hypothesis.acoustic, hypothesis.lm
            words[row, column] = len(found)
            errors[row, column] = count_errors(spoken, found).errors
    rows = np.arange(shape[0])
    grid = [
        Weights(lm_weight, word_score, errors[rows, best].sum() / length)
        for lm_weight in lm_weights
        for word_score in word_scores
        for best in [(acoustic + lm_weight * lm + word_score * words).argmax(1)]
    ]
    return min(grid, key=lambda weights: weights.wer)
