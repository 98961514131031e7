"""SpecAugment on features: the masked share of the speech."""

from __future__ import annotations

import pytest
import torch
from espnet2.asr.specaug.specaug import SpecAug

from fedtools.models.acoustic.masks import scaled

# For audio, bins; for features, audio frames per feature frame, and values.
BINS, STEP, VALUES = 80, 4, 256


def masked(specaug: SpecAug, frames: int, values: int, seed: int) -> tuple[float, float]:
    """Return the shares of the frames and of the values covered by one mask."""
    torch.manual_seed(seed)
    with torch.no_grad():
        seen, _ = specaug(torch.ones(1, frames, values), torch.tensor([frames]))
    gone = seen[0] == 0
    return float(gone.all(1).float().mean()), float(gone.all(0).float().mean())


@pytest.mark.parametrize("kind", ["freq", "time", "ratio"])
def test_masks_cover_as_much_speech_as_of_audio(kind):
    """Mean and maximum masked shares agree for audio and features of the same speech."""
    options = {"apply_time_warp": False, "apply_freq_mask": False, "apply_time_mask": False}
    options |= {
        "freq": {"apply_freq_mask": True, "freq_mask_width_range": (0, 28), "num_freq_mask": 1},
        "time": {"apply_time_mask": True, "time_mask_width_range": (0, 100), "num_time_mask": 1},
        "ratio": {
            "apply_time_mask": True, "time_mask_width_ratio_range": (0.0, 0.3), "num_time_mask": 1,
        },
    }[kind]  # fmt: skip
    audio = SpecAug(**options)
    features = scaled(audio, STEP, VALUES / BINS)
    side = 1 if kind == "freq" else 0
    of_audio = [masked(audio, 1000, BINS, seed)[side] for seed in range(600)]
    of_features = [masked(features, 1000 // STEP, VALUES, seed)[side] for seed in range(600)]
    assert max(of_features) == pytest.approx(max(of_audio), abs=0.02)
    means = [sum(some) / len(some) for some in (of_audio, of_features)]
    assert means[1] == pytest.approx(means[0], rel=0.1)
    # The input is unchanged.
    assert [masked(audio, 1000, BINS, seed)[side] for seed in range(40)] == of_audio[:40]


def test_warps_are_of_as_much_time():
    audio = SpecAug(True, 20, apply_freq_mask=False, apply_time_mask=False)
    assert scaled(audio, STEP, 1.0).time_warp.window == 5
    assert scaled(audio, 100, 1.0).time_warp.window == 1
    assert audio.time_warp.window == 20


def test_a_width_without_chance_stays_one():
    options = {"apply_time_warp": False, "apply_time_mask": False, "num_freq_mask": 1}
    audio = SpecAug(**options, freq_mask_width_range=(20, 21))
    found = {masked(scaled(audio, STEP, 3.2), 10, VALUES, seed)[1] for seed in range(50)}
    assert found == {64 / 256}
