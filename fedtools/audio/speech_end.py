"""The end of speech in a clip, by energy, to see whether a cut loses speech or silence.

Levels are computed on frames of 30 ms, every 10 ms, in dB. A frame is speech if its level reaches
the middle between the clip's noise (the 10 % quantile of levels) and its loudest frame. This
threshold is at most 30 dB below the loudest frame, for clips without noise, and at least 6 dB, for
clips of speech alone. Speech in fewer than five frames, such as a click, does not count.
"""

from __future__ import annotations

import numpy as np

from fedtools.data.clips import RATE

_FRAME, _STEP = RATE * 30 // 1000, RATE * 10 // 1000
_LEAST_FRAMES = 5
_NEAREST, _FARTHEST = 6.0, 30.0


def end_of_speech(wave: np.ndarray, start: int = 0) -> int:
    """Return the sample at which speech ends, or 0 if there is no speech after `start`.

    Args:
        wave: (samples,), on any scale.
        start: only speech after this sample counts.
    """
    if len(wave) < _FRAME:
        return 0
    frames = np.lib.stride_tricks.sliding_window_view(wave, _FRAME)[::_STEP].astype(np.float64)
    levels = 10 * np.log10(np.square(frames).mean(1) + 1e-12)
    loudest, noise = levels.max(), np.quantile(levels, 0.1)
    middle = (loudest + noise) / 2
    spoken = levels >= np.clip(middle, loudest - _FARTHEST, loudest - _NEAREST)
    spoken &= (np.square(frames) > 0).any(1)
    (late,) = np.nonzero(spoken[-(-start // _STEP) :])
    if len(late) < _LEAST_FRAMES:
        return 0
    return min(len(wave), (late[-1] - (-start // _STEP)) * _STEP + _FRAME)
