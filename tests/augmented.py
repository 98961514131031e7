"""Augmentation by hand, shared by several test files."""

from __future__ import annotations

import numpy as np

SAMPLES = 16_000


def by_hand(waves, shift, start, volume, noise):
    """Return what each clip should become."""
    found = []
    for wave, moved, begin, factor in zip(waves, shift, start, volume, strict=True):
        silence = np.zeros(abs(moved))
        late, early = [silence, wave[: SAMPLES - moved]], [wave[-moved:], silence]
        clip = np.concatenate(late if moved > 0 else early)
        if begin >= 0:
            clip += factor * noise[begin : begin + SAMPLES]
        found.append(clip.clip(-32768, 32767))
    return np.array(found)
