"""Front ends of keyword networks: the waveform of a clip to the network's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedtools.audio.log_mel import LogMel
from fedtools.audio.mfcc import Mfcc

# These bring speech at usual levels near zero mean and unit variance. All clients use the same
# constants, since no party knows the statistics over all clients.
ENERGY, SCALE = 100.0, 16.0


class ScaledMfcc(Mfcc):
    """MFCC near zero mean and unit variance, (..., samples) -> (..., frames, 40)."""

    @torch.no_grad()
    def forward(self, waves: Tensor) -> Tensor:
        mfcc = super().forward(waves)
        mfcc[..., 0] -= ENERGY
        return mfcc.div_(SCALE)


class Wave(nn.Module):
    """The waveform itself in [-1, 1], (..., samples) -> (..., samples, 1)."""

    def forward(self, waves: Tensor) -> Tensor:
        return (waves / 32768)[..., None]


def front_end(inputs: str, bins: int) -> nn.Module:
    """Return the module that turns waveforms in the range of 16-bit integers into inputs.

    Args:
        inputs: "mfcc", "log_mel" or "wave".
        bins: values per frame.
    """
    if inputs == "log_mel":
        return LogMel(bins)
    return Wave() if inputs == "wave" else ScaledMfcc(bins)
