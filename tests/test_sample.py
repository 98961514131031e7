"""Sampling and splitting: functions of their arguments alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtools.files.errors import UserError
from fedtools.server.sample import sample_clients

CLIENTS = [f"client{number}" for number in range(12)]


@given(st.permutations(CLIENTS), st.integers(1, 12), st.integers(), st.integers(0, 10**6))
def test_the_order_of_the_list_does_not_matter(shuffled, count, seed, round):
    drawn = sample_clients(shuffled, count, seed, round)
    assert drawn == sample_clients(CLIENTS, count, seed, round)
    assert len(set(drawn)) == count and set(drawn) <= set(CLIENTS)
    assert drawn == sorted(drawn)


def test_every_client_is_drawn_as_often():
    drawn = Counter()
    for round in range(2000):
        drawn.update(sample_clients(CLIENTS, 3, 1, round))
    # 500 expected for each, standard deviation 19.
    assert all(400 < drawn[client] < 600 for client in CLIENTS)


def test_seeds_and_rounds_differ():
    samples = {tuple(sample_clients(CLIENTS, 6, seed, r)) for seed in (0, 1) for r in range(20)}
    assert len(samples) > 35


@pytest.mark.parametrize(
    ("amount", "drawn"), [(1.0, 12), (1, 1), (0.5, 6), (0.2, 2), (0.21, 3), (0.001, 1), (12, 12)]
)
def test_shares_and_numbers(amount, drawn):
    assert len(sample_clients(CLIENTS, amount, 0, 0)) == drawn


@pytest.mark.parametrize("amount", [0, -1, 13, 0.0, 1.5, -0.1, float("nan"), True])
def test_what_cannot_be_drawn(amount):
    with pytest.raises(UserError, match="give a"):
        sample_clients(CLIENTS, amount, 0, 0)


def test_bad_lists():
    with pytest.raises(UserError, match="no client"):
        sample_clients([], 1.0, 0, 0)
    with pytest.raises(UserError, match="'b' comes twice"):
        sample_clients(["a", "b", "b"], 1.0, 0, 0)
