"""Back end of attack A2, which scores embeddings: LDA and PLDA, cosines, a cohort, calibration.

LDA and PLDA are trained on what trials compare: means over the utterances of a model, mapped by LDA
and length-normalised. The x-vector recipes of Kaldi (egs/sre16/v2) train them on embeddings of
utterances, whose covariance within a speaker also has what one utterance differs by from the next,
which a mean averages out. Of few models, means alone would tell too little about that covariance in
all directions: the fewer they are, the more of the covariance of utterances is added.

All models see the same utterances, those of the Indicator: what utterances differ by is centred on
the mean over models, since it would otherwise be their content, which all means share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtools.attack.speakers.cohort import s_norm
from fedtools.core.seeds import seed64
from fedtools.score.calibration import Ratios, fit_ratios
from fedtools.speaker.plda import Lda, Plda, length_normalise, train_lda, train_plda

# Kinds of scores; the second of each pair is normalised by a cohort.
WAYS = PLDA, PLDA_COHORT, COSINE, COSINE_COHORT = "PLDA", "PLDA, cohort", "cosine", "cosine, cohort"
# Kinds that are calibrated, see `fedtools.attack.speakers.verify.RATIOS`.
CALIBRATED = (PLDA, PLDA_COHORT)
# Parts that people are split into for calibration; a back end of the others scores each part.
_PARTS = 5
# Slope for scores that carry no information, per standard deviation of the scores.
_LEAST_SLOPE = 1e-6
Scores = dict[str, np.ndarray]


class Learnt(NamedTuple):
    """Embeddings of models that an attacker learns from.

    Attributes:
        vectors: (models, utterances, D).
        speakers: the speaker of each model.
        people: the person of each model; two speakers of one person make neither a target nor a
            non-target pair.
        parts: the part of each model in the cross-validation of calibration, see `deal`; by default
            by the seed.
        shared: (models, models), which pairs share an update: calibration does not learn from them.
            Neither LDA nor PLDA compares pairs.
    """

    vectors: np.ndarray
    speakers: np.ndarray
    people: np.ndarray
    parts: np.ndarray | None = None
    shared: np.ndarray | None = None

    def of(self, some: np.ndarray) -> Learnt:
        """Return some of the models, by their indices."""
        return Learnt(self.vectors[some], self.speakers[some], self.people[some])


@dataclass(frozen=True)
class BackEnd:
    """Mean, LDA, PLDA and cohort, learnt from some people's models.

    Attributes:
        mean: (D,), mean of their embeddings.
        lda, plda: trained on means over utterances.
        cohort: (models, D), embeddings averaged over utterances.
    """

    mean: np.ndarray
    lda: Lda
    plda: Plda
    cohort: np.ndarray

    @classmethod
    def learn(cls, learnt: Learnt, dimension: int) -> BackEnd:
        """Learn from embeddings.

        Args:
            learnt: embeddings of at least three people.
            dimension: upper bound of LDA's output dimension.

        Raises:
            UserError: if the embeddings do not differ, or too few of them do.
        """
        models, utterances, size = learnt.vectors.shape
        means = learnt.vectors.mean(1, dtype=np.float64)
        middle = means.mean(0)
        apart = learnt.vectors - means[:, None] - (learnt.vectors.mean(0, np.float64) - middle)
        free = max(1, models - len(set(learnt.speakers)))
        # If there are as many degrees of freedom as dimensions, what a mean over independent
        # utterances has of their covariance.
        share = min(1.0, size / free / utterances)
        rows = (means[:, None] - middle + np.sqrt(share) * apart).reshape(-1, size)
        labels = np.repeat(learnt.speakers, utterances)
        dimension = min(dimension, size, len(set(learnt.speakers)) - 1)
        lda = train_lda(rows, labels, dimension)
        plda, _ = train_plda(length_normalise(lda(rows)), labels)
        return cls(middle, lda, plda, means)

    def scores(self, enrolled: np.ndarray, tested: np.ndarray) -> Scores:
        """Return scores of all pairs, (enrolled, tested) each, by kind.

        Args:
            enrolled, tested: (models, D), means over utterances.
        """
        found = {}
        for way, way_cohort, prepare, rule in (
            (PLDA, PLDA_COHORT, self._mapped, self.plda.scores),
            (COSINE, COSINE_COHORT, self._directions, lambda one, other: one @ other.T),
        ):
            own, others, cohort = (prepare(some) for some in (enrolled, tested, self.cohort))
            found[way] = rule(own, others)
            with_cohort = rule(own, cohort), rule(others, cohort)
            found[way_cohort] = s_norm(found[way], *with_cohort)
        return found

    def _mapped(self, means: np.ndarray) -> np.ndarray:
        return length_normalise(self.lda(means - self.mean))

    def _directions(self, means: np.ndarray) -> np.ndarray:
        centred = means - self.mean
        return length_normalise(centred) / np.sqrt(centred.shape[1])


@dataclass(frozen=True)
class Calibrated:
    """Back end whose PLDA scores are log-likelihood ratios.

    Attributes:
        back_end: learnt from all models.
        ratios: kind of score -> its calibration.
    """

    back_end: BackEnd
    ratios: dict[str, Ratios]

    @classmethod
    def learn(cls, learnt: Learnt, dimension: int, seed: int) -> Calibrated:
        """Learn a back end, and calibrate it on people whom it has not learnt from.

        People are split into parts. Pairs within a part are scored by a back end learnt from the
        other parts, and a logistic regression is trained on the scores of all parts.

        Args:
            learnt: embeddings of six people or more who have two models of a speaker.
            dimension: as in `BackEnd.learn`.
            seed: random seed of the parts.

        Raises:
            UserError: as in `BackEnd.learn`.
        """
        means = learnt.vectors.mean(1, dtype=np.float64)
        parts = learnt.parts
        if parts is None:
            part = deal(learnt.people, seed)
            parts = np.array([part[name] for name in learnt.people])
        scores: dict[str, list[np.ndarray]] = {way: [] for way in CALIBRATED}
        targets = []
        for one_part in np.unique(parts):
            own = parts == one_part
            found = BackEnd.learn(learnt.of(~own), dimension).scores(means[own], means[own])
            one, other = np.triu_indices(int(own.sum()), 1)
            speakers, people = learnt.speakers[own], learnt.people[own]
            same = speakers[one] == speakers[other]
            kept = same | (people[one] != people[other])
            if learnt.shared is not None:
                kept &= ~learnt.shared[np.ix_(own, own)][one, other]
            targets.append(same[kept])
            for way in CALIBRATED:
                scores[way].append(found[way][one[kept], other[kept]])
        truth = np.concatenate(targets)
        ratios = {way: _rising(np.concatenate(some), truth) for way, some in scores.items()}
        return cls(BackEnd.learn(learnt, dimension), ratios)

    def scores(self, enrolled: np.ndarray, tested: np.ndarray) -> Scores:
        """Return scores as `BackEnd.scores` does; `CALIBRATED` kinds are log-likelihood ratios.

        Logarithms are natural.
        """
        found = self.back_end.scores(enrolled, tested)
        for way, ratios in self.ratios.items():
            found[way] = found[way] * ratios.weights[0] + ratios.offset
        return found


def deal(people: Iterable[str], seed: int, least: int = 2) -> dict[str, int]:
    """Return person -> part; each part has at least `least` people, and there are at least two.

    Args:
        people: names, which may be repeated.
    """
    names = sorted(set(people), key=lambda name: (seed64(seed, "calibration", name), name))
    count = max(2, min(_PARTS, len(names) // max(2, least)))
    return {name: number % count for number, name in enumerate(names)}


def _rising(scores: np.ndarray, targets: np.ndarray) -> Ratios:
    """Fit ratios that rise with the scores, and so keep their order.

    If scores carry no information and their best slope is not above 0, all ratios are almost 0.
    """
    found = fit_ratios(scores[:, None], targets)
    if found.weights[0] > 0:
        return found
    slope = _LEAST_SLOPE / max(scores.std(), _LEAST_SLOPE)
    return Ratios(np.array([slope]), float(-slope * scores.mean()))
