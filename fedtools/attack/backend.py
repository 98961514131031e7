"""What scores the embeddings of attack A2: LDA and PLDA, cosines, a cohort, and calibration.

As the x-vector recipes of Kaldi do it (egs/sre16/v2): LDA and PLDA are trained on embeddings of
utterances, which are centred, mapped by LDA and brought to one length first. What is compared are
means over the utterances of a model (ivector-mean), centred, mapped and brought to one length in
the same way.

Two things differ. Kaldi tells PLDA of how many utterances a mean is (--num-utts), and has that many
independent observations of a speaker. The utterances of a model are not that: they share what is
the model's own, be it of its recording, so that a mean counts as one vector here, as the mean over
the pieces of one recording does in Kaldi. And all models see the same utterances, of the Indicator:
each of these is centred by itself, on the mean of its embeddings from the models that are learnt
from. What it says would otherwise be taken for what a speaker's vectors differ in, although all
means have the same of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtools.attack.cohort import s_norm
from fedtools.files.seeds import seed64
from fedtools.score.calibration import Ratios, fit_ratios
from fedtools.speaker.plda import Lda, Plda, length_normalise, train_lda, train_plda

# What scores are of; the second of each two is normed by a cohort.
WAYS = PLDA, PLDA_COHORT, COSINE, COSINE_COHORT = "PLDA", "PLDA, cohort", "cosine", "cosine, cohort"
# Those that are calibrated, see `fedtools.attack.verify.RATIOS`.
CALIBRATED = (PLDA, PLDA_COHORT)
# Into which people are dealt to calibrate scores: of each, one of the others is learnt.
_PARTS = 5
# Of scores in deviations, where they tell nothing.
_LEAST_SLOPE = 1e-6
Scores = dict[str, np.ndarray]


class Learnt(NamedTuple):
    """Embeddings of models that an attacker learns from.

    Attributes:
        vectors: (models, utterances, D).
        speakers: of each model.
        people: of each model; two speakers of one person are neither the same nor others.
    """

    vectors: np.ndarray
    speakers: np.ndarray
    people: np.ndarray

    def of(self, some: np.ndarray) -> Learnt:
        """Some models, by their numbers."""
        return Learnt(self.vectors[some], self.speakers[some], self.people[some])


@dataclass(frozen=True)
class BackEnd:
    """What is learnt of some people's models.

    Attributes:
        mean: (D,), of their embeddings.
        lda, plda: of embeddings of utterances, each centred.
        cohort: (models, D), their means over utterances.
    """

    mean: np.ndarray
    lda: Lda
    plda: Plda
    cohort: np.ndarray

    @classmethod
    def learn(cls, learnt: Learnt, dimension: int) -> BackEnd:
        """Learn from embeddings.

        Args:
            learnt: of three people or more.
            dimension: to which LDA brings them, at most.

        Raises:
            UserError: if these do not differ, or too few of them do.
        """
        models, utterances, size = learnt.vectors.shape
        middles = learnt.vectors.mean(0, dtype=np.float64)
        centred = learnt.vectors - middles.astype(learnt.vectors.dtype)
        rows = centred.reshape(models * utterances, size)
        labels = np.repeat(learnt.speakers, utterances)
        dimension = min(dimension, size, len(set(learnt.speakers)) - 1)
        lda = train_lda(rows, labels, dimension)
        plda, _ = train_plda(length_normalise(lda(rows)), labels)
        cohort = learnt.vectors.mean(1, dtype=np.float64)
        return cls(cohort.mean(0), lda, plda, cohort)

    def scores(self, enrolled: np.ndarray, tested: np.ndarray) -> Scores:
        """Scores of all pairs, (enrolled, tested) each, by their name.

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
    """A back end whose scores by PLDA are log-likelihood ratios.

    Attributes:
        back_end: learnt from all models.
        ratios: how scores of a way become ratios.
    """

    back_end: BackEnd
    ratios: dict[str, Ratios]

    @classmethod
    def learn(cls, learnt: Learnt, dimension: int, seed: int) -> Calibrated:
        """Learn a back end, and calibrate it on people whom it has not learnt from.

        People are dealt into parts. Pairs of a part are scored by a back end of the others, and a
        logistic regression is trained on the scores of all parts.

        Args:
            learnt: of six people or more, of whom a speaker has two models.
            dimension: as of `BackEnd.learn`.
            seed: of how people are dealt into parts.

        Raises:
            UserError: as of `BackEnd.learn`.
        """
        means = learnt.vectors.mean(1, dtype=np.float64)
        parts = _dealt(learnt.people, seed)
        scores: dict[str, list[np.ndarray]] = {way: [] for way in CALIBRATED}
        targets = []
        for part in range(parts.max() + 1):
            own = parts == part
            found = BackEnd.learn(learnt.of(~own), dimension).scores(means[own], means[own])
            one, other = np.triu_indices(int(own.sum()), 1)
            speakers, people = learnt.speakers[own], learnt.people[own]
            same = speakers[one] == speakers[other]
            kept = same | (people[one] != people[other])
            targets.append(same[kept])
            for way in CALIBRATED:
                scores[way].append(found[way][one[kept], other[kept]])
        truth = np.concatenate(targets)
        ratios = {way: _rising(np.concatenate(some), truth) for way, some in scores.items()}
        return cls(BackEnd.learn(learnt, dimension), ratios)

    def scores(self, enrolled: np.ndarray, tested: np.ndarray) -> Scores:
        """As of `BackEnd.scores`; those of `CALIBRATED` are log-likelihood ratios, natural logs."""
        found = self.back_end.scores(enrolled, tested)
        for way, ratios in self.ratios.items():
            found[way] = found[way] * ratios.weights[0] + ratios.offset
        return found


def _dealt(people: np.ndarray, seed: int) -> np.ndarray:
    """The part of each model, by its person: two people at least in each."""
    names = sorted(set(people), key=lambda name: (seed64(seed, "calibration", name), name))
    count = min(_PARTS, len(names) // 2)
    part = {name: number % count for number, name in enumerate(names)}
    return np.array([part[name] for name in people])


def _rising(scores: np.ndarray, targets: np.ndarray) -> Ratios:
    """Ratios that rise with scores, whose order they keep.

    Those of scores that tell nothing, whose best slope is by chance not above 0, are almost 0.
    """
    found = fit_ratios(scores[:, None], targets)
    if found.weights[0] > 0:
        return found
    slope = _LEAST_SLOPE / max(scores.std(), _LEAST_SLOPE)
    return Ratios(np.array([slope]), float(-slope * scores.mean()))
