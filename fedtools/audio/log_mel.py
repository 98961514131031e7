"""Whisper's log mel energies in torch: batched, on any device.

A. Radford et al.: Robust speech recognition via large-scale weak supervision, ICML 2023, section
2.2, as transformers' WhisperFeatureExtractor computes them, except that a clip is padded to its
next full second, not to 30 s.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE, WINDOW, SHIFT = 16_000, 400, 160
# Frames per second.
FRAMES = RATE // SHIFT
# Waveforms per batch, so that their spectra fit a CPU's cache.
_AT_ONCE = 16


class LogMel(nn.Module):
    """Log mel energies of windows of 25 ms every 10 ms.

    Args:
        bins: number of mel filters.
    """

    def __init__(self, bins: int = 80):
        super().__init__()
        bank = torch.from_numpy(slaney_bank(bins)).float()
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)
        self.register_buffer("bank", bank, persistent=False)

    def forward(self, waves: Tensor) -> Tensor:
        """Compute the log mel energies of waveforms of equal length.

        Args:
            waves: floats in the range of 16-bit integers, (..., samples).

        Returns:
            float32 (..., frames, bins), with 100 frames for each second, a partial one included.
        """
        flat = waves.reshape(-1, waves.shape[-1])
        found = torch.cat([self._slice(part) for part in flat.split(_AT_ONCE)])
        return found.view(*waves.shape[:-1], *found.shape[1:])

    def _slice(self, waves: Tensor) -> Tensor:
        padded = F.pad(waves / 32768, (0, -waves.shape[-1] % RATE))
        spectrum = torch.stft(padded, WINDOW, SHIFT, window=self.window, return_complex=True)
        # As in Whisper, the last frame, centred on the end of the audio, is dropped.
        power = torch.view_as_real(spectrum[..., :-1]).square().sum(-1)
        energies = (self.bank @ power).clamp_(min=1e-10).log10_()
        energies = torch.maximum(energies, energies.amax((1, 2), keepdim=True) - 8)
        return energies.add_(4).div_(4).transpose(1, 2)


def slaney_bank(bins: int) -> np.ndarray:
    """Return triangular filters of unit area, even on Slaney's mel scale to 8 kHz: (bins, 201)."""
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    edges = _hertz(np.linspace(0, _mel(RATE / 2), bins + 2))
    slopes = edges[:, None] - frequencies
    widths = np.diff(edges)
    rise, fall = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    return np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))[:, None]


# Slaney's scale is linear up to 1 kHz, which is 15 mels, then has 27 mels per factor of 6.4.
_BREAK, _MELS, _STEP = 1000.0, 15.0, np.log(6.4) / 27


def _mel(hertz: float) -> float:
    if hertz < _BREAK:
        return _MELS * hertz / _BREAK
    return float(_MELS + np.log(hertz / _BREAK) / _STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    high = _BREAK * np.exp(_STEP * np.maximum(mels - _MELS, 0))
    return np.where(mels < _MELS, _BREAK * mels / _MELS, high)
