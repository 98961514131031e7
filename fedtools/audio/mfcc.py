"""Kaldi's MFCC in torch, batched and on any device, for clips augmented anew at every step."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from fedtools.audio.mel import mel_bank

PREEMPHASIS = 0.97
LIFTER = 22.0
# Clips per batch on a CPU: their frames stay in its cache, about three times as fast as one batch.
CPU_SLICE = 8
# Clips per batch on a GPU: this bounds the memory, about 1 MB for each clip of a second.
GPU_SLICE = 2048


class Mfcc(nn.Module):
    """Mel-frequency cepstral coefficients as Kaldi's compute-mfcc-feats defines them.

    Options are Kaldi's defaults (DC offset removed, pre-emphasis 0.97, Povey window, power
    spectrum, mel filters from 20 Hz to half the sample rate, lifter 22, whole windows only), except
    that there is no dither, and the first coefficient is not replaced by the energy.

    Args:
        num_ceps: number of coefficients and of mel filters.
        frame_length_ms: window length in milliseconds.
        frame_shift_ms: milliseconds from one window to the next.
        rate: sample rate in Hz.
    """

    def __init__(
        self,
        num_ceps: int = 40,
        frame_length_ms: int = 30,
        frame_shift_ms: int = 10,
        rate: int = 16_000,
    ):
        super().__init__()
        self.length = rate * frame_length_ms // 1000
        self.shift = rate * frame_shift_ms // 1000
        self.size = 1 << (self.length - 1).bit_length()
        # Each row twice: the real and the imaginary part of a bin have the same weight.
        bank = torch.from_numpy(mel_bank(num_ceps, self.size, rate)).repeat_interleave(2, dim=0)
        # Not persistent: these are not part of a model's state.
        self.register_buffer("window", _povey(self.length)[1:].float(), persistent=False)
        self.register_buffer("bank", bank.float().contiguous(), persistent=False)
        self.register_buffer("cosine", cosine(num_ceps).float(), persistent=False)

    def forward(self, waves: Tensor) -> Tensor:
        """Compute the coefficients of waveforms of equal length.

        Args:
            waves: floats in the range of 16-bit integers (..., samples), at least one window long.

        Returns:
            float32 (..., frames, num_ceps), frames = (samples - window) // shift + 1, which is 98
            for a second at the defaults. Energies are floored at 2**-23, so that digital silence
            gives finite values.
        """
        flat = waves.reshape(-1, waves.shape[-1])
        slice_size = CPU_SLICE if flat.device.type == "cpu" else GPU_SLICE
        found = torch.cat([self._slice(part) for part in flat.split(slice_size)])
        return found.view(*waves.shape[:-1], *found.shape[1:])

    def _slice(self, waves: Tensor) -> Tensor:
        """Compute coefficients (N, frames, num_ceps) of waveforms (N, samples)."""
        frames = waves.unfold(-1, self.length, self.shift)
        frames = frames - frames.mean(-1, keepdim=True)
        padded = frames.new_zeros(*frames.shape[:-1], self.size)
        # A frame's first sample has no predecessor, but its weight in the window is 0.
        inner = padded[..., 1 : self.length]
        torch.sub(frames[..., 1:], frames[..., :-1], alpha=PREEMPHASIS, out=inner)
        inner.mul_(self.window)
        spectrum = torch.view_as_real(torch.fft.rfft(padded)).flatten(-2)
        energies = spectrum.square_() @ self.bank
        return energies.clamp_(min=torch.finfo(torch.float32).eps).log_() @ self.cosine


@cache
def frames_of(samples: int) -> int:
    """Return the number of frames of a clip's `Mfcc` with default options."""
    default = Mfcc()
    return (samples - default.length) // default.shift + 1


def _povey(length: int) -> Tensor:
    """Return Kaldi's default window, Hann's to the power of 0.85."""
    times = torch.arange(length, dtype=torch.float64)
    return (0.5 - 0.5 * torch.cos(2 * math.pi * times / (length - 1))) ** 0.85


def cosine(count: int) -> Tensor:
    """Return the orthonormal cosine transform, scaled by the lifter: (filters, num_ceps)."""
    order = torch.arange(count, dtype=torch.float64)
    matrix = math.sqrt(2 / count) * torch.cos(math.pi / count * torch.outer(order + 0.5, order))
    matrix[:, 0] = math.sqrt(1 / count)
    return matrix * (1 + 0.5 * LIFTER * torch.sin(math.pi * order / LIFTER))
