"""Second-pass rescoring from stored scores, word by word, for a whole run of utterances at once.

The neural language model is not run again: its log-probabilities of all words are stored.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedtools.core.config import NonNegative
from fedtools.core.errors import UserError
from fedtools.lm.vocabulary import END_ID
from fedtools.lm.word_scores import Rescored


@dataclass(frozen=True)
class ListWeights:
    """How a hypothesis is scored: acoustic + lm_weight x (n-gram and NNLM) + word_score x words.

    Attributes:
        lm_weight: of both language models' log-probabilities, natural log.
        word_score: added for each word.
        nnlm: share of the NNLM, with the rest for the n-gram; 0 is the first pass.
        bonus: added for each word that the client's own list covers.
    """

    lm_weight: NonNegative = 1.0
    word_score: float = 0.0
    nnlm: NonNegative = 0.5
    bonus: NonNegative = 0.0


def warn_of_no_lm(rescored: Rescored, weights: ListWeights, path: str | Path) -> None:
    """Warn on stderr if the NNLM shares its weight with a language model that has no scores.

    Lists from ESPnet, or from greedy search, have no score of a first pass' language model.

    Args:
        path: the file of the lists.
    """
    if 0 < weights.nnlm < 1 and not rescored.lm.any():
        problem = "no score of a first pass' language model (all are 0)"
        effect = f"with nnlm {weights.nnlm:g} the neural one has {weights.nnlm:.0%} of lm_weight"
        print(f"warning: {path}: {problem}; {effect}: set nnlm: 1", file=sys.stderr)


def background_of(counts: np.ndarray) -> np.ndarray:
    """Return u(w) from counts in the background text, (V,), with one added to each; 0 for `</s>`.

    Clients count words alone. With `</s>` in u(w), every word would be likelier at a client than in
    the background, whatever the client says.
    """
    counts = counts + 1.0
    counts[END_ID] = 0
    return counts / counts.sum()


class Lists:
    """N-best lists with the scores that no adaptation changes.

    Args:
        rescored: hypotheses, and the NNLM's log-probabilities of their words.
        weights: of the scores.
        covered: (H,) words that clients' lists cover; None where there are none.

    Attributes:
        background: (V,), u(w), 0 for `</s>`.
        ranks: (H,), from 1, in the first pass.
    """

    def __init__(self, rescored: Rescored, weights: ListWeights, covered: np.ndarray | None = None):
        self.rescored, self.weights = rescored, weights
        self.background = background_of(rescored.unigram)
        lm = (1 - weights.nnlm) * rescored.lm + weights.nnlm * rescored.sentence_scores()
        self._fixed = (
            rescored.acoustic + weights.lm_weight * lm + weights.word_score * rescored.num_words
        )
        if weights.bonus:
            if covered is None:
                remedy = "run fedtools rescore-words"
                raise UserError("no phrases.tsv for a bonus", remedy=remedy)
            self._fixed = self._fixed + weights.bonus * covered
        first = rescored.first_hypothesis
        self.ranks = np.arange(first[-1]) - np.repeat(first[:-1], np.diff(first)) + 1

    def best(
        self, utterances: slice, factors: np.ndarray | None, scores_of: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the best hypothesis of each utterance, by its number among all hypotheses.

        Args:
            utterances: a contiguous run of utterances.
            factors: (V,), added to the NNLM's log-probability of each word; None adds nothing.
            scores_of: (words of these utterances,), another model's log-probabilities in place of
                the NNLM's.
        """
        first = self.rescored.first_hypothesis
        begin = first[utterances.start]
        scores = self.scores(utterances, factors, scores_of)
        own = first[utterances.start : utterances.stop + 1] - begin
        # Among equal scores, the lowest rank wins.
        return np.array(
            [begin + at + scores[at:to].argmax() for at, to in pairwise(own)],
            int,
        )

    def scores(
        self, utterances: slice, factors: np.ndarray | None, scores_of: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the scores that `best` compares, natural log, (these utterances' hypotheses,)."""
        first = self.rescored.first_hypothesis
        begin, end = first[utterances.start], first[utterances.stop]
        scores: np.ndarray = self._fixed[begin:end]
        if factors is not None:
            words = self.rescored.first_word[begin : end + 1]
            added = factors[self.rescored.word_ids[words[0] : words[-1]]]
            sums = np.add.reduceat(added, words[:-1] - words[0])
            scores = scores + self.weights.lm_weight * self.weights.nnlm * sums
        if scores_of is not None:
            words = self.rescored.first_word[begin : end + 1]
            added = scores_of - self.rescored.log_probs[words[0] : words[-1]]
            sums = np.add.reduceat(added.astype(float), words[:-1] - words[0])
            scores = scores + self.weights.lm_weight * self.weights.nnlm * sums
        return scores

    def words(self, utterances: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the words of all hypotheses of some utterances, concatenated, without `</s>`.

        Returns:
            for each word its id, the rank of its hypothesis, and the number of its utterance, from
            0.
        """
        first, starts = self.rescored.first_hypothesis, self.rescored.first_word
        begin, end = first[utterances.start], first[utterances.stop]
        lengths = np.diff(starts[begin : end + 1])
        hypotheses = np.diff(first[utterances.start : utterances.stop + 1])
        owner = np.repeat(np.arange(len(hypotheses)), hypotheses)
        words = self.rescored.word_ids[starts[begin] : starts[end]]
        kept = words != END_ID
        ranks = self.ranks[begin:end]
        return words[kept], np.repeat(ranks, lengths)[kept], np.repeat(owner, lengths)[kept]
