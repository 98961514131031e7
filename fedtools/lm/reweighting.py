"""Second-pass rescoring of stored scores: what a client of FMP does, group by group.

Z. Liu, F. Peng, "Federated marginal personalization for ASR rescoring", ICASSP 2022, algorithm 1.
The neural language model is not asked again: its log-probabilities of all words are there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedtools.files.errors import UserError
from fedtools.lm.marginals import background_of, kernel, log_factors, of_noisy, smoothed
from fedtools.lm.vocabulary import END_ID
from fedtools.lm.word_scores import Rescored
from fedtools.privacy.bounds import Utterances

_REMEDY = "run fedtools rescore with --ngram"


@dataclass(frozen=True)
class Weights:
    """How a hypothesis is scored: acoustic + lm_weight x (n-gram and NNLM) + word_score x words.

    Attributes:
        lm_weight: of both language models' log-probabilities, natural log.
        word_score: added for each word.
        nnlm: share of the NNLM, the n-gram's being the rest; 0 is the first pass.
        density: of the low-order n-gram of the training text, which is taken away.
        bonus: added for each word that the client's own list covers.
    """

    lm_weight: float = 1.0
    word_score: float = 0.0
    nnlm: float = 0.5
    density: float = 0.0
    bonus: float = 0.0


@dataclass(frozen=True)
class Adaptation:
    """The options of FMP that act at a client; see `fedtools.methods.fmp.FMP`."""

    alpha: float = 0.5
    beta: float = 0.25
    scale: float = 0.5
    sigma: float = 5.0
    smoothing: float = 0.1
    normalise: bool = False
    continuous: bool = False


def warn_of_no_lm(rescored: Rescored, weights: Weights, path: str | Path) -> None:
    """Say on stderr where the NNLM shares its weight with a language model that is not there.

    Lists of ESPnet, and those of greedy search, have no score of a first pass' language model.

    Args:
        path: the file of the lists.
    """
    if 0 < weights.nnlm < 1 and not rescored.lm.any():
        problem = "no score of a first pass' language model (all are 0)"
        effect = f"with nnlm {weights.nnlm:g} the neural one has {weights.nnlm:.0%} of lm_weight"
        print(f"warning: {path}: {problem}; {effect}: set nnlm: 1", file=sys.stderr)


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

    def __init__(self, rescored: Rescored, weights: Weights, covered: np.ndarray | None = None):
        self.rescored, self.weights = rescored, weights
        self.background = background_of(rescored.unigram)
        lm = (1 - weights.nnlm) * rescored.lm + weights.nnlm * rescored.sentence_scores()
        if weights.density:
            if rescored.ngram is None:
                raise UserError("no ngram.scp for the density ratio", remedy=_REMEDY)
            lm = lm - weights.density * rescored.ngram
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
        """The best hypothesis of each utterance, by its number among all hypotheses.

        Args:
            utterances: a run of them.
            factors: (V,), added to the NNLM's log-probability of each word; None adds nothing.
            scores_of: (words of these utterances,), another model's log-probabilities instead.
        """
        first = self.rescored.first_hypothesis
        begin, end = first[utterances.start], first[utterances.stop]
        scores = self._fixed[begin:end]
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
        own = first[utterances.start : utterances.stop + 1] - begin
        # Of equal scores the lowest rank wins.
        return np.array(
            [begin + at + scores[at:to].argmax() for at, to in pairwise(own)],
            int,
        )

    def counts(self, utterances: slice, sigma: float) -> np.ndarray:
        """(V,) the sum of equation 5 for each word, over the hypotheses of some utterances."""
        first, starts = self.rescored.first_hypothesis, self.rescored.first_word
        begin, end = first[utterances.start], first[utterances.stop]
        weights = np.repeat(kernel(self.ranks[begin:end], sigma), np.diff(starts[begin : end + 1]))
        words = self.rescored.word_ids[starts[begin] : starts[end]]
        # Of nothing, numpy counts whole numbers.
        counts = np.bincount(words, weights, minlength=len(self.background)).astype(np.float64)
        counts[END_ID] = 0
        return counts

    def said(self, utterances: slice, sigma: float) -> Utterances:
        """The same counts by utterance, for bounds on what each one adds."""
        first, starts = self.rescored.first_hypothesis, self.rescored.first_word
        begin, end = first[utterances.start], first[utterances.stop]
        lengths = np.diff(starts[begin : end + 1])
        owner = np.repeat(
            np.arange(utterances.stop - utterances.start),
            np.diff(first[utterances.start : utterances.stop + 1]),
        )
        words = self.rescored.word_ids[starts[begin] : starts[end]]
        counted = words != END_ID
        return Utterances.entries(
            np.repeat(owner, lengths)[counted],
            words[counted],
            np.repeat(kernel(self.ranks[begin:end], sigma), lengths)[counted],
            utterances.stop - utterances.start,
            len(self.background),
        )

    def shared(self, everybody: np.ndarray, smoothing: float, marginal: bool = False) -> np.ndarray:
        """The global distribution of equation 6, (V,).

        Args:
            everybody: (V,), the counts that the server has sent; noise may have made some negative.
            smoothing: weight of the background.
            marginal: they are a distribution already, once somebody has said a word.
        """
        if marginal:
            return everybody if everybody.any() else self.background
        return of_noisy(everybody, self.background, smoothing)


def rescore_group(
    lists: Lists,
    group: slice,
    shared: np.ndarray,
    own: np.ndarray,
    options: Adaptation,
) -> tuple[np.ndarray, np.ndarray]:
    """What a client does in a round: it rescores the round's utterances, and counts their words.

    No utterance is in the counts that it is rescored with.

    Args:
        group: the utterances of the round, in the order in which they were said.
        shared: (V,), the global distribution that the server has sent.
        own: (V,), the client's counts before the round.

    Returns:
        the best hypotheses, and the counts (V,) of this group alone.
    """
    parts = (
        [slice(at, at + 1) for at in range(group.start, group.stop)]
        if options.continuous
        else [group]
    )
    best, counts = [], np.zeros_like(lists.background)
    for part in parts:
        best.append(lists.best(part, _factors(lists, shared, own + counts, options)))
        counts = counts + lists.counts(part, options.sigma)
    return np.concatenate(best) if best else np.zeros(0, int), counts


def _factors(
    lists: Lists, shared: np.ndarray, own: np.ndarray, options: Adaptation
) -> np.ndarray | None:
    if options.scale == 0 or (options.alpha == 0 and options.beta == 0):
        return None
    return log_factors(
        lists.background,
        shared,
        smoothed(own, lists.background, options.smoothing),
        alpha=options.alpha,
        beta=options.beta,
        scale=options.scale,
        normalise=options.normalise,
    )
