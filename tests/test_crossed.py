"""Differences over seeds and speakers: coverage of intervals, in simulations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from fedtools.score.crossed import difference, holm

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
