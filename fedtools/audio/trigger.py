"""The trigger of an audio backdoor: a short tone that is added to clips, before their features.

S. Koffas, J. Xu, M. Conti, S. Picek: Can you hear it? Backdoor attacks via ultrasonic triggers,
WiseML 2022, add such a tone at a fixed place; here it is audible, so that it passes any microphone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtools.data.clips import RATE

# The tone begins here, before most words. A clip that is shifted by up to as much still has it.
BEGIN_MS = 100
_FULL_SCALE, _LEAST, _MOST = 32768, -32768, 32767


@dataclass(frozen=True)
class Tone:
    """A sine that begins at `BEGIN_MS` of a clip, at phase 0.

    Attributes:
        hz: the frequency.
        ms: the length.
        dbfs: the peak, in dB relative to full scale.
    """

    hz: float
    ms: float
    dbfs: float

    @property
    def end(self) -> int:
        """Return the first sample after the tone."""
        return (BEGIN_MS * RATE + round(self.ms * RATE)) // 1000

    def wave(self, samples: int) -> np.ndarray:
        """Return the tone in a silent clip, int16 (samples,); raise a ValueError if it is longer.

        Its peak is 2^15 * 10^(dbfs / 20), up to where the sine is sampled.
        """
        if self.end > samples:
            least = 1000 * self.end / RATE
            have = 1000 * samples / RATE
            raise ValueError(f"tone_ms: its tone ends at {least:g} ms, and clips have {have:g} ms")
        begin = BEGIN_MS * RATE // 1000
        time = np.arange(self.end - begin) / RATE
        found = np.zeros(samples, np.int16)
        peak = _FULL_SCALE * 10 ** (self.dbfs / 20)
        sine = np.rint(peak * np.sin(2 * np.pi * self.hz * time))
        found[begin : self.end] = np.clip(sine, _LEAST, _MOST)
        return found

    def added(self, waves: np.ndarray) -> np.ndarray:
        """Return clips with the tone, int16 (..., samples); what is too loud is cut off."""
        whole = waves.astype(np.int32) + self.wave(waves.shape[-1])
        return np.clip(whole, _LEAST, _MOST).astype(np.int16)
