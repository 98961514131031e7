"""Scoring of embeddings in attack A2, on speaker vectors with known likelihood ratios."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from fedtools.attack.speakers.backend import CALIBRATED, BackEnd, Calibrated, Learnt
from fedtools.core.errors import UserError
from fedtools.score.calibration import cllr, fit_ratios, min_cllr
from fedtools.score.verification import equal_error_rate
from fedtools.speaker.plda import length_normalise

WAYS = ["PLDA", "PLDA, cohort", "cosine", "cosine, cohort"]
SIZE, UTTERANCES, MODELS = 24, 6, 2
# Standard deviations between speakers, and between a speaker's models, by direction.
OWN = np.r_[np.full(12, 1.0), np.full(12, 0.2)]
MODEL = np.r_[np.full(12, 0.3), np.full(12, 1.0)]
# Standard deviation of a model's utterances; their content is the same for all models.
UTTERANCE = 2.0
SAID = np.random.default_rng(99).normal(0, 5, (UTTERANCES, SIZE))


def embedded(people: int, seed: int, own: np.ndarray = OWN, model: np.ndarray = MODEL) -> Learnt:
    """Return embeddings of several speakers' models."""
    random = np.random.default_rng(seed)
    speakers = np.repeat([f"{seed}-{number:03d}" for number in range(people)], MODELS)
    count = people * MODELS
    means = np.repeat(random.normal(0, own, (people, SIZE)), MODELS, 0)
    means = means + random.normal(0, model, (count, SIZE))
    vectors = means[:, None] + random.normal(0, UTTERANCE, (count, UTTERANCES, SIZE)) + SAID
    return Learnt(vectors.astype("f4"), speakers, speakers)


def pairs_of(learnt: Learnt) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return the numbers of both models of each pair, and whether they are of one speaker."""
    pairs = np.triu_indices(len(learnt.vectors), 1)
    return pairs, learnt.speakers[pairs[0]] == learnt.speakers[pairs[1]]


def true_ratios(learnt: Learnt, model: np.ndarray) -> np.ndarray:
    """Return log-likelihood ratios of all pairs' means over utterances, by the generating model."""
    own, apart = np.diag(OWN**2), np.diag(model**2 + UTTERANCE**2 / UTTERANCES)
    total = own + apart
    same = multivariate_normal(np.zeros(2 * SIZE), np.block([[total, own], [own, total]]))
    alone = multivariate_normal(np.zeros(SIZE), total)
    means = (learnt.vectors - SAID).mean(1)
    (one, other), _ = pairs_of(learnt)
    both = same.logpdf(np.concatenate([means[one], means[other]], 1))
    return both - alone.logpdf(means[one]) - alone.logpdf(means[other])


@pytest.fixture(scope="module")
def known() -> Learnt:
    return embedded(60, 0)


@pytest.fixture(scope="module")
def attacked() -> Learnt:
    return embedded(80, 1)


def all_scores(learnt: Learnt, attacked: Learnt, dimension: int = 20) -> dict[str, np.ndarray]:
    means = attacked.vectors.mean(1, dtype=float)
    return Calibrated.learn(learnt, dimension, 0).scores(means, means)


@pytest.mark.parametrize("seed", [1, 2])
def test_error_rates_are_those_of_the_true_ratio(seed):
    """Error rates are those of the two-covariance model if utterances differ independently."""
    nothing = 0 * MODEL
    attacked = embedded(150, seed, model=nothing)
    pairs, targets = pairs_of(attacked)
    best = equal_error_rate(true_ratios(attacked, nothing), targets)
    assert 8 < best < 15
    found = all_scores(embedded(150, 10 + seed, model=nothing), attacked)
    assert list(found) == WAYS
    for way, matrix in found.items():
        assert equal_error_rate(matrix[pairs], targets) < best + 6, way


def test_means_are_compared_by_how_means_differ():
    """Utterances differ most where speakers do, but a mean over them hardly does.

    The best error rate is that of the true ratio of two means. Of utterances one would learn that
    these directions say nothing, and be wrong in almost half of the trials.
    """
    own, model = np.r_[np.full(12, 1.0), np.full(12, 0.2)], np.r_[np.full(12, 0.2), np.full(12, 1)]
    apart = np.r_[np.full(12, 3.0), np.full(12, 0.1)]

    def some(people: int, seed: int) -> Learnt:
        random = np.random.default_rng(seed)
        means = np.repeat(random.normal(0, own, (people, SIZE)), MODELS, 0)
        means += random.normal(0, model, means.shape)
        # Their mean over utterances is hardly moved.
        said = random.normal(0, apart, (len(means), UTTERANCES, SIZE))
        said -= 0.8 * said.mean(1, keepdims=True)
        speakers = np.repeat([f"{seed}-{number:03d}" for number in range(people)], MODELS)
        return Learnt((means[:, None] + said + SAID).astype("f4"), speakers, speakers)

    attacked, rates = some(100, 1), []
    pairs, targets = pairs_of(attacked)
    within = np.diag(model**2 + 0.04 * apart**2 / UTTERANCES)
    total = np.diag(own**2) + within
    same = multivariate_normal(np.zeros(2 * SIZE), np.block([
        [total, np.diag(own**2)], [np.diag(own**2), total]
    ]))  # fmt: skip
    alone = multivariate_normal(np.zeros(SIZE), total)
    means = (attacked.vectors - SAID).mean(1)
    both = same.logpdf(np.concatenate([means[one] for one in pairs], 1))
    ratios = both - alone.logpdf(means[pairs[0]]) - alone.logpdf(means[pairs[1]])
    best = equal_error_rate(ratios, targets)
    for seed in (2, 3):
        found = all_scores(some(100, seed), attacked)
        rates.append(equal_error_rate(found["PLDA"][pairs], targets))
    assert np.mean(rates) < best + 10, (best, rates)


@pytest.mark.parametrize("people", [20, 60])
@pytest.mark.parametrize("told", [3.0, 1.0, 0.0])
def test_calibrated_ratios_cost_hardly_more_than_they_must(people, told):
    """Also with few known people, where PLDA is overconfident, and without speaker information."""
    attacked = embedded(100, 1, told * OWN)
    pairs, targets = pairs_of(attacked)
    excess: dict[str, list[float]] = {way: [] for way in CALIBRATED}
    for seed in range(2, 5):
        found = all_scores(embedded(people, seed, told * OWN), attacked)
        for way, costs in excess.items():
            scores = found[way][pairs]
            costs.append(cllr(scores, targets) - min_cllr(scores, targets))
            least = {3.0: 0, 1.0: 0.4, 0.0: 0.95}[told]
            assert least < min_cllr(scores, targets) < least + 0.5
    # With twenty target pairs, a regression cannot become more confident.
    for way, costs in excess.items():
        assert np.mean(costs) < (0.1 if people == 60 else 0.2), (way, costs)


def test_a_ratio_is_calibrated_on_people_that_plda_has_not_learnt_from():
    """With few people and many dimensions, PLDA recognises its own training people."""
    people, others = (embedded(count, seed, 0 * OWN) for count, seed in ((24, 0), (80, 1)))
    means = people.vectors.mean(1, dtype=float)
    pairs, targets = pairs_of(people)
    seen = BackEnd.learn(people, 20).scores(means, means)
    found = all_scores(people, others)
    for way in CALIBRATED:
        assert equal_error_rate(seen[way][pairs], targets) < 30
        # A regression on their scores would be overconfident.
        leaked = fit_ratios(seen[way][pairs][:, None], targets)
        assert np.abs(seen[way] * leaked.weights + leaked.offset).mean() > 0.7
        assert np.abs(found[way]).mean() < 0.3


def test_scores_that_tell_nothing_keep_their_order(attacked):
    """Order is kept even if models of two people are by chance nearer than those of one."""
    known = embedded(20, 0)
    # The two models of each speaker lie on either side of the mean.
    opposite = known.vectors - known.vectors.mean(0)
    opposite[1::2] = -opposite[::2]
    learnt = known._replace(vectors=opposite)
    means = attacked.vectors.mean(1, dtype=float)
    before = BackEnd.learn(learnt, 10).scores(means, means)
    found = Calibrated.learn(learnt, 10, 0).scores(means, means)
    pairs, targets = pairs_of(attacked)
    for way in CALIBRATED:
        assert np.abs(found[way]).max() < 1e-3
        assert (np.argsort(found[way][pairs]) == np.argsort(before[way][pairs])).all()
        assert cllr(found[way][pairs], targets) == pytest.approx(1, abs=1e-3)


def test_scores_are_normed_by_the_models_that_are_learnt_from(known, attacked):
    """Scores equal an independent S-norm over the training models."""
    means = attacked.vectors.mean(1, dtype=float)[:7]
    cohort = known.vectors.mean(1, dtype=float)
    back_end = BackEnd.learn(known, 20)
    for way in ("PLDA", "cosine"):
        scores = back_end.scores(means[:3], means[3:])
        with_cohort = back_end.scores(means, cohort)[way]
        for one in range(3):
            for other in range(4):
                sides = [
                    (scores[way][one, other] - row.mean()) / row.std()
                    for row in (with_cohort[one], with_cohort[3 + other])
                ]
                found = scores[f"{way}, cohort"][one, other]
                assert found == pytest.approx(np.mean(sides), abs=1e-9)


def test_nothing_is_learnt_from_those_who_are_attacked(known, attacked):
    """The score of a pair does not depend on the other attacked models."""
    whole, few = (all_scores(known, some) for some in (attacked, attacked.of(np.arange(9))))
    for way in WAYS:
        np.testing.assert_allclose(few[way], whole[way][:9, :9], rtol=1e-9)


def test_who_differs_otherwise_than_those_who_are_known_is_not_told(attacked):
    """Directions in which known speakers' models vary are left out, also if others differ there."""
    known = embedded(60, 0, OWN[::-1], 3 * MODEL[::-1])
    pairs, targets = pairs_of(attacked)
    assert equal_error_rate(all_scores(known, attacked, 4)["PLDA"][pairs], targets) > 30


def test_what_utterances_say_is_no_speakers(known, attacked):
    """All models have the same utterances; differences between these change no score."""
    before = all_scores(known, attacked)
    quiet = (one._replace(vectors=one.vectors - SAID.astype("f4")) for one in (known, attacked))
    for way, found in all_scores(*quiet).items():
        np.testing.assert_allclose(found, before[way], rtol=1e-3, atol=1e-3)


def test_how_long_vectors_are_and_where_they_lie_does_not_matter(known, attacked):
    """Only directions from the mean of the known models matter."""
    before = all_scores(known, attacked)
    middle, random = known.vectors.mean((0, 1), dtype=float), np.random.default_rng(5)
    longer = random.uniform(0.2, 5, (len(attacked.vectors), 1, 1))
    moved = middle + longer * (attacked.vectors - middle)
    for way, found in all_scores(known, attacked._replace(vectors=moved)).items():
        np.testing.assert_allclose(found, before[way], rtol=1e-5, atol=1e-5)
    shift = random.normal(0, 30, SIZE)
    shifted = (one._replace(vectors=one.vectors + shift) for one in (known, attacked))
    for way, found in all_scores(*shifted).items():
        np.testing.assert_allclose(found, before[way], rtol=1e-5, atol=1e-5)
    # The mean is that of the known models, also if the attacked ones have another.
    apart = attacked._replace(vectors=attacked.vectors + 3 * np.eye(SIZE, dtype="f4")[0])
    means = apart.vectors.mean(1, dtype=float) - middle
    directions = means / np.linalg.norm(means, axis=1, keepdims=True)
    found = all_scores(known, apart)["cosine"]
    np.testing.assert_allclose(found, directions @ directions.T, atol=1e-6)


def test_two_talks_of_a_person_calibrate_nothing():
    """Where a speaker is a talk, they are neither of one speaker nor of two people."""
    known = embedded(20, 0, 3 * OWN)
    # Both talks of a person have the same embeddings.
    vectors = known.vectors.reshape(10, 2, MODELS, UTTERANCES, SIZE).copy()
    middles = vectors.mean((2, 3), keepdims=True)
    vectors += middles[:, :1] - middles
    people = np.array([f"p{number // 4}" for number in range(len(known.speakers))])
    talks = Learnt(vectors.reshape(known.vectors.shape), known.speakers, people)
    apart = Calibrated.learn(talks, 5, 0).ratios
    taken = Calibrated.learn(talks._replace(people=talks.speakers), 5, 0).ratios
    # If they counted as others, target scores would be less informative.
    for way in CALIBRATED:
        assert apart[way].weights[0] > 1.1 * taken[way].weights[0]


def test_models_that_share_an_update_calibrate_nothing():
    """Pairs are listed one by one; those that share an update are alike, as if of one speaker."""
    learnt = embedded(40, 0)
    count = len(learnt.vectors)
    parts = np.arange(count) // MODELS % 2
    shared = np.zeros((count, count), bool)
    vectors = learnt.vectors.copy()
    # The first models of two people of one part.
    for one in range(0, count - 4, 8):
        vectors[one + 4] = vectors[one]
        shared[one, one + 4] = shared[one + 4, one] = True
    learnt = learnt._replace(vectors=vectors, parts=parts, shared=shared)
    found = Calibrated.learn(learnt, 5, 0).ratios
    means = vectors.mean(1, dtype=float)
    scores, targets = [], []
    for part in (0, 1):
        own = np.flatnonzero(parts == part)
        matrix = BackEnd.learn(learnt.of(parts != part), 5).scores(means[own], means[own])["PLDA"]
        for at, one in enumerate(own):
            for place, other in enumerate(own[:at]):
                if not shared[one, other]:
                    scores.append([matrix[place, at]])
                    targets.append(learnt.speakers[one] == learnt.speakers[other])
    expected = fit_ratios(np.array(scores), np.array(targets))
    assert found["PLDA"].weights == pytest.approx(expected.weights, rel=1e-6)
    taken = Calibrated.learn(learnt._replace(shared=None), 5, 0).ratios
    assert found["PLDA"].weights[0] > 1.02 * taken["PLDA"].weights[0]


def test_embeddings_that_do_not_differ_are_told(known):
    with pytest.raises(UserError, match="no speaker has two vectors that differ"):
        all_scores(known._replace(vectors=np.ones_like(known.vectors)), known)
    length = np.linalg.norm(length_normalise(known.vectors[:, 0]), axis=1)
    np.testing.assert_allclose(length, SIZE**0.5, rtol=1e-5)
