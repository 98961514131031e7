"""Speech reconstructed from features: cepstra to mel energies, to spectra, to samples.

D. Griffin, J. Lim: Signal estimation from modified short-time Fourier transform, IEEE TASSP 1984.
What the mel filters discard cannot be restored: compare with a reconstruction from true features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtools.audio import log_mel, mfcc
from fedtools.audio.features import INT16_SCALE, MFCC_HIGH
from fedtools.audio.front_end import ENERGY, SCALE
from fedtools.audio.mel import mel_bank

RATE = 16_000
_ITERATIONS = 32
# Range of the natural logs of energies of 16-bit samples: silence, and louder than any recording.
_QUIET, _LOUD = -16.0, 40.0


@dataclass(frozen=True)
class Front:
    """The front end that computed features from audio at 16 kHz.

    Attributes:
        bank: the mel filters, (frequencies, mel filters).
        length: window length in samples.
        size: size of the Fourier transform.
        cepstra: cosine transform (mel filters, cepstra) of log energies; None if the features are
            the log energies.
        factor, offset: features times `factor` plus `offset` are natural logs, or cepstra.
        emphasis: pre-emphasis coefficient.
        scale: factor by which samples in [-1, 1] were multiplied.
    """

    bank: np.ndarray
    length: int
    size: int
    cepstra: np.ndarray | None = None
    factor: float = 1.0
    offset: float | np.ndarray = 0.0
    emphasis: float = mfcc.PREEMPHASIS
    scale: float = INT16_SCALE

    @classmethod
    def of(cls, kind: str, bins: int) -> Front:
        """Return the front end of a kind of features.

        Args:
            kind: "clip_mfcc" for keyword clips; "fbank", "mfcc" or "log_mel" of `extract-features`.
            bins: values per frame.
        """
        if kind == "log_mel":
            bank, ten = log_mel.slaney_bank(bins).T, np.log(10)
            size = log_mel.WINDOW
            return cls(bank, size, size, None, 4 * ten, -4 * ten, emphasis=0.0, scale=1.0)
        bank = mel_bank(bins, 512, RATE, MFCC_HIGH if kind == "mfcc" else 0.0)
        if kind == "fbank":
            return cls(bank, 400, 512)
        cepstra = mfcc.cosine(bins).numpy()
        if kind == "mfcc":
            return cls(bank, 400, 512, cepstra)
        offset = np.zeros(bins)
        offset[0] = ENERGY
        return cls(bank, 480, 512, cepstra, SCALE, offset)

    def energies(self, features: np.ndarray) -> np.ndarray:
        """Return the natural logs of the features' mel energies, (frames, mel filters)."""
        values = features.astype(np.float64) * self.factor + self.offset
        return values if self.cepstra is None else values @ np.linalg.inv(self.cepstra)

    def sound(self, features: np.ndarray) -> np.ndarray:
        """Return float32 samples in [-1, 1] at 16 kHz whose features are close to those given."""
        import librosa
        from scipy.signal import lfilter

        energies = np.exp(self.energies(features).clip(_QUIET, _LOUD))
        # The least-norm power spectra with these energies, which may have negative values.
        spectra = np.sqrt((energies @ np.linalg.pinv(self.bank)).clip(min=0)).T
        samples = librosa.griffinlim(
            spectra, n_iter=_ITERATIONS, hop_length=log_mel.SHIFT, win_length=self.length,
            n_fft=self.size, random_state=0,
        )  # fmt: skip
        samples = lfilter([1], [1, -self.emphasis], samples) / self.scale
        return np.asarray(samples / max(1.0, np.abs(samples).max()), np.float32)
