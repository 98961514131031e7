"""Random time shifts and background noise, as in Google's training code of Speech Commands.

P. Warden, Speech Commands: a dataset for limited-vocabulary speech recognition, 2018; TensorFlow's
examples/speech_commands. A client's draws in a round depend on seed, round and client alone, so
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

from fedtools.core.seeds import generator
from fedtools.data.clips import CLIP_SAMPLES, RATE

INT16_MIN, INT16_MAX = -32768, 32767


@dataclass(frozen=True)
class Augment:
    """Options of the augmentation of training clips; zeros leave the clips as they are.

    Attributes:
        time_shift_ms: largest shift of a clip in milliseconds, earlier or later.
        noise_volume: noise is scaled by a factor uniform in [0, noise_volume].
        noise_probability: probability that noise is added to a clip.
    """

    time_shift_ms: Annotated[int, Ge(0), Le(CLIP_SAMPLES * 1000 // RATE)] = 100
    noise_volume: Annotated[float, Ge(0), Le(1)] = 0.1
    noise_probability: Annotated[float, Ge(0), Le(1)] = 0.8


@dataclass(frozen=True)
class Plan:
    """A client's batches of one round and their augmentation, as arrays (steps, B).

    Attributes:
        clips: int64, index of the client's clip, from 0.
        shift: int64, in samples; positive is later.
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
    """Draw the batches of one client in one round; the result depends on the arguments alone.

    Batches are cut from successive shuffles of all clips, so that the uses of any two clips differ
    by at most one; no clip occurs twice in a batch.

    Args:
        seed: seed of the experiment.
        round: number of the round.
        client: id of the client.
        size: number of the client's clips; 0 gives batches without clips.
        steps: number of batches.
        batch_size: B is this, or `size` if that is smaller.
        noise_samples: length of all background noise; 0 for none, else at least a clip's.
        options: the augmentation.
        clip_samples: length of a clip.
    """
    random = generator(seed, round, client, "augment")
    width = min(batch_size, size)
    if not width:
        none = np.zeros((steps, 0), np.int64)
        return Plan(none, none, none, none.astype(np.float32))
    clips = _shuffles(random, size, steps, width)
    # All four are drawn whatever the options are: switching one off leaves the others unchanged.
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
    """Shift clips, filling with zeros, and add noise, as one batch on the device of the clips.

    Args:
        waves: int16 or float (..., samples).
        shift: integers (...), at most a clip's samples; positive is later.
        noise_start: integers (...), the first sample of the noise, or -1 for none.
        volume: floats (...), the factor of the noise.
        noise: int16 or float (samples,), all background noise; may be empty if no clip uses it.

    Returns:
        float32 (..., samples), within the range of 16-bit integers.
    """
    samples = waves.shape[-1]
    count = shift.numel()
    # Clips alternate with clips of zeros: a shifted window over this tensor is a shifted clip.
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
    """Return clip numbers (steps, width) from successive shuffles, no clip twice in a batch."""
    rounds = math.ceil(steps * width / size)
    shuffles = random.permuted(np.tile(np.arange(size), (rounds, 1)), axis=1)
    for number in range(1, rounds):
        # A batch that spans two shuffles already has these clips from the first one: they are moved
        # to the end of the second.
        if begun := number * size % width:
            late = np.zeros(size, dtype=bool)
            late[shuffles[number - 1, -begun:]] = True
            shuffles[number] = shuffles[number][np.argsort(late[shuffles[number]], kind="stable")]
    return shuffles.reshape(-1)[: steps * width].reshape(steps, width)
