"""Distributions of words: `</s>` is none, factors by hand, and Z."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rescored_world import make_stream

from fedtools.lm.marginals import background_of, log_factors, smoothed
from fedtools.lm.reweighting import Adaptation, Lists, Weights, rescore_group
from fedtools.lm.stream import open_stream
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.options import Privacy
from fedtools.privacy.plan import Plan
from fedtools.privacy.releases import Releases

# `</s>`, `<unk>` and three words.
COUNTS = np.array([1000, 4, 39, 9, 24])
U = [0.0, 5 / 80, 40 / 80, 10 / 80, 25 / 80]


def test_the_background_is_of_words():
    assert background_of(COUNTS).tolist() == U


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_factors(scale, normalise):
    background = background_of(COUNTS)
    everybody, own = np.array([0, 0.1, 0.2, 0.3, 0.4]), np.array([0, 0.4, 0.3, 0.2, 0.1])
    found = log_factors(
        *(background, everybody, own), alpha=0.5, beta=0.2, scale=scale, normalise=normalise
    )
    factors = [
        ((0.3 * u + 0.5 * q_bar + 0.2 * q) / u) ** scale
        for u, q_bar, q in zip(U[1:], everybody[1:], own[1:], strict=True)
    ]
    z = sum(u * factor for u, factor in zip(U[1:], factors, strict=True)) if normalise else 1.0
    assert found[1:] == pytest.approx([math.log(factor / z) for factor in factors])
    # What is left is a distribution of words, and the end of a sentence is as likely as before.
    assert found[0] == 0
    if normalise:
        assert sum(u * math.exp(one) for u, one in zip(U, found, strict=True)) == pytest.approx(1)


@pytest.mark.parametrize("normalise", [False, True])
def test_who_talks_like_the_background_changes_nothing(normalise):
    """No word gains by `</s>`, which the background text has and counts of words have not."""
    background = background_of(COUNTS)
    said = smoothed(np.array([0, 5, 40, 10, 25.0]), background, 0.1)
    found = log_factors(
        *(background, said, said), alpha=0.5, beta=0.5, scale=2.0, normalise=normalise
    )
    assert found == pytest.approx(np.zeros(5), abs=1e-12)


@pytest.mark.parametrize("mechanism", ["laplace", "paper"])
def test_noise_on_the_end_of_sentences_is_left_out(tmp_path, mechanism):
    """What was released is a distribution of words, positive for each (not the paper's)."""
    rescored = open_stream(make_stream(tmp_path / "stream")).rescored
    lists, paper = Lists(rescored, Weights()), mechanism == "paper"
    assert lists.background[0] == 0 and (lists.background[1:] > 0).all()
    counts = lists.counts(slice(0, 36), 0.0)
    noise_on_end = 0
    for number in range(20):
        options = Privacy(mechanism=mechanism, epsilon=0.5)
        releases = Releases(Plan(options, 1, False), NoiseKey(bytes(32)), str(number))
        noisy = releases.by_server(counts, 1, lists.background, 0.1)
        noise_on_end += noisy[0] != 0
        shared = lists.shared(noisy, 0.1, paper)
        assert shared[0] == 0 and shared.sum() == pytest.approx(1)
        assert (shared[1:] > 0).all() or paper
        assert noise_on_end == 0 or not paper
        options = Adaptation(alpha=0.75, beta=0.0, normalise=True)
        best, _ = rescore_group(lists, slice(0, 36), shared, counts, options)
        assert len(best) == 36
    assert noise_on_end or paper
