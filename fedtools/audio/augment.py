"""Random time shifts and background noise, as in Google's training code of Speech Commands.

P. Warden, Speech Commands: a dataset for limited-vocabulary speech recognition, 2018; TensorFlow's
examples/speech_commands. The draws of a client in a round are a function of its key alone, so that
they are the same for any number of jobs and any stack of clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedtools.files.clips import CLIP_SAMPLES, RATE
from fedtools.files.seeds import generator

INT16_MIN, INT16_MAX = -32768, 32767


@dataclass(frozen=True)
class Augment:
    """What is done to training clips; all zero does nothing.

    Attributes:
        time_shift_ms: a clip is moved by up to so many milliseconds, earlier or later.
        noise_volume: noise is scaled by a factor uniform in [0, noise_volume].
        noise_probability: how often there is noise.
    """

    time_shift_ms: Annotated[int, Ge(0), Le(CLIP_SAMPLES * 1000 // RATE)] = 100
    noise_volume: Annotated[float, Ge(0), Le(1)] = 0.1
    noise_probability: Annotated[float, Ge(0), Le(1)] = 0.8


@dataclass(frozen=True)
class Plan:
    """A client's clips in a round, and what is done to them: arrays (steps, B).

    Attributes:
        clips: int64, which of the client's clips, from 0.
        shift: int64, in samples; above 0 is later.
        noise_start: int64, the first sample of the noise, or -1 for none.
        volume: float32, the factor of the noise; 0 without noise.
    """

    clips: np.ndarray
    shift: np.ndarray
    noise_start: np.ndarray
    volume: np.ndarray


def plan(
    seed: int,
    round: int,
    client: str,
    size: int,
    steps: int,
    batch_size: int,
    noise_samples: int,
    options: Augment,
    clip_samples: int = CLIP_SAMPLES,
) -> Plan:
    """Draw the batches of one client in one round: a function of these arguments alone.

    Batches run through one shuffle of all clips after another, so that no clip is ever two uses
    ahead of another; no clip comes twice in a batch.

    Args:
        seed: of the experiment.
        round: the number of the round.
        client: its id.
        size: the number of its clips, at least 1.
        steps: the number of batches.
        batch_size: B is this, or `size` if that is smaller.
        noise_samples: the length of all background noise; 0 for none, else at least a clip's.
        options: the augmentation.
        clip_samples: the length of a clip.
    """
    random = generator(seed, round, client, "augment")
    width = min(batch_size, size)
    clips = _shuffles(random, size, steps, width)
    # Drawn alike whatever the options are: switching one off leaves the others as they were.
    moved, noisy, place, loudness = random.random((4, steps, width))
    largest = options.time_shift_ms * RATE // 1000
    shift = (moved * (2 * largest + 1)).astype(np.int64) - largest
    noisy = noisy < (options.noise_probability if noise_samples and options.noise_volume else 0)
    start = (place * (noise_samples - clip_samples + 1)).astype(np.int64)
    volume = (loudness * options.noise_volume).astype(np.float32)
    return Plan(clips, shift, np.where(noisy, start, -1), np.where(noisy, volume, 0))


def apply(
    waves: Tensor, shift: Tensor, noise_start: Tensor, volume: Tensor, noise: Tensor
) -> Tensor:
    """Shift clips, filling with zeros, and add noise; all at once, on the device of the clips.

    Args:
        waves: int16 or float (..., samples).
        shift: whole numbers (...), by no more than a clip's samples; above 0 is later.
        noise_start: whole numbers (...), the first sample of the noise, or -1 for none.
        volume: floats (...), the factor of the noise.
        noise: int16 or float (samples,), all background noise; may be empty where nothing uses it.

    Returns:
        float32 (..., samples), within the range of 16-bit integers.
    """
    samples = waves.shape[-1]
    count = shift.numel()
    # Before and after each clip lies one of zeros; a window that is moved is a clip that is moved.
    spread = waves.new_zeros(2 * count + 1, samples)
    spread[1::2] = waves.reshape(count, samples)
    begin = torch.arange(1, 2 * count, 2, device=waves.device) * samples - shift.reshape(-1)
    moved = spread.view(-1).unfold(0, samples, 1)[begin].float()
    if len(noise):
        start = noise_start.reshape(-1)
        factor = torch.where(start < 0, 0, volume.reshape(-1))
        added = noise.unfold(0, samples, 1)[start.clamp(min=0)]
        moved.addcmul_(added, factor[:, None]).clamp_(INT16_MIN, INT16_MAX)
    return moved.view(waves.shape)


def _shuffles(random: np.random.Generator, size: int, steps: int, width: int) -> np.ndarray:
    """Clip numbers (steps, width) from shuffles end to end, without a clip twice in a batch."""
    rounds = math.ceil(steps * width / size)
    shuffles = random.permuted(np.tile(np.arange(size), (rounds, 1)), axis=1)
    for number in range(1, rounds):
        # A batch that straddles two shuffles has begun with these clips: the second shuffle gets
        # them last.
        if begun := number * size % width:
            late = np.zeros(size, dtype=bool)
            late[shuffles[number - 1, -begun:]] = True
            shuffles[number] = shuffles[number][np.argsort(late[shuffles[number]], kind="stable")]
    return shuffles.reshape(-1)[: steps * width].reshape(steps, width)
