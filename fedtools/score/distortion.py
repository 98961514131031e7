"""Mel-cepstral distortion between filterbanks."""

from __future__ import annotations

import numpy as np
from scipy.fft import dct

# Coefficients 1 to this one; 0, the loudness, does not count.
COEFFICIENTS = 12


def cepstra(filterbanks: np.ndarray) -> np.ndarray:
    """Compute mel-cepstral coefficients 1 to 12 of log power filterbanks (natural log).

    c_d = 1/M sum_m x_m cos(pi d (m + 1/2) / M), so that x = c_0 + 2 sum_d c_d cos(...), as
    mel-cepstra are defined.

    Args:
        filterbanks: (T, M).

    Returns:
        (T, 12), or one fewer than M where that is less.
    """
    found = dct(np.asarray(filterbanks, np.float64), type=2, axis=1, norm="forward")
    return found[:, 1 : COEFFICIENTS + 1]


def mel_cepstral_distortion(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Compute the distortion of each frame in dB, (T,), between (T, 12) results of `cepstra`.

    10 / ln 10 sqrt(2 sum_d (c_d - c'_d)^2): R. Kubichek, "Mel-cepstral distance measure for
    objective speech quality assessment", PACRIM 1993. By Parseval's theorem it is the root mean
    square difference of the smoothed log spectra.
    """
    return 10 / np.log(10) * np.sqrt(2 * np.square(one - other).sum(1))
