"""Kaldi's mel filters, without PyTorch, which feature extraction need not import."""

from __future__ import annotations

import numpy as np

LOW_FREQUENCY = 20.0


def mel_bank(count: int, size: int, rate: int, high: float = 0.0) -> np.ndarray:
    """Return triangular filters, evenly spaced in mel: float64 (size / 2 + 1 bins, count).

    They end at `high` Hz or, as in Kaldi, `-high` Hz below half the sample rate if it is not
    positive.
    """

    def mel(frequency: np.ndarray) -> np.ndarray:
        return 1127.0 * np.log(1.0 + frequency / 700.0)

    ends = mel(np.array([LOW_FREQUENCY, high if high > 0 else rate / 2 + high]))
    edges = ends[0] + (ends[1] - ends[0]) / (count + 1) * np.arange(count + 2)
    place = mel(np.arange(size // 2 + 1) * rate / size)[:, None]
    rise = (place - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - place) / (edges[2:] - edges[1:-1])
    bank = np.minimum(rise, fall).clip(min=0)
    # Kaldi leaves out the bin of half the sample rate; rounding may have given it a weight here.
    bank[-1] = 0
    return bank
