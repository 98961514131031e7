"""Sampling: a function of seed, round and clients alone, and fair."""

from __future__ import annotations

import itertools
from collections import Counter
from math import comb, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_mix import split_mix

from fedtools.core.errors import UserError
from fedtools.server.sample import sample_clients

CLIENTS = [f"client{number:02}" for number in range(12)]


seeds, rounds = st.integers(0, 2**70), st.integers(0, 10**6)


@given(st.integers(1, 60), st.data(), seeds, rounds)
def test_those_with_the_lowest_numbers_take_part(total, data, seed, round):
    clients, count = [f"c{n:03}" for n in range(total)], data.draw(st.integers(1, total))
    numbers = dict(zip(clients, split_mix(seed, round, total), strict=True))
    expected = sorted(sorted(clients, key=numbers.get)[:count])
    assert sample_clients(clients, count, seed, round) == expected
    assert sample_clients(tuple(clients), count, seed, round, "fixed") == expected


@given(st.integers(1, 60), st.floats(0, 1, exclude_min=True), seeds, rounds)
def test_those_below_the_threshold_take_part(total, share, seed, round):
    clients = [f"c{n:03}" for n in range(total)]
    numbers = split_mix(seed, round, total)
    # Exact: both sides are integer multiples of 2 ** -64 times a float.
    expected = [c for c, n in zip(clients, numbers, strict=True) if n <= int(share * 2.0**64)]
    assert sample_clients(clients, share, seed, round, "poisson") == expected


def test_known_samples():
    """Golden numbers: a change of the sample changes every existing experiment."""
    assert split_mix(0, 1, 2) == [14140609184704445358, 13229218492946011116]
    assert sample_clients(CLIENTS, 4, 0, 1) == ["client02", "client05", "client07", "client09"]
    assert sample_clients(CLIENTS, 0.25, 7, 30, "poisson") == [
        "client00",
        "client03",
        "client05",
        "client07",
        "client11",
    ]
    million = [f"{n:07}" for n in range(1_000_000)]
    assert sample_clients(million, 3, 1, 2) == ["0188380", "0466250", "0715678"]


def test_names_do_not_matter_only_places():
    """The caller passes the clients in C order, which `fedtools init` has checked."""
    others = [f"x{number:02}" for number in range(12)]
    for round in range(50):
        places = [CLIENTS.index(c) for c in sample_clients(CLIENTS, 5, 3, round)]
        assert [others.index(c) for c in sample_clients(others, 5, 3, round)] == places
        assert places == sorted(places) and len(set(places)) == 5


def chi_square(found: Counter, cells: int) -> float:
    """Return chi-square in standard deviations above its mean for equally likely cells."""
    expected = found.total() / cells
    value = sum(n * n for n in found.values()) / expected - found.total()
    return (value - (cells - 1)) / sqrt(2 * (cells - 1))


@pytest.mark.parametrize(("total", "count"), [(5, 2), (6, 3), (4, 1), (7, 5)])
def test_every_subset_is_as_likely(total, count):
    clients = CLIENTS[:total]
    found = Counter(tuple(sample_clients(clients, count, 1, r)) for r in range(6000))
    assert found.keys() <= set(itertools.combinations(clients, count))
    assert abs(chi_square(found, comb(total, count))) < 4


def test_every_client_is_drawn_as_often():
    drawn = Counter()
    for round in range(2000):
        drawn.update(sample_clients(CLIENTS, 3, 1, round))
    # 500 expected for each, standard deviation 19.
    assert all(400 < drawn[client] < 600 for client in CLIENTS)


@pytest.mark.parametrize(("amount", "share"), [(0.3, 0.3), (0.01, 0.01), (9, 0.75), (0.9, 0.9)])
def test_each_client_is_drawn_by_itself(amount, share):
    """Means, variances and covariances over rounds are those of independent coins."""
    times, total = 8000, len(CLIENTS)
    samples = [sample_clients(CLIENTS, amount, 5, r, "poisson") for r in range(times)]
    sizes = [len(drawn) for drawn in samples]
    mean, variance = sum(sizes) / times, share * (1 - share)
    assert abs(mean - total * share) < 4.5 * sqrt(total * variance / times)
    spread = sum((size - mean) ** 2 for size in sizes) / (times - 1)
    # For a binomial's sample variance: (kurtosis - 1 + 2 / times) / times.
    error = sqrt((2 + (1 - 6 * variance) / (total * variance)) / times) * total * variance
    assert abs(spread - total * variance) < 4.5 * error
    singles = Counter(client for drawn in samples for client in drawn)
    pairs = Counter(pair for drawn in samples for pair in itertools.combinations(drawn, 2))
    for client in CLIENTS:
        assert abs(singles[client] - times * share) < 4.5 * sqrt(times * variance)
    for pair in itertools.combinations(CLIENTS, 2):
        both = share**2
        assert abs(pairs[pair] - times * both) < 4.5 * sqrt(times * both * (1 - both)) + 1


def test_rounds_and_seeds_are_independent():
    """Participation predicts neither the next round nor the next seed."""
    for near in (lambda r: (5, r + 1), lambda r: (6, r)):
        agree = Counter()
        for round in range(3000):
            one, other = (
                set(sample_clients(CLIENTS, 0.5, *at, "poisson"))
                for at in ((5, round), near(round))
            )
            agree.update(c for c in CLIENTS if (c in one) == (c in other))
        # 1500 expected, standard deviation 27.
        assert all(1380 < agree[client] < 1620 for client in CLIENTS)


def test_seeds_and_rounds_differ():
    samples = {tuple(sample_clients(CLIENTS, 6, seed, r)) for seed in (0, 1) for r in range(20)}
    assert len(samples) > 35


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("amount", [1.0, 12])
def test_a_share_of_one_takes_everybody(sampling, amount):
    assert all(sample_clients(CLIENTS, amount, 0, r, sampling) == CLIENTS for r in range(200))


def test_poisson_may_draw_nobody():
    drawn = [sample_clients(CLIENTS, 0.01, 0, r, "poisson") for r in range(100)]
    assert [] in drawn and all(len(each) < 4 for each in drawn)
    # A sample of fixed size is never empty.
    assert all(len(sample_clients(CLIENTS, 0.01, 0, r)) == 1 for r in range(100))


@pytest.mark.parametrize(
    ("amount", "drawn"), [(1.0, 12), (1, 1), (0.5, 6), (0.2, 2), (0.21, 3), (0.001, 1), (12, 12)]
)
def test_shares_and_numbers(amount, drawn):
    assert len(sample_clients(CLIENTS, amount, 0, 0)) == drawn


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("amount", [0, -1, 13, 0.0, 1.5, -0.1, float("nan"), True])
def test_what_cannot_be_drawn(amount, sampling):
    with pytest.raises(UserError, match="give a"):
        sample_clients(CLIENTS, amount, 0, 0, sampling)


def test_nobody_to_draw_from():
    with pytest.raises(UserError, match="no client"):
        sample_clients([], 1.0, 0, 0)
