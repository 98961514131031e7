"""Background models, i-vectors and PLDA: data drawn from these models, and densities by scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from safetensors.numpy import save_file
from scipy.linalg import block_diag, subspace_angles
from scipy.stats import multivariate_normal
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.mixture import GaussianMixture

from fedtools.core.errors import UserError
from fedtools.speaker.gmm import Gmm, accumulate, train_ubm
from fedtools.speaker.ivector import IvectorExtractor, train_extractor
from fedtools.speaker.plda import Lda, Plda, length_normalise, train_lda, train_plda


def never_falls(history: list[float]) -> bool:
    """Return whether log-likelihoods rise overall, and never fall except by rounding."""
    return min(np.diff(history)) > -1e-9 * abs(history[0]) and history[-1] > history[0]


# --- the background model

TRUE = Gmm(
    np.array([0.5, 0.3, 0.2]),
    np.array([[0.0, 0.0], [4.0, 1.0], [-3.0, 5.0]]),
    np.array([[1.0, 0.3], [0.5, 2.0], [1.5, 0.2]]),
)


def draw(model: Gmm, frames: int, random: np.random.Generator) -> np.ndarray:
    which = random.choice(len(model.weights), frames, p=model.weights)
    noise = random.normal(size=(frames, model.means.shape[1]))
    return model.means[which] + np.sqrt(model.variances[which]) * noise


class Reread:
    """Utterances that can be iterated repeatedly, but have no length."""

    def __init__(self, utterances: list[np.ndarray]):
        self.utterances = utterances

    def __iter__(self):
        return iter(self.utterances)


def test_a_mixture_is_recovered_from_its_frames():
    frames = draw(TRUE, 20_000, np.random.default_rng(0))
    # In single precision, like features; one utterance is empty, one longer than a block.
    utterances = Reread([*np.split(frames.astype(np.float32), [0, 5, 900, 6000])])
    found, history = train_ubm(utterances, 3, seed=1)
    assert never_falls(history)
    order = [int(np.square(found.means - mean).sum(1).argmin()) for mean in TRUE.means]
    assert sorted(order) == [0, 1, 2]
    np.testing.assert_allclose(found.weights[order], TRUE.weights, atol=0.02)
    np.testing.assert_allclose(found.means[order], TRUE.means, atol=0.1)
    np.testing.assert_allclose(found.variances[order], TRUE.variances, rtol=0.08)


def test_one_step_and_likelihoods_are_those_of_scikit_learn():
    frames = draw(TRUE, 500, np.random.default_rng(0))
    start = Gmm(np.full(3, 1 / 3), TRUE.means + 0.7, np.full((3, 2), 2.0))
    oracle = GaussianMixture(
        3,
        covariance_type="diag",
        reg_covar=0,
        max_iter=1,
        tol=0,
        weights_init=start.weights,
        means_init=start.means,
        precisions_init=1 / start.variances,
    )
    with pytest.warns(match="did not converge"):
        oracle.fit(frames)
    sums, likelihood = accumulate(start, np.split(frames, 5))
    np.testing.assert_allclose(sums.counts / 500, oracle.weights_)
    means = sums.first / sums.counts[:, None]
    np.testing.assert_allclose(means, oracle.means_)
    variances = sums.second / sums.counts[:, None] - means**2
    np.testing.assert_allclose(variances, oracle.covariances_)
    joint = [
        math.log(weight) + multivariate_normal(mean, np.diag(variance)).logpdf(frames)
        for weight, mean, variance in zip(start.weights, start.means, start.variances, strict=True)
    ]
    np.testing.assert_allclose(start.log_joint(frames), np.transpose(joint))
    assert likelihood == pytest.approx(np.logaddexp.reduce(joint).mean())
    posteriors, each = Gmm(oracle.weights_, means, variances).posteriors(frames)
    np.testing.assert_allclose(posteriors, oracle.predict_proba(frames), atol=1e-6)
    np.testing.assert_allclose(each, oracle.score_samples(frames), atol=1e-6)


def test_hard_frames_for_a_background_model():
    """With copies, a constant dimension, an offset and an outlier, likelihoods rise and stay
    finite.
    """
    random = np.random.default_rng(0)
    frames = np.repeat(random.normal(size=(60, 3)), 5, axis=0)
    frames[:, 1] = 7.0
    frames[:, 2] += 1e6
    frames[0] = [1e3, 7.0, 1e6]
    found, history = train_ubm([frames], 13, seed=0, iterations=8)
    assert found.means.shape == (13, 3)
    assert found.weights.sum() == pytest.approx(1)
    assert np.isfinite(found.means).all()
    assert (found.variances >= 0.01 * frames.var(0) * (1 - 1e-6)).all()
    assert min(np.diff(history)) > -1e-6
    again, _ = train_ubm([frames], 13, seed=0, iterations=8)
    np.testing.assert_array_equal(again.means, found.means)


@pytest.mark.parametrize(
    ("utterances", "said"),
    [
        ([], "0 frames"),
        ([np.zeros((0, 3)), np.zeros((3, 3))], "3 frames for a background model of 4"),
        ([np.full((9, 3), np.nan)], "NaN or Inf"),
    ],
)
def test_no_background_model_without_frames(utterances, said):
    with pytest.raises(UserError, match=said):
        train_ubm(utterances, 4, seed=0)


def test_what_is_read_in_passes_is_no_generator():
    with pytest.raises(TypeError, match="only once"):
        train_ubm((frames for frames in [np.ones((9, 2))]), 1, seed=0)
    with pytest.raises(TypeError, match="only once"):
        train_extractor(TRUE, iter([]), 2, seed=0)


# --- i-vectors


def extractor(random: np.random.Generator, gaussians=4, dimensions=3, size=2) -> IvectorExtractor:
    """Return a true model whose Gaussians are far apart, so that each frame's is clear."""
    means = 30.0 * random.permutation(gaussians * dimensions).reshape(gaussians, dimensions)
    variances = random.uniform(0.5, 2, (gaussians, dimensions))
    loadings = random.normal(size=(gaussians, dimensions, size))
    weights = np.full(gaussians, 1 / gaussians)
    ubm = Gmm(weights, means, variances + np.square(loadings).sum(2))
    return IvectorExtractor(ubm, means, loadings, variances)


def draw_sets(
    model: IvectorExtractor, vectors: np.ndarray, frames: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Draw frames of a speaker for each of (n, R) i-vectors."""
    return [
        draw(
            Gmm(model.ubm.weights, model.means + model.loadings @ w, model.variances),
            frames,
            random,
        )
        for w in vectors
    ]


def test_i_vectors_are_conditional_means_of_a_gaussian():
    """They equal the conditional mean in one large Gaussian of w and all frames of a set."""
    random = np.random.default_rng(0)
    model = extractor(random)
    (frames,) = draw_sets(model, random.normal(size=(1, 2)), 12, random)
    moments = model.ubm.moments(frames)[0]
    which = model.ubm.posteriors(frames)[0].argmax(1)
    loadings = np.concatenate([model.loadings[c] for c in which])
    noise = block_diag(*(np.diag(model.variances[c]) for c in which))
    apart = (frames - model.means[which]).ravel()
    total = loadings @ loadings.T + noise
    expected = loadings.T @ np.linalg.solve(total, apart)
    (found,) = model.extract([moments])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # A scale of a half acts like twice the noise; at most 3 frames like 4 times the noise.
    for factor, options in ((2, {"posterior_scale": 0.5}), (4, {"max_count": 3.0})):
        weaker = loadings @ loadings.T + factor * noise
        expected = loadings.T @ np.linalg.solve(weaker, apart)
        (found,) = model.extract([moments], **options)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    # The log-likelihood before any training also agrees, for two sets with the same frames.
    _, (likelihood,) = train_extractor(model.ubm, [moments, moments], 2, seed=3, iterations=0)
    start, _ = train_extractor(model.ubm, [moments], 2, seed=3, iterations=0)
    loadings = np.concatenate([start.loadings[c] for c in which])
    noise = block_diag(*(np.diag(start.variances[c]) for c in which))
    density = multivariate_normal(np.zeros(36), loadings @ loadings.T + noise)
    assert likelihood == pytest.approx(density.logpdf(apart) / 12, rel=1e-6)


def test_the_subspace_of_the_loadings_is_recovered():
    random = np.random.default_rng(1)
    model = extractor(random)
    vectors = random.normal(size=(300, 2))
    sets = [model.ubm.moments(frames)[0] for frames in draw_sets(model, vectors, 100, random)]
    # The background model has only approximate means.
    ubm = Gmm(model.ubm.weights, model.means + 0.5, model.ubm.variances)
    found, history = train_extractor(ubm, Reread(sets), 2, seed=0, iterations=30)
    assert never_falls(history)
    angles = subspace_angles(model.loadings.reshape(-1, 2), found.loadings.reshape(-1, 2))
    assert np.degrees(angles).max() < 3
    np.testing.assert_allclose(found.variances, model.variances, rtol=0.05)
    # T T' does not depend on the basis; and w has zero mean in the sample.
    gram = [np.einsum("cdr,ber->cdbe", one, one) for one in (found.loadings, model.loadings)]
    assert np.linalg.norm(gram[0] - gram[1]) < 0.2 * np.linalg.norm(gram[1])
    extracted = found.extract(sets)
    np.testing.assert_allclose(extracted.mean(0), 0, atol=0.01)
    np.testing.assert_allclose(np.cov(extracted.T), np.eye(2), atol=0.05)
    # Up to a rotation, they are the drawn vectors.
    rotated = extracted @ np.linalg.lstsq(extracted, vectors, rcond=None)[0]
    assert np.corrcoef(rotated.ravel(), vectors.ravel())[0, 1] > 0.98


def test_a_gaussian_without_frames_and_a_set_without_frames():
    random = np.random.default_rng(2)
    model = extractor(random)
    sets = draw_sets(model, random.normal(size=(20, 2)), 50, random)
    near = [frames[model.ubm.posteriors(frames)[0].argmax(1) > 0] for frames in sets]
    moments = [model.ubm.moments(frames)[0] for frames in [*near, sets[0][:0]]]
    found, history = train_extractor(model.ubm, moments, 2, seed=0)
    assert never_falls(history)
    np.testing.assert_array_equal(found.variances[0], model.ubm.variances[0])
    assert not found.extract(moments)[-1].any()
    assert found.extract([]).shape == (0, 2)
    with pytest.raises(UserError, match="no frames"):
        train_extractor(model.ubm, [], 2, seed=0)
    with pytest.raises(UserError, match="no frames"):
        train_extractor(model.ubm, moments[-1:], 2, seed=0)


@pytest.mark.parametrize("frames", [0, 1, 10, 11, 1000])
def test_online_i_vectors_are_those_of_the_frames_so_far(frames):
    random = np.random.default_rng(3)
    model = extractor(random)
    earlier, now = draw_sets(model, random.normal(size=(2, 2)), 1000, random)
    now, before = now[:frames], model.ubm.moments(earlier[:20])[0]
    for known in (None, before):
        found = model.online(now, every=10, before=known, posterior_scale=0.2, max_count=30.0)
        assert found.shape == (math.ceil(frames / 10), 2)
        for row, vector in enumerate(found):
            heard = now[: 10 * row + 1]
            heard = heard if known is None else np.concatenate([earlier[:20], heard])
            moments = model.ubm.moments(heard)[0]
            (expected,) = model.extract([moments], posterior_scale=0.2, max_count=30.0)
            np.testing.assert_allclose(vector, expected, rtol=1e-9)


# --- LDA and PLDA


def draw_speakers(
    model: Plda, counts: np.ndarray, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw vectors and the labels of their speakers, with given counts, shuffled."""
    means = random.multivariate_normal(model.mean, model.between, len(counts))
    labels = random.permutation(np.repeat(np.arange(len(counts)), counts))
    noise = random.multivariate_normal(np.zeros(len(model.mean)), model.within, len(labels))
    return means[labels] + noise, labels


def covariance(size: int, random: np.random.Generator) -> np.ndarray:
    root = random.normal(size=(size, size))
    return root @ root.T + 0.3 * np.eye(size)


@pytest.fixture
def plda() -> Plda:
    random = np.random.default_rng(4)
    return Plda(random.normal(size=3), 2 * covariance(3, random), covariance(3, random))


def test_plda_is_recovered_from_its_vectors(plda):
    random = np.random.default_rng(5)
    vectors, labels = draw_speakers(plda, random.integers(1, 6, 6000), random)
    names = np.array([f"s{label}" for label in labels])
    found, history = train_plda(vectors, names)
    assert never_falls(history)
    np.testing.assert_allclose(found.mean, plda.mean, atol=0.1)
    for name in ("between", "within"):
        one, other = getattr(found, name), getattr(plda, name)
        assert np.linalg.norm(one - other) < 0.06 * np.linalg.norm(other)


def test_the_likelihood_of_plda_is_that_of_one_large_gaussian():
    random = np.random.default_rng(6)
    model = Plda(np.zeros(2), covariance(2, random), covariance(2, random))
    vectors, labels = draw_speakers(model, np.array([1, 2, 3, 3]), random)
    found, history = train_plda(vectors, labels, iterations=3)
    expected = 0.0
    for label in range(4):
        own = vectors[labels == label]
        n = len(own)
        total = np.kron(np.ones((n, n)), found.between) + np.kron(np.eye(n), found.within)
        expected += multivariate_normal(np.tile(found.mean, n), total).logpdf(own.ravel())
    assert history[-1] == pytest.approx(expected)


@pytest.mark.parametrize("rank", [3, 1])
def test_scores_are_ratios_of_densities(plda, rank):
    random = np.random.default_rng(7)
    loadings = random.normal(size=(3, rank))
    plda = Plda(plda.mean, loadings @ loadings.T, plda.within)
    counts = np.array([1, 4, 2])
    enrolled = [2 * random.normal(size=(count, 3)) for count in counts]
    test = 2 * random.normal(size=(5, 3))
    found = plda.scores(np.array([own.mean(0) for own in enrolled]), test, counts)
    for (e, t), score in np.ndenumerate(found):
        n = counts[e] + 1
        own = np.kron(np.eye(n), plda.within)
        same = np.kron(np.ones((n, n)), plda.between)
        # The last vector, the test vector, has a speaker of its own.
        two = np.kron(block_diag(np.ones((n - 1, n - 1)), 1), plda.between)
        values = np.concatenate([enrolled[e], test[t : t + 1]]).ravel()
        mean = np.tile(plda.mean, n)
        densities = (multivariate_normal(mean, own + part).logpdf(values) for part in (same, two))
        assert score == pytest.approx(next(densities) - next(densities))
    one = plda.scores(test, test)
    np.testing.assert_allclose(one, one.T)


def test_plda_needs_vectors_that_differ():
    random = np.random.default_rng(8)
    vectors = random.normal(size=(8, 5))
    with pytest.raises(UserError, match="at most 4 dimensions"):
        train_plda(vectors, np.repeat([0, 1, 2, 3], 2))
    with pytest.raises(UserError, match="give several of each"):
        train_plda(vectors, np.arange(8))
    with pytest.raises(UserError, match="1 speakers"):
        train_plda(vectors, np.zeros(8))


def test_lda_finds_the_directions_of_the_speakers():
    random = np.random.default_rng(9)
    # Speakers differ in two of six directions, in which the noise is not the largest.
    mixing = covariance(6, random)
    labels = np.repeat(np.arange(200), 10)
    noise = random.normal(size=(2000, 6)) * [0.5, 0.5, 3, 3, 3, 3]
    means = np.pad(random.normal(size=(200, 2)) * [3.0, 1.0], ((0, 0), (0, 4)))
    vectors = (means[labels] + noise) @ mixing
    lda = train_lda(vectors, labels, 2, shrinkage=0)
    oracle = LinearDiscriminantAnalysis(solver="eigen", n_components=2).fit(vectors, labels)
    found, expected = lda(vectors), oracle.transform(vectors)
    np.testing.assert_allclose(
        np.abs(np.corrcoef(found.T, expected.T)[:2, 2:]), np.eye(2), atol=1e-6
    )
    inside = found - np.array([found[labels == s].mean(0) for s in range(200)])[labels]
    np.testing.assert_allclose(inside.T @ inside / 2000, np.eye(2), atol=1e-9)
    # With fewer vectors than dimensions, shrinkage keeps it finite.
    few = train_lda(random.normal(size=(12, 40)), np.repeat(np.arange(6), 2), 5)
    assert np.isfinite(few.directions).all()
    for dimension in (0, 6):
        with pytest.raises(UserError, match="take 1 to 5"):
            train_lda(random.normal(size=(12, 40)), np.repeat(np.arange(6), 2), dimension)
    with pytest.raises(UserError, match="two vectors that differ"):
        train_lda(random.normal(size=(6, 40)), np.arange(6), 2)


def test_lengths():
    vectors = length_normalise(np.array([[3.0, 4.0], [0.0, 0.0]]))
    np.testing.assert_allclose(vectors, [[0.6 * math.sqrt(2), 0.8 * math.sqrt(2)], [0, 0]])


# --- files


def test_models_are_read_as_they_were_written(tmp_path, plda):
    model = extractor(np.random.default_rng(10))
    lda = Lda(np.zeros(3), np.ones((3, 2)))
    for number, one in enumerate((model, TRUE, plda, lda)):
        path = tmp_path / f"{number}.safetensors"
        one.save(path)
        again = type(one).load(path)
        for name, value in vars(one).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(again, name), value)
    again = IvectorExtractor.load(tmp_path / "0.safetensors")
    frames = np.ones((5, 3))
    np.testing.assert_array_equal(again.online(frames), model.online(frames))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"means": np.zeros((3, 4))}, r"variances is float64 of shape \(3, 2\)"),
        ({"means": np.zeros((3, 2), np.float32)}, "means is float32"),
        ({"means": np.zeros(3)}, "means is float64 of shape"),
        ({"variances": np.zeros((3, 2))}, "not all positive"),
        ({"means": np.full((3, 2), np.inf)}, "NaN or Inf"),
        ({"means": np.full((3, 2), 1e300)}, "means are not all within 0 and 1e"),
        ({"variances": np.full((3, 2), 1e-300)}, "variances are not all within 1e-30 and"),
        ({"other": np.zeros(2)}, "expected weights, means, variances"),
    ],
)
def test_another_file_is_no_model(tmp_path, change, said):
    path = tmp_path / "model.safetensors"
    arrays = {name: getattr(TRUE, name) for name in ("weights", "means", "variances")}
    save_file(arrays | change, path)
    with pytest.raises(UserError, match=said) as error:
        Gmm.load(path)
    assert str(error.value).startswith(str(path))


def test_a_matrix_that_is_no_covariance(tmp_path, plda):
    path = tmp_path / "plda.safetensors"
    Plda(plda.mean, plda.between, -plda.within).save(path)
    with pytest.raises(UserError, match="not a covariance"):
        Plda.load(path)
