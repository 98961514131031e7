"""Distributions of words: without `</s>`, factors by hand, and Z."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rescored_world import make_stream

from fedtools.lm.reweighting import Lists, ListWeights, background_of
from fedtools.lm.stream import open_stream
from fedtools.methods.fmp import FMP, ClientState
from fedtools.privacy.key import NoiseKey
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
    method = FMP(alpha=0.5, beta=0.2, scale=scale, normalise=normalise)
    found = method.factors(background, everybody, own)
    factors = [
        ((0.3 * u + 0.5 * q_bar + 0.2 * q) / u) ** scale
        for u, q_bar, q in zip(U[1:], everybody[1:], own[1:], strict=True)
    ]
    z = sum(u * factor for u, factor in zip(U[1:], factors, strict=True)) if normalise else 1.0
    assert found[1:] == pytest.approx([math.log(factor / z) for factor in factors])
    # The rest is a distribution of words, and sentences end with the same probability as before.
    assert found[0] == 0
    if normalise:
        assert sum(u * math.exp(one) for u, one in zip(U, found, strict=True)) == pytest.approx(1)


@pytest.mark.parametrize("normalise", [False, True])
def test_who_talks_like_the_background_changes_nothing(normalise):
    """No word gains from `</s>`, which the background text has and counts of words lack."""
    background = background_of(COUNTS)
    method = FMP(alpha=0.5, beta=0.5, scale=2.0, smoothing=0.1, normalise=normalise)
    said = method.smoothed(np.array([0, 5, 40, 10, 25.0]), background)
    found = method.factors(background, said, said)
    assert found == pytest.approx(np.zeros(5), abs=1e-12)


@pytest.mark.parametrize("mechanism", ["laplace", "paper"])
def test_noise_on_the_end_of_sentences_is_left_out(tmp_path, mechanism):
    """The release is a distribution of words, all positive (unlike the paper's)."""
    rescored = open_stream(make_stream(tmp_path / "stream")).rescored
    lists, paper = Lists(rescored, ListWeights()), mechanism == "paper"
    assert lists.background[0] == 0 and (lists.background[1:] > 0).all()
    options = {"privacy": {"mechanism": mechanism, "epsilon": 0.5}, "sigma": 0.0, "smoothing": 0.1}
    method = FMP(alpha=0.75, beta=0.0, normalise=True, **options)
    state = ClientState("all", lists, [slice(0, 36)] * 2, method)
    state.count()
    noise_on_end = 0
    for number in range(20):
        releases = Releases(method.plan(1), NoiseKey(bytes(32)), str(number))
        noisy = method.release(state.counts, 1, lists.background, releases)
        noise_on_end += noisy[0] != 0
        shared = method.global_distribution(noisy, lists.background)
        assert shared[0] == 0 and shared.sum() == pytest.approx(1)
        assert (shared[1:] > 0).all() or paper
        assert noise_on_end == 0 or not paper
        assert len(state.rescore(shared)) == 36
    assert noise_on_end or paper
