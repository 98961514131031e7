"""What keyword networks take of a clip's waveform."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedtools.audio.log_mel import LogMel
from fedtools.audio.mfcc import Mfcc

# Speech at usual levels comes near to zero mean and unit variance; the same constants for
# everybody, since nobody knows the statistics of all clients.
ENERGY, SCALE = 100.0, 16.0


class ScaledMfcc(Mfcc):
    """MFCC near zero mean and unit variance: (..., samples) -> (..., frames, 40)."""

    @torch.no_grad()
    def forward(self, waves: Tensor) -> Tensor:
        mfcc = super().forward(waves)
        mfcc[..., 0] -= ENERGY
        return mfcc.div_(SCALE)


class Wave(nn.Module):
    """The waveform from -1 to 1, (..., samples) -> (..., samples, 1)."""

    def forward(self, waves: Tensor) -> Tensor:
        return (waves / 32768)[..., None]


def front_end(inputs: str, bins: int) -> nn.Module:
    """What makes the inputs of a network of waveforms in the range of 16-bit integers.

    Args:
        inputs: "mfcc", "log_mel" or "wave".
        bins: values of a frame.
    """
    if inputs == "log_mel":
        return LogMel(bins)
    return Wave() if inputs == "wave" else ScaledMfcc(bins)
