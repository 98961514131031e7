"""Linkability and singling out against brute force, and their values in the attacks' tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtools.score.legal import risk


def by_hand(scores: np.ndarray, speakers: list[str]) -> tuple[float, float]:
    first: dict[str, int] = {}
    later, second = [], {}
    for index, name in enumerate(speakers):
        if name in first:
            later.append(index)
            second.setdefault(name, index)
        else:
            first[name] = index
    linked = []
    for item in later:
        column = {name: scores[one, item] for name, one in first.items()}
        best = [name for name, score in column.items() if score == max(column.values())]
        # Ties for the highest score are resolved at random.
        linked.append((speakers[item] in best) / len(best))
    singled = []
    for name in second:
        threshold = max(scores[first[name], one] for who, one in first.items() if who != name)
        singled.append(sum(scores[first[name], item] > threshold for item in second.values()) == 1)
    return float(np.mean(linked)), float(np.mean(singled))


@given(
    counts=st.lists(st.integers(1, 3), min_size=4, max_size=9).filter(
        lambda counts: sum(count > 1 for count in counts) > 1
    ),
    seed=st.integers(0, 2**32 - 1),
    few=st.booleans(),
)
def test_by_hand(counts, seed, few):
    """Values by hand agree with ties, and for any order of items."""
    random = np.random.default_rng(seed)
    speakers = [f"s{number}" for number, count in enumerate(counts) for _ in range(count)]
    random.shuffle(speakers)
    scores = random.normal(size=(len(speakers),) * 2)
    scores = scores.round() if few else scores
    found = risk(scores, speakers)
    assert (found.linked, found.singled) == pytest.approx(by_hand(scores, speakers))
    assert found.speakers == len(counts)


def test_chance():
    """Uninformative scores link one in N, and single out N (N - 1) / (2 N - 1) / (2 N - 2)."""
    random = np.random.default_rng(0)
    speakers = [f"s{number}" for number in range(25) for _ in range(2)]
    found = [risk(random.normal(size=(50, 50)), speakers) for _ in range(200)]
    assert np.mean([one.linked for one in found]) == pytest.approx(1 / 25, abs=0.01)
    assert np.mean([one.singled for one in found]) == pytest.approx(25 * 24 / 49 / 48, abs=0.03)


@pytest.mark.parametrize("value", [0.0, -np.inf])
def test_scores_that_are_all_alike_are_chance(value):
    """Models that did not change, or that are not sent, link no speaker."""
    speakers = [f"s{number}" for number in range(10) for _ in range(2)]
    found = risk(np.full((20, 20), value), speakers)
    assert found.linked == pytest.approx(1 / 10)
    assert found.singled == 0


def test_without_ties_linkability_is_the_packages():
    from legal_eval.io import ScoreMatrix
    from legal_eval.metrics.linkability import linkability

    random = np.random.default_rng(2)
    speakers = [f"s{number}" for number in range(12) for _ in range(2)]
    scores = random.normal(size=(24, 24)) + np.equal.outer(speakers, speakers)
    matrix = ScoreMatrix(scores[::2, 1::2], speakers[::2], speakers[1::2], {})
    (expected,) = linkability(matrix, 12, estimator="exact")
    assert risk(scores, speakers).linked == pytest.approx(expected)
    assert 0 < expected < 1


def test_who_moves_like_nobody_else_is_found():
    speakers = ["a", "b", "c", "a", "b", "c"]
    same = np.equal.outer(speakers, speakers).astype(float)
    same += 0.01 * np.random.default_rng(1).normal(size=same.shape)
    assert risk(same, speakers).linked == 1.0
    # Models that did not change are infinitely far from all others.
    assert risk(np.where(same > 0.5, 1.0, -np.inf), speakers) == (1.0, 1.0, 3)


def test_too_few():
    assert np.isnan(risk(np.zeros((3, 3)), ["a", "b", "c"]).linked)
    assert np.isnan(risk(np.zeros((2, 2)), ["a", "a"]).singled)
