"""Speaker verification scores, clusters against speakers, distortion: by hand and by counting."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from fedtools.core.errors import UserError
from fedtools.score.bootstrap import interval, speaker_draws
from fedtools.score.calibration import cllr, linkability, min_cllr, min_dcf
from fedtools.score.clusters import (
    adjusted_rand_index,
    counts_of,
    mutual_information,
    resampled_information,
)
from fedtools.score.distortion import cepstra, mel_cepstral_distortion
from fedtools.score.trials import Trials
from fedtools.score.verification import (
    binomial_bounds,
    chance_of_first,
    chance_reciprocal_rank,
    det_curve,
    equal_error_rate,
    estimate_error_rate,
    first_ranks,
    resampled_error_rates,
    true_positive_rate,
)

# --- equal error rate


def counted(scores: list[float], targets: list[bool]) -> float:
    """Compute the equal error rate, in %, by counting at every threshold."""
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
    """With equal variances, the threshold lies in the middle, and the rate is Phi(-d'/2)."""
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
    """Copies of a speaker count as speakers, but are not compared with each other."""
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
    # 0.7 after 0.9; 0.2 ties with another, which ranks first; 0.1 is the last of three.
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
    """The adjusted Rand index agrees with a loop over all pairs."""
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
    """With one cosine of distance, c_1 differs by half its height, and loudness does not count."""
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


# --- other measures of trials

FEW_SCORES = st.lists(st.integers(-3, 3), min_size=1, max_size=8)


def trials_of(targets: list[float], others: list[float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([*targets, *others], float), np.arange(len(targets) + len(others)) < len(
        targets
    )


def gaussians(distance: float, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draw scores that are log-likelihood ratios: N(+-d^2 / 2, d^2)."""
    random = np.random.default_rng(seed)
    scores = distance * random.normal(size=2 * count)
    targets = np.arange(2 * count) < count
    return scores + np.where(targets, 1, -1) * distance**2 / 2, targets


@given(FEW_SCORES, FEW_SCORES, st.floats(0.01, 0.99), st.floats(0.1, 10), st.floats(0.1, 10))
def test_costs_and_rates_are_those_of_all_thresholds(targets, others, prior, reject, accept):
    trials = trials_of(targets, others)
    points = [
        (
            threshold,
            sum(score < threshold for score in targets) / len(targets),
            sum(score >= threshold for score in others) / len(others),
        )
        for threshold in [*sorted({*targets, *others}), math.inf]
    ]
    np.testing.assert_allclose(np.transpose(det_curve(*trials)), points)
    costs = [reject * prior * miss + accept * (1 - prior) * alarm for _, miss, alarm in points]
    expected = min(costs) / min(reject * prior, accept * (1 - prior))
    options = {"prior": prior, "reject_cost": reject, "accept_cost": accept}
    assert min_dcf(*trials, **options) == pytest.approx(expected)
    assert 0 <= expected <= 1 + 1e-9
    for most in (0.0, 0.2, 1 / 3, 1.0):
        expected = 100 * max(1 - miss for _, miss, alarm in points if alarm <= most)
        assert true_positive_rate(*trials, most) == pytest.approx(expected)


def test_true_positives_at_few_false_ones():
    trials = trials_of([5.0, 3.0, 3.0, 1.0], np.arange(1000) / 250)
    # Of 0 ... 3.996, one is above 3.99; 1 % are 10, of which the lowest is 3.96.
    assert true_positive_rate(*trials, 0.0) == 25
    assert true_positive_rate(*trials, 0.001) == 25
    assert true_positive_rate(*trials, 0.249) == 25
    # Scores of 3 are accepted together with 250 others.
    assert true_positive_rate(*trials, 0.25) == 75
    assert math.isnan(true_positive_rate(*trials_of([1.0], []), 0.01))
    # 3 of 300 are 1 %, though not in binary.
    scores = trials_of([0.5], [1.0] * 3 + [0.0] * 297)
    assert true_positive_rate(*scores, 0.01) == 100
    gaussian = true_positive_rate(*gaussians(2.0, 200_000), 0.01)
    assert gaussian == pytest.approx(100 * norm.sf(norm.isf(0.01) - 2), abs=0.5)


@given(FEW_SCORES, FEW_SCORES)
def test_cllr_and_the_best_that_a_rising_function_can_do(targets, others):
    trials = trials_of(targets, others)
    by_hand = sum(math.log2(1 + math.exp(-s)) for s in targets) / len(targets)
    by_hand += sum(math.log2(1 + math.exp(s)) for s in others) / len(others)
    assert cllr(*trials) == pytest.approx(by_hand / 2)
    # Every way to divide the scores into runs that share a ratio.
    values = sorted({*targets, *others})
    best = math.inf
    for cuts in itertools.product([True, False], repeat=len(values) - 1):
        runs = np.split(values, np.flatnonzero(cuts) + 1)
        counts = [[sum(s in run for s in kind) for run in runs] for kind in (targets, others)]
        shares = [np.array(count) / sum(count) for count in counts]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = shares[0] / shares[1]
            if (np.diff(ratios) < 0).any():
                continue
            bits = [np.log2(1 + 1 / ratios), np.log2(1 + ratios)]
        costs = [(s[s > 0] @ b[s > 0]) / 2 for s, b in zip(shares, bits, strict=True)]
        best = min(best, sum(costs))
    assert min_cllr(*trials) == pytest.approx(best, abs=1e-9)
    assert min_cllr(*trials) <= min(cllr(*trials), 1) + 1e-9
    # The function may apply any monotonic map to the scores.
    assert min_cllr(np.exp(trials[0]) - 5, trials[1]) == pytest.approx(best, abs=1e-9)


def test_calibrated_scores_have_the_least_cllr_but_for_noise():
    scores, targets = gaussians(2.0, 50_000)
    assert cllr(scores, targets) == pytest.approx(min_cllr(scores, targets), abs=0.005)
    assert cllr(3 * scores, targets) > 1.5 * min_cllr(scores, targets)
    assert cllr(np.zeros(4), np.arange(4) < 2) == 1
    assert min_cllr(np.zeros(4), np.arange(4) < 2) == pytest.approx(1)
    assert min_cllr(*trials_of([1.0, 2.0], [0.0])) == 0
    assert cllr(*trials_of([1e4], [-1e4])) == 0
    assert cllr(*trials_of([-1e4], [-1e4])) == pytest.approx(1e4 / 2 / math.log(2))
    for measure in (cllr, min_cllr, min_dcf, linkability):
        assert math.isnan(measure(*trials_of([1.0], [])))
        with pytest.raises(UserError, match="NaN"):
            measure(*trials_of([math.nan], [1.0]))


def test_linkability_of_known_distributions():
    # Equal scores: 0. Separated: all, except for the trapezoid's error at both ends.
    scores = np.random.default_rng(0).normal(size=5000)
    same = linkability(np.tile(scores, 2), np.arange(10_000) < 5000)
    assert same == 0
    assert linkability(*gaussians(9.0, 5000)) == pytest.approx(1, abs=0.01)
    assert linkability(np.zeros(40), np.arange(40) < 20) == 0
    assert math.isnan(linkability(*trials_of([1.0] * 19, [0.0] * 50)))
    # Two Gaussians: the integral of the definition. Independent of the scores' sign.
    scores, targets = gaussians(2.0, 200_000)
    grid = np.linspace(-10, 14, 4001)
    ratio = np.exp(grid)
    local = np.where(ratio > 1, 2 * ratio / (1 + ratio) - 1, 0)
    expected = (local * norm.pdf(grid, 2, 2)).sum() * (grid[1] - grid[0])
    assert linkability(scores, targets) == pytest.approx(expected, abs=0.01)
    assert linkability(-scores, targets) == pytest.approx(expected, abs=0.01)
    # A prior for which hardly any score makes a target likely.
    assert linkability(scores, targets, prior_ratio=0.001) < 0.05


@pytest.mark.parametrize(("count", "omega"), [(20, 1.0), (137, 1.0), (1500, 0.5)])
def test_linkability_bin_by_bin(count, omega):
    scores, targets = gaussians(1.0, count, seed=count)
    bins = min(count // 10, 100)
    width = (scores.max() - scores.min()) / bins
    heights = []
    for number in range(bins):
        place = np.minimum(((scores - scores.min()) / width).astype(int), bins - 1) == number
        same, other = ((place & kind).sum() / kind.sum() / width for kind in (targets, ~targets))
        ratio = omega * same / other if other else math.inf
        local = 0.0 if not same or ratio <= 1 else 1.0 if not other else 2 * ratio / (1 + ratio) - 1
        heights.append(local * same)
    expected = sum((one + two) / 2 * width for one, two in itertools.pairwise(heights))
    assert linkability(scores, targets, prior_ratio=omega) == pytest.approx(expected)


# --- intervals of the equal error rate


def sessions(speakers: int, seed: int, spread: float = 2.0) -> tuple[np.ndarray, ...]:
    """Return all pairs, kinds and speakers of two sessions per speaker, as points in a space."""
    random = np.random.default_rng(seed)
    points = np.repeat(spread * random.normal(size=(speakers, 6)), 2, axis=0)
    points += random.normal(size=points.shape)
    one, other = np.triu_indices(len(points), 1)
    distances = np.square(points[one] - points[other]).sum(1)
    pairs = np.stack([one // 2, other // 2], 1)
    return -distances, pairs[:, 0] == pairs[:, 1], pairs


def test_four_errors_of_463():
    """The interval of the paper's 0.86 % has the binomial tails of scipy."""
    low, high = binomial_bounds(4 / 463, 463)
    assert (round(low, 2), round(high, 1)) == (0.24, 2.2)
    assert binom.sf(3, 463, low / 100) == pytest.approx(0.025)
    assert binom.cdf(4, 463, high / 100) == pytest.approx(0.025)
    assert binomial_bounds(0.0, 463)[0] == 0
    assert binomial_bounds(0.0, 463)[1] == pytest.approx(100 * (1 - 0.025 ** (1 / 463)))
    assert binomial_bounds(1.0, 10)[1] == 100


def test_draws_of_lists_are_those_of_matrices():
    """If few speakers differ strongly from others, the interval over drawn speakers is wider."""
    random = np.random.default_rng(3)
    numbers = np.repeat(np.arange(12), 8)
    ease = random.integers(-10, 50, 12)[numbers]
    scores = random.integers(0, 40, (96, 96)) + ease[:, None] * (numbers[:, None] == numbers)
    rows, columns = np.triu_indices(96, 1)
    pairs = np.stack([numbers[rows], numbers[columns]], 1)
    found = estimate_error_rate(
        scores[rows, columns], pairs[:, 0] == pairs[:, 1], pairs, resamples=400, seed=5
    )
    draws = speaker_draws(12, 400, 5, "equal error rate")
    used = np.triu(np.ones((96, 96), bool), 1)
    low, high = interval(resampled_error_rates(scores, used, numbers, numbers, draws))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.value == equal_error_rate(scores[used], (numbers[:, None] == numbers)[used])


def test_trials_of_one_owner_are_drawn_with_it():
    """Target and non-target trials are repeated as often as their owner is drawn."""
    random = np.random.default_rng(4)
    owners, targets = np.repeat(np.arange(12), 200), np.tile([True, False], 1200)
    scores = random.normal(size=2400) + targets + 2 * random.normal(size=12)[owners] * targets
    found = estimate_error_rate(scores, targets, owners, resamples=50, seed=3)
    draws = speaker_draws(12, 50, 3, "equal error rate").astype(int)[:, owners]
    rates = [equal_error_rate(np.repeat(scores, n), np.repeat(targets, n)) for n in draws]
    drawn, exact = interval(np.array(rates)), binomial_bounds(found.value / 100, 1200)
    assert found.low == pytest.approx(min(drawn[0], exact[0]))
    assert found.high == pytest.approx(max(drawn[1], exact[1])) == pytest.approx(drawn[1])
    assert found.value == equal_error_rate(scores, targets)


def test_intervals_hold_the_truth():
    truth = equal_error_rate(*sessions(600, 99)[:2])
    found = [estimate_error_rate(*sessions(40, seed), resamples=100) for seed in range(40)]
    held = [one.low <= truth <= one.high for one in found]
    assert sum(held) >= 37
    assert all(one.low <= one.value <= one.high for one in found)
    assert estimate_error_rate(*sessions(40, 0)) == estimate_error_rate(*sessions(40, 0))


def test_no_error_has_the_exact_interval_of_as_many_targets():
    """Draws of speakers without an error have no width."""
    speakers = np.repeat(np.arange(20), 3)
    one, other = np.triu_indices(60, 1)
    pairs = np.stack([speakers[one], speakers[other]], 1)
    targets = pairs[:, 0] == pairs[:, 1]
    found = estimate_error_rate(targets + 0.0, targets, pairs, resamples=100)
    # Three pairs of each speaker.
    assert (found.value, found.low, found.targets) == (0, 0, 60)
    assert found.high == pytest.approx(100 * (1 - 0.025 ** (1 / 60)))


def test_an_error_rate_as_a_text():
    scores, targets, pairs = sessions(40, 0)
    found = estimate_error_rate(scores, targets, np.char.add("s", pairs.astype(str)))
    assert str(found) == (
        f"{found.value:.2f} % (95 % interval {found.low:.2f}-{found.high:.2f} %, 40 target trials)"
    )
    # Too few speakers to draw from, too few targets for a bare rate, none at all.
    few = estimate_error_rate(*sessions(8, 0))
    assert str(few).startswith(f"{few.low:.2f}-{few.high:.2f} %")
    assert "warning: only 8 target trials, fewer than 20" in str(few)
    assert few.high >= binomial_bounds(0.0, 8)[1]
    none = estimate_error_rate(np.array([1.0]), np.array([False]), np.array([["a", "b"]]))
    assert (none.low, none.high) == (0, 100)
    assert str(none) == "unknown (0 target and 1 other trials)"
    with pytest.raises(UserError, match="a target trial has two speakers"):
        estimate_error_rate(scores, ~targets, pairs)


def test_a_thousand_draws_of_ten_thousand_trials_take_seconds():
    random = np.random.default_rng(0)
    one, other = random.integers(0, 500, (2, 10_000))
    pairs = np.stack([np.arange(11_000) % 500] * 2, 1)
    pairs[:10_000] = np.stack([one, np.where(one == other, (other + 1) % 500, other)], 1)
    targets = pairs[:, 0] == pairs[:, 1]
    begin = time.process_time()
    estimate_error_rate(random.normal(size=11_000) + 2 * targets, targets, pairs)
    assert time.process_time() - begin < 10


# --- lists of trials

SPEAKERS = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}


def test_trials_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "trials"
    trials = Trials(["b1", "a1", "a1"], ["b2", "b1", "a2"], np.array([True, False, True]))
    trials.write(path)
    assert path.read_text() == "a1 a2 target\na1 b1 nontarget\nb1 b2 target\n"
    found = Trials.read(path, SPEAKERS)
    assert (list(found.enrolled), list(found.test)) == (["a1", "a1", "b1"], ["a2", "b1", "b2"])
    assert found.targets.tolist() == [True, False, True]
    assert len(found) == 3
    assert found.speakers(SPEAKERS).tolist() == [["a", "a"], ["a", "b"], ["b", "b"]]
    matrix = np.arange(6).reshape(2, 3)
    scores = found.scores(matrix, ["b1", "a1"], ["a2", "b2", "b1"])
    assert scores.tolist() == [matrix[1, 0], matrix[1, 2], matrix[0, 1]]


@given(
    st.sets(
        st.tuples(*[st.text("aB0-_.é", min_size=1, max_size=3)] * 2).filter(lambda p: p[0] != p[1])
    ),
    st.data(),
)
def test_any_list_that_is_written_can_be_read(tmp_path_factory, pairs, data):
    if not pairs:
        return
    path = tmp_path_factory.mktemp("trials") / "trials"
    kinds = data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    Trials(*zip(*pairs, strict=True), np.array(kinds)).write(path)
    found = Trials.read(path)
    rows = set(zip(found.enrolled, found.test, found.targets.tolist(), strict=True))
    assert rows == {(*pair, kind) for pair, kind in zip(pairs, kinds, strict=True)}
    lines = path.read_bytes().splitlines()
    assert lines == sorted(lines)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a1 b2", "expected `<model> <model> target|nontarget`"),
        ("a1 b2 Target", "expected `<model> <model> target|nontarget`"),
        ("a1 b2 target 3", "expected"),
        ("a1  b2 target", "expected"),
        ("a1 b2 target ", "expected"),
        ("a1\tb2 target", "expected"),
        ("a1 b2 nontarget\r", "expected"),
        ("", "expected"),
        ("a1 b1 nontarget", "the pair 'a1 b1' is duplicated"),
        ("a1 a2 target", "'a1 a2' is not in order; sort with LC_ALL=C"),
        ("b1 b1 target", "'b1' is compared with itself"),
        ("a1 c1 nontarget", "no model 'c1'"),
        ("a1 b2 target", "'a1' and 'b2' are of two speakers, not target"),
        ("b1 b2 nontarget", "'b1' and 'b2' are of one speaker, not nontarget"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, said):
    path = tmp_path / "trials"
    path.write_bytes(f"a1 b1 nontarget\n{line}\n".encode())
    with pytest.raises(UserError) as error:
        Trials.read(path, SPEAKERS)
    assert str(error.value).startswith(f"{path}:2: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_list_without_trials(tmp_path):
    path = tmp_path / "trials"
    path.write_text("")
    with pytest.raises(UserError, match="no trial"):
        Trials.read(path)
