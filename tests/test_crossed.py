"""Differences over seeds and speakers: coverage of intervals, in simulations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from fedtools.report.differences import cells
from fedtools.score.crossed import (
    Difference,
    difference,
    differences,
    effects,
    holm,
    mean_bounds,
    over_seeds,
)

# Seeds, speakers, and standard deviations of seed, speaker and both effects, in points.
WORLDS = {
    "three seeds, speakers alone": (3, 60, 0.0, 6.0, 0.0),
    "three seeds, like": (3, 60, 0.8, 6.0, 6.0),
    "three seeds, seeds alone": (3, 60, 1.0, 0.0, 4.0),
    "three seeds, three clients of 60": (3, 180, 0.5, 5.0, 5.0),
    "five seeds, 250 people of clips": (5, 250, 0.5, 8.0, 8.0),
    "five seeds, people of few clips, and silence": (5, 644, 0.5, 8.0, 8.0),
    "three seeds, people of few clips, and silence": (3, 644, 0.5, 8.0, 8.0),
    "three seeds, 16 persons": (3, 16, 0.5, 4.0, 4.0),
    "one seed": (1, 40, 0.0, 6.0, 3.0),
}
CLIENTS = {"three seeds, three clients of 60": 3}
TRUTH = -2.0


def simulate(name: str, random: np.random.Generator):
    """Draw error counts of two systems, whose rates differ by the truth and random effects."""
    seeds, speakers, of_seed, of_speaker, of_both = WORLDS[name]
    tokens = random.integers(80, 260, speakers)
    if "few clips" in name:
        # Like keywords: some words per person, and clips of noise without a speaker.
        tokens = np.where(np.arange(speakers) < 236, random.integers(4, 25, speakers), 1)
    rate = random.uniform(20, 40, speakers)
    effects = (
        TRUTH
        + random.normal(0, of_seed, (seeds, 1))
        + random.normal(0, of_speaker, speakers)
        + random.normal(0, of_both, (seeds, speakers))
    )
    shares = np.stack([rate + effects / 2, rate - effects / 2]).clip(1, 99) / 100
    one, other = random.binomial(tokens, shares)
    clients = np.arange(speakers) % CLIENTS.get(name, 1)
    return one, other, tokens, clients


@pytest.mark.parametrize("name", WORLDS)
def test_intervals_hold_the_truth(name):
    random, held, times = np.random.default_rng(len(name)), 0, 1500
    for _ in range(times):
        found = difference(*simulate(name, random))
        held += found.low <= TRUTH <= found.high
    assert 0.91 <= held / times <= 0.97, held / times


def test_one_seed_is_a_paired_test_of_equal_speakers():
    random = np.random.default_rng(0)
    tokens = np.full(20, 100)
    one, other = random.binomial(100, 0.3, (2, 1, 20))
    found = difference(one, other, tokens, np.zeros(20, int))
    by_hand = ttest_1samp((one - other)[0], 0)
    bounds = by_hand.confidence_interval(0.95)
    assert found.value == pytest.approx((one - other).mean())
    assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high))
    assert found.p == pytest.approx(by_hand.pvalue)


def test_mean_over_clients_counts_each_alike():
    """The value is the mean of both clients' rates, whatever their numbers of words."""
    tokens = np.array([1000] * 10 + [10] * 10)
    clients = np.repeat([0, 1], 10)
    one, other = np.zeros((2, 20)), np.zeros((2, 20))
    one[:, :10], one[:, 10:] = 100, 5
    assert difference(one, other, tokens, clients).value == pytest.approx((10 + 50) / 2)


def test_clients_of_one_speaker_are_drawn_from_each_other():
    random = np.random.default_rng(3)
    tokens = random.integers(50, 150, 30)
    one, other = random.binomial(tokens, 0.3, (2, 1, 30))
    found = difference(one, other, tokens, np.arange(30))
    by_hand = ttest_1samp(100 * (one - other)[0] / tokens, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((by_hand.low, by_hand.high))


def test_seeds_that_agree_widen_nothing_and_seeds_that_differ_do():
    random = np.random.default_rng(1)
    tokens = np.full(40, 200)
    one, other = random.binomial(200, 0.3, (2, 1, 40))
    same = difference(np.repeat(one, 3, 0), np.repeat(other, 3, 0), tokens, np.zeros(40, int))
    alone = difference(one, other, tokens, np.zeros(40, int))
    assert (same.low, same.high) == pytest.approx((alone.low, alone.high))
    shifted = np.repeat(one, 3, 0) + np.array([[-20], [0], [20]])
    wide = difference(shifted, np.repeat(other, 3, 0), tokens, np.zeros(40, int))
    assert wide.high - wide.low > 5 * (alone.high - alone.low)


@pytest.mark.parametrize("gaps", [[-8, -2, 1], [-3, -1], [2, 5, 4, 9, 7]])
def test_seeds_alone_give_students_interval_of_as_many_less_one(gaps):
    """Speakers do not differ, so that seeds are all that varies: a test of their means."""
    errors = np.full((len(gaps), 12), 30) + np.array(gaps)[:, None]
    found = difference(errors, np.full_like(errors, 30), np.full(12, 100), np.zeros(12, int))
    by_hand = ttest_1samp(gaps, 0)
    bounds = by_hand.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high))
    assert found.p == pytest.approx(by_hand.pvalue)


def test_degrees_of_freedom_are_those_of_all_mean_squares():
    """By hand: a two-way table of gaps, in which seeds, speakers and both together vary."""
    seeds, speakers = 3, 12
    random = np.random.default_rng(4)
    gaps = (
        random.normal(0, 4, (seeds, 1))
        + random.normal(0, 6, speakers)
        + random.normal(0, 9, (seeds, speakers))
    ).round()
    others = np.full((seeds, speakers), 50.0)
    found = difference(others + gaps, others, np.full(speakers, 100), np.zeros(speakers, int))
    mean, rows, columns = gaps.mean(), gaps.mean(1), gaps.mean(0)
    of_seeds = speakers * sum((row - mean) ** 2 for row in rows) / (seeds - 1)
    of_speakers = seeds * sum((column - mean) ** 2 for column in columns) / (speakers - 1)
    of_both = sum(
        (gaps[one, other] - rows[one] - columns[other] + mean) ** 2
        for one in range(seeds)
        for other in range(speakers)
    )
    of_both /= (seeds - 1) * (speakers - 1)
    # Else, one of the mean squares would be taken alone.
    assert of_both < min(of_seeds, of_speakers)
    total = of_seeds + of_speakers - of_both
    free = total**2 / (
        of_seeds**2 / (seeds - 1)
        + of_speakers**2 / (speakers - 1)
        + of_both**2 / ((seeds - 1) * (speakers - 1))
    )
    error = np.sqrt(total / seeds / speakers)
    half = student.ppf(0.975, free) * error
    assert found[:3] == pytest.approx((mean, mean - half, mean + half))
    assert found.p == pytest.approx(2 * student.sf(abs(mean) / error, free))


# --- means over seeds of what speakers are drawn for


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("of_seed", [0.0, 0.7, 3.0])
def test_means_over_seeds_hold_the_truth(of_seed, known):
    """Rates of three seeds over the same 30 speakers, who are drawn; in a table, bounds alone."""
    random, held, times = np.random.default_rng(7), 0, 600
    for _ in range(times):
        values = (
            TRUTH
            + random.normal(0, of_seed, (3, 1))
            + random.normal(0, 4, 30)
            + random.normal(0, 4, (3, 30))
        )
        drawn = random.multinomial(30, np.full(30, 1 / 30), 200) @ values.T / 30
        rates = values.mean(1)
        if known:
            both = np.var(drawn - drawn.mean(1)[:, None], 0).sum() / 2
            _, low, high, _ = over_seeds(rates, np.var(drawn.mean(1)), both, 29)
        else:
            low, high = mean_bounds(rates, *np.percentile(drawn, [2.5, 97.5], axis=0))
        held += low <= TRUTH <= high
    assert 0.91 <= held / times <= (0.98 if known else 1), held / times


def test_seeds_of_the_committed_page():
    """Rates of 8.7, 9.2 and 16.1 %, and speakers who add little: [1, 22], not [7.9, 14.2]."""
    rates = [8.71, 9.22, 16.13]
    _, low, high, _ = over_seeds(rates, 1e-6)
    told = ttest_1samp(rates, 0).confidence_interval(0.95)
    assert (low, high) == pytest.approx((told.low, told.high), abs=1e-3)
    assert (low, high) == pytest.approx((1.0, 21.7), abs=0.1)


def test_bounds_of_a_mean():
    """One seed's stay; with three alike, they are of the same width; one without has none."""
    assert mean_bounds([3.0], [1.0], [6.0]) == (1.0, 6.0)
    assert mean_bounds([3.0] * 3, [1.0] * 3, [5.0] * 3) == pytest.approx((1.0, 5.0))
    assert np.isnan(mean_bounds([3.0] * 2, [1.0, np.nan], [5.0, np.nan])).all()
    # Not those of the first seed, nor the mean of them.
    low, high = mean_bounds([3.0, 3.0], [2.9, -7.0], [3.1, 13.0])
    width = 1.959964 * np.sqrt(((0.1 / 1.959964) ** 2 + (10 / 1.959964) ** 2) / 2)
    assert (low, high) == pytest.approx((3 - width, 3 + width))


# --- columns of differences


def methods_alike(
    random: np.random.Generator, count: int, seeds: int, of_seed: Sequence[float], of_both: float
) -> tuple[list[np.ndarray], np.ndarray]:
    """Draw the errors of methods that do not differ, (seeds, speakers) each; and tokens."""
    tokens, rate = random.integers(80, 260, 60), random.uniform(20, 40, 60)
    found = []
    for number in range(count):
        effect = random.normal(0, of_seed[number % len(of_seed)], (seeds, 1))
        effect = rate + effect + random.normal(0, of_both, (seeds, 60))
        found.append(random.binomial(tokens, effect.clip(1, 99) / 100).astype(float))
    return found, tokens


@pytest.mark.parametrize(
    ("seeds", "references", "of_seed", "of_both"),
    [(3, 1, (0.8,), 1.0), (3, 2, (0.8, 3.2), 6.0), (2, 1, (3.0,), 1.0), (1, 1, (1.5,), 1.0)],
)
def test_methods_that_do_not_differ_are_seldom_in_bold(seeds, references, of_seed, of_both):
    """Of eleven methods any is in bold in at most one of twenty tables; and intervals hold 0.

    Each by itself, with Holm's adjustment of its column, this is so in 7 to 36 % of the tables.
    """
    random, bold, held, times = np.random.default_rng(seeds), 0, [], 200
    for _ in range(times):
        found, tokens = methods_alike(random, 11 + references, seeds, of_seed, of_both)
        columns = [
            differences([
                effects(one, found[number], tokens, np.zeros(60, int)) for one in found[references:]
            ])
            for number in range(references)
        ]  # fmt: skip
        bold += any("**" in cell for column in cells(columns) for cell in column)
        held += [one.low <= 0 <= one.high for column in columns for one in column]
    # Two of a hundred would be above this by chance if it were 5 %.
    assert bold / times < 0.085
    if seeds > 1:
        assert np.mean(held) > 0.94
    else:
        assert bold == 0


def test_a_method_that_is_better_is_in_bold():
    """Five points, with seeds that vary by half a point: found among eleven."""
    random, bold = np.random.default_rng(0), 0
    for _ in range(40):
        found, tokens = methods_alike(random, 12, 3, (0.5,), 2.0)
        found[5] = found[5] - 0.05 * tokens
        others = found[1:]
        column = differences([effects(one, found[0], tokens, np.zeros(60, int)) for one in others])
        bold += cells([column])[0][4].startswith("**")
    assert bold > 36


def test_no_row_has_less_variance_between_seeds_than_the_rows_have_on_average():
    """By hand, without other effects: four rows of three seeds, with the first system in common."""
    gaps = np.array([[0, 3, -3], [2, 2.1, 1.9], [-1, 1, 0], [5, 9, 10]])
    errors = [30 + np.repeat(row[:, None], 12, 1) for row in gaps]
    base, tokens, clients = np.full((3, 12), 30.0), np.full(12, 100), np.zeros(12, int)
    column = differences([effects(one, base, tokens, clients) for one in errors])
    variances = gaps.var(1, ddof=1)
    # Two rows have half of their variance in common.
    free = 2 * 4 / (1 + 3 / 4)
    for row, variance, found in zip(gaps, variances, column, strict=True):
        error = np.sqrt(max(variance, variances.mean()) / 3)
        half = student.ppf(0.975, free) * error
        bounds = [row.mean(), row.mean() - half, row.mean() + half]
        assert found[:3] == pytest.approx(bounds)
        assert found.p == pytest.approx(2 * student.sf(abs(row.mean()) / error, free))
    # A row by itself, and the reference, are as they were.
    assert differences([effects(errors[0], base, tokens, clients), None]) == [
        difference(errors[0], base, tokens, clients), None
    ]  # fmt: skip


def test_one_seed_is_not_tested_in_a_column():
    random = np.random.default_rng(2)
    one, other = random.binomial(100, 0.3, (2, 1, 20))
    given = one - 20, other, np.full(20, 100), np.zeros(20, int)
    (found,) = differences([effects(*given)])
    alone = difference(*given)
    assert found[:3] == alone[:3] and np.isnan(found.p) and alone.p < 0.001
    assert "**" not in cells([[found]])[0][0] and "**" in cells([[alone]])[0][0]


def test_bold_is_adjusted_for_all_rows_and_columns():
    def row(p: float) -> Difference:
        return Difference(-2.0, -4.0, -0.1, p)

    # Each below 0.05, but not times the number of tests.
    assert cells([[row(0.02), row(0.03), row(0.04)]]) == [["-2.0 [-4.0, -0.1]"] * 3]
    bold = "**-2.0 [-4.0, -0.1]**"
    assert cells([[row(0.02)], [row(0.02)], [None]]) == [[bold], [bold], ["-"]]
    assert cells([[row(0.02)], [row(0.026)], [row(0.9)]])[0] == ["-2.0 [-4.0, -0.1]"]
    assert cells([[row(0.01)], [row(0.3)], [row(0.9)]])[0] == [bold]
    # Worse is not better.
    assert cells([[row(0.001)]], 1) == [["-2.0 [-4.0, -0.1]"]]


def test_few_speakers_have_no_interval_and_no_difference_has_p_one():
    few = difference(np.ones((3, 5)), np.zeros((3, 5)), np.full(5, 10), np.zeros(5, int))
    assert few.value == 10 and np.isnan([few.low, few.high, few.p]).all()
    none = difference(np.ones((3, 20)), np.ones((3, 20)), np.full(20, 10), np.zeros(20, int))
    assert none == (0, 0, 0, 1)


def test_holm():
    """The method's worked example: sorted p times the number remaining, never falling."""
    assert holm([0.01, 0.04, 0.03, np.nan, 0.005]) == pytest.approx(
        [0.03, 0.06, 0.06, np.nan, 0.02], nan_ok=True
    )
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
