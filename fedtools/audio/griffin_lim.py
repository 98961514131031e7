"""Speech again of its features: cepstra to mel energies, these to spectra, and those to sound.

D. Griffin, J. Lim: Signal estimation from modified short-time Fourier transform, IEEE TASSP 1984.
What mel filters leave out does not come back: judge it beside the same of true features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtools.audio import log_mel, mfcc
from fedtools.audio.features import INT16_SCALE, MFCC_HIGH
from fedtools.audio.front_end import ENERGY, SCALE

RATE = 16_000
_ITERATIONS = 32
# Natural logs of energies of 16-bit samples: silence, and louder than any.
_QUIET, _LOUD = -16.0, 40.0


@dataclass(frozen=True)
class Front:
    """How features were made of sound at 16 kHz.

    Attributes:
        bank: (frequencies, mel filters).
        length: of a window, in samples.
        size: of its transform.
        cepstra: (mel filters, cepstra) of log energies; None: features are these logs.
        factor, offset: features times `factor` plus `offset` are natural logs, or cepstra.
        emphasis: of high frequencies before the transform.
        scale: of samples.
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
        """That of a kind of features: of a clip's "clip_mfcc", or of `extract-features`.

        Args:
            kind: "clip_mfcc", "fbank", "mfcc" or "log_mel".
            bins: values of a frame.
        """
        if kind == "log_mel":
            bank, ten = log_mel.slaney_bank(bins).T, np.log(10)
            size = log_mel.WINDOW
            return cls(bank, size, size, None, 4 * ten, -4 * ten, emphasis=0.0, scale=1.0)
        high = RATE / 2 + (MFCC_HIGH if kind == "mfcc" else 0.0)
        bank = mfcc.mel_bank(bins, 512, RATE, high).numpy()
        if kind == "fbank":
            return cls(bank, 400, 512)
        cepstra = mfcc.cosine(bins).numpy()
        if kind == "mfcc":
            return cls(bank, 400, 512, cepstra)
        offset = np.zeros(bins)
        offset[0] = ENERGY
        return cls(bank, 480, 512, cepstra, SCALE, offset)

    def energies(self, features: np.ndarray) -> np.ndarray:
        """The natural logs of mel energies, (frames, mel filters), of features."""
        values = features.astype(np.float64) * self.factor + self.offset
        return values if self.cepstra is None else values @ np.linalg.inv(self.cepstra)

    def sound(self, features: np.ndarray) -> np.ndarray:
        """Samples in [-1, 1] at 16 kHz, float32, whose features are near to those given."""
        import librosa
        from scipy.signal import lfilter

        energies = np.exp(self.energies(features).clip(_QUIET, _LOUD))
        # Of all spectra with these energies the shortest, whose power may be negative.
        spectra = np.sqrt((energies @ np.linalg.pinv(self.bank)).clip(min=0)).T
        samples = librosa.griffinlim(
            spectra, n_iter=_ITERATIONS, hop_length=log_mel.SHIFT, win_length=self.length,
            n_fft=self.size, random_state=0,
        )  # fmt: skip
        samples = lfilter([1], [1, -self.emphasis], samples) / self.scale
        return np.asarray(samples / max(1.0, np.abs(samples).max()), np.float32)
