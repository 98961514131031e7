"""Speakers told apart by scores, clusters against speakers, distortion: by hand and by counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from fedtools.score.clusters import (
    adjusted_rand_index,
    counts_of,
    mutual_information,
    resampled_information,
)
from fedtools.score.distortion import cepstra, mel_cepstral_distortion
from fedtools.score.verification import (
    chance_of_first,
    chance_reciprocal_rank,
    equal_error_rate,
    first_ranks,
    resampled_error_rates,
)

# --- equal error rate


def counted(scores: list[float], targets: list[bool]) -> float:
    """The equal error rate, in %, from all thresholds, each counted by itself."""
    pairs = list(zip(scores, targets, strict=True))
    total = {kind: sum(target is kind for _, target in pairs) for kind in (True, False)}
    points = [
        (
            sum(target and score < threshold for score, target in pairs) / total[True],
            sum(not target and score >= threshold for score, target in pairs) / total[False],
        )
        for threshold in [*sorted(set(scores)), math.inf]
    ]
    for (reject, accept), (next_reject, next_accept) in itertools.pairwise(points):
        if next_reject >= next_accept:
            # Where the straight line between the two has equal coordinates.
            share = (accept - reject) / ((accept - reject) + (next_reject - next_accept))
            return 100 * (reject + share * (next_reject - reject))
    raise AssertionError(points)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
)
def test_equal_error_rate_is_what_counting_gives_with_many_ties(targets, impostors):
    scores = [float(score) for score in targets + impostors]
    kinds = [True] * len(targets) + [False] * len(impostors)
    found = equal_error_rate(np.array(scores), np.array(kinds))
    assert found == pytest.approx(counted(scores, kinds), abs=1e-9)


@pytest.mark.parametrize("distance", [0.0, 1.0, 3.0])
def test_equal_error_rate_of_two_gaussians(distance):
    """Equal variances: the threshold lies in the middle, the rate is Phi(-d'/2)."""
    random = np.random.default_rng(0)
    scores = np.concatenate([random.normal(distance, 1, 100_000), random.normal(0, 1, 100_000)])
    targets = np.arange(200_000) < 100_000
    found = equal_error_rate(scores, targets)
    assert found == pytest.approx(100 * norm.cdf(-distance / 2), abs=0.5)


def test_equal_error_rate_at_the_ends():
    targets = np.array([True, True, False, False])
    assert equal_error_rate(np.array([3.0, 2.0, 1.0, 0.0]), targets) == 0
    assert equal_error_rate(np.array([0.0, 1.0, 2.0, 3.0]), targets) == 100
    assert equal_error_rate(np.zeros(4), targets) == 50
    assert math.isnan(equal_error_rate(np.zeros(2), np.array([True, True])))


def test_a_draw_is_the_trials_of_the_speakers_drawn():
    """Copies of a speaker are speakers, but for each other: written out as so many trials."""
    random = np.random.default_rng(1)
    speakers, draws = 5, np.array([[1, 1, 1, 1, 1], [2, 0, 1, 0, 2], [0, 3, 1, 1, 0]], float)
    queries, gallery = random.integers(0, speakers, 20), random.integers(0, speakers, 30)
    scores = random.integers(0, 9, (20, 30)) + 2.0 * (queries[:, None] == gallery)
    used = random.random((20, 30)) < 0.8
    found = resampled_error_rates(scores, used, queries, gallery, draws)
    for drawn, rate in zip(draws.astype(int), found, strict=True):
        trials = []
        for (query, item), score in np.ndenumerate(scores):
            one, other = queries[query], gallery[item]
            often = drawn[one] if one == other else drawn[one] * drawn[other]
            trials += [(score, bool(one == other))] * (often if used[query, item] else 0)
        assert rate == pytest.approx(counted(*map(list, zip(*trials, strict=True))), abs=1e-9)


def test_with_very_many_scores_draws_are_near_enough():
    random = np.random.default_rng(2)
    numbers = np.repeat(np.arange(20), 8)
    scores = random.normal(size=(160, 160)) + 1.5 * (numbers[:, None] == numbers)
    used = ~np.eye(160, dtype=bool)
    (found,) = resampled_error_rates(scores, used, numbers, numbers, np.ones((1, 20)))
    exact = equal_error_rate(scores[used], (numbers[:, None] == numbers)[used])
    assert found == pytest.approx(exact, abs=0.1)


# --- ranks


def test_ranks_of_a_small_example():
    scores = np.array([[0.9, 0.5, 0.7, 0.1], [0.2, 0.2, 0.1, 0.0], [0.4, 0.3, 0.2, 0.1]])
    wanted = np.array([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1]], bool)
    used = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], bool)
    # 0.7 after 0.9; 0.2 ties with another, which counts first; 0.1 is the last of three.
    assert first_ranks(scores, wanted, used).tolist() == [2, 2, 3]


@pytest.mark.parametrize(("wanted", "items"), [(1, 1), (1, 5), (2, 5), (3, 6), (6, 6)])
def test_chance_is_the_mean_over_all_orders(wanted, items):
    places = list(itertools.combinations(range(1, items + 1), wanted))
    first = sum(min(one) == 1 for one in places) / len(places)
    reciprocal = sum(1 / min(one) for one in places) / len(places)
    assert chance_of_first(wanted, items) == pytest.approx(first)
    assert chance_reciprocal_rank(wanted, items) == pytest.approx(reciprocal)


# --- clusters


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=40))
def test_clusters_are_measured_as_scikit_learn_does(pairs):
    speakers, clusters = (np.array(one) for one in zip(*pairs, strict=True))
    counts = counts_of(speakers, clusters)
    expected = normalized_mutual_info_score(speakers, clusters)
    assert mutual_information(counts) == pytest.approx(expected, abs=1e-9)
    expected = adjusted_rand_score(speakers, clusters)
    assert adjusted_rand_index(counts) == pytest.approx(expected, abs=1e-9)


def test_clusters_that_are_the_speakers_and_clusters_by_chance():
    speakers = np.repeat(np.arange(20), 30)
    same = counts_of(speakers, (speakers + 7) % 20)
    assert mutual_information(same) == pytest.approx(1)
    assert adjusted_rand_index(same) == 1
    random = counts_of(speakers, np.random.default_rng(0).integers(0, 20, len(speakers)))
    assert mutual_information(random) < 0.2
    assert abs(adjusted_rand_index(random)) < 0.01
    draws = np.random.default_rng(1).multinomial(20, np.full(20, 1 / 20), 50).astype(float)
    assert resampled_information(same, draws) == pytest.approx(1)
    assert resampled_information(random, draws).mean() == pytest.approx(mutual_information(random))


def test_a_speaker_drawn_twice_is_two_that_are_not_compared():
    """The adjusted Rand index by going through all pairs."""
    counts = np.array([[3, 1], [0, 2], [1, 2]], float)
    drawn = np.array([2, 0, 1])
    items = [
        (speaker, copy, cluster)
        for speaker, often in enumerate(drawn)
        for copy in range(often)
        for cluster, count in enumerate(counts[speaker].astype(int))
        for _ in range(count)
    ]
    pairs = [
        (one[:2] == other[:2], one[2] == other[2])
        for one, other in itertools.combinations(items, 2)
        if one[0] != other[0] or one[1] == other[1]
    ]
    rows, columns, both = (
        sum(kind(pair) for pair in pairs) for kind in (lambda p: p[0], lambda p: p[1], all)
    )
    expected = rows * columns / len(pairs)
    by_hand = (both - expected) / ((rows + columns) / 2 - expected)
    assert adjusted_rand_index(counts, drawn.astype(float)) == pytest.approx(by_hand)


# --- distortion


def test_distortion_by_hand():
    """One cosine apart: c_1 differs by a half of its height, and the loudness does not count."""
    bins, height = 8, 0.6
    wave = np.cos(np.pi * (np.arange(bins) + 0.5) / bins)
    one = np.array([[1.0] * bins, np.arange(bins)])
    other = one + np.array([height * wave, np.full(bins, 5.0)])
    found = mel_cepstral_distortion(cepstra(one), cepstra(other))
    expected = 10 / math.log(10) * math.sqrt(2) * height / 2
    np.testing.assert_allclose(found, [expected, 0], atol=1e-9)


def test_cepstra_are_sums_of_cosines():
    filterbanks = np.random.default_rng(0).normal(size=(3, 20))
    found = cepstra(filterbanks)
    assert found.shape == (3, 12)
    for (frame, order), value in np.ndenumerate(found):
        angles = [math.pi * (order + 1) * (m + 0.5) / 20 for m in range(20)]
        terms = map(math.prod, zip(filterbanks[frame], map(math.cos, angles), strict=True))
        assert value == pytest.approx(sum(terms) / 20)
    assert cepstra(filterbanks[:, :5]).shape == (3, 4)
