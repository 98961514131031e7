"""MFCC in torch against Kaldi's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kaldi_mfcc import kaldi_mfcc

from fedtools.audio.mfcc import CPU_SLICE, Mfcc

RATE = 16_000


def voice(seed: int = 0, samples: int = RATE, rate: int = RATE) -> np.ndarray:
    """Return a synthetic spoken word: gliding, swelling harmonics under a formant, in noise."""
    random = np.random.default_rng(seed)
    times = np.arange(samples) / rate
    phase = 2 * np.pi * np.cumsum(110 + 40 * seed + 30 * np.sin(2 * np.pi * 2 * times)) / rate
    harmonics = np.arange(1, 25)[:, None]
    strength = np.exp(-(((110 * harmonics - 800) / 600) ** 2)) + 0.1 / harmonics
    speech = (strength * np.sin(harmonics * phase)).sum(0) * np.hanning(samples) ** 2
    return np.rint(2500 * speech + random.normal(0, 20, samples) + 35).astype(np.float32)


WAVES = {
    "voice": voice(),
    "higher voice": voice(3),
    "noise": np.random.default_rng(1).normal(0, 1000, RATE).round(),
    "full scale": np.random.default_rng(2).choice([-32768.0, 32767.0], RATE),
    "far off centre": np.random.default_rng(3).normal(5000, 3, RATE).round(),
    "one click": np.eye(1, RATE, 8000)[0],
    "silence": np.zeros(RATE),
    "constant": np.full(RATE, 5000.0),
    "voice after silence": np.concatenate([np.zeros(1600), voice(1)[:-1600]]),
}


@pytest.mark.parametrize("name", WAVES)
def test_coefficients_are_kaldis(name):
    wave = WAVES[name].astype(np.float32)
    found = Mfcc()(torch.from_numpy(wave))
    wanted = kaldi_mfcc(wave, 40, 30, 10, RATE)
    assert found.shape == wanted.shape == (98, 40) and found.dtype == torch.float32
    # Next to silence, Kaldi's own single precision has the same error in loud tones.
    np.testing.assert_allclose(found.numpy(), wanted, atol=2e-3)


@pytest.mark.parametrize(
    ("count", "length", "shift", "rate", "samples"),
    [(40, 25, 10, 16_000, 12_345), (13, 30, 15, 16_000, 480), (23, 25, 10, 8_000, 9_000)],
)
def test_other_options_are_kaldis_too(count, length, shift, rate, samples):
    wave = voice(2, samples, rate)
    found = Mfcc(count, length, shift, rate)(torch.from_numpy(wave))
    np.testing.assert_allclose(
        found.numpy(), kaldi_mfcc(wave, count, length, shift, rate), atol=2e-3
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    loudness=st.floats(1, 30_000),
    offset=st.integers(-2000, 2000),
)
def test_random_waves_against_kaldi(seed, loudness, offset):
    random = np.random.default_rng(seed)
    wave = np.rint(random.normal(offset, loudness, 2400)).clip(-32768, 32767).astype(np.float32)
    found = Mfcc()(torch.from_numpy(wave)).numpy()
    np.testing.assert_allclose(found, kaldi_mfcc(wave, 40, 30, 10, RATE), atol=1e-3)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (2, CPU_SLICE + 1), (1, 2, 1)])
def test_any_leading_dimensions_give_the_same_numbers(shape):
    mfcc, count = Mfcc(), int(np.prod(shape))
    waves = torch.from_numpy(np.stack([voice(seed, 2000) for seed in range(count)]))
    alone = torch.stack([mfcc(wave) for wave in waves])
    found = mfcc(waves.view(*shape, -1))
    assert found.shape == (*shape, 10, 40)
    torch.testing.assert_close(found.reshape(alone.shape), alone, rtol=0, atol=1e-3)


def test_it_is_no_part_of_a_model():
    assert not Mfcc().state_dict() and not list(Mfcc().parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_same_on_a_gpu():
    waves = torch.from_numpy(np.stack([voice(seed) for seed in range(4)]))
    found = Mfcc().cuda()(waves.cuda()).cpu()
    torch.testing.assert_close(found, Mfcc()(waves), rtol=0, atol=5e-3)
