"""Where speech ends in a clip, by its energy: tells a cut that loses speech from one of silence.

Levels are those of frames of 30 ms, every 10 ms, in dB. A frame is speech if it comes up to the
middle between the clip's noise (the level that a tenth of its frames stay below) and its loudest
frame. That is never more than 30 dB below the loudest, for clips without noise, nor less than 6 dB,
for clips of speech alone. Speech in fewer than five frames, such as a click, is none.
"""

from __future__ import annotations

import numpy as np

from fedtools.files.clips import RATE

_FRAME, _STEP = RATE * 30 // 1000, RATE * 10 // 1000
_LEAST_FRAMES = 5
_NEAREST, _FARTHEST = 6.0, 30.0


def end_of_speech(wave: np.ndarray, start: int = 0) -> int:
    """Return the sample at which speech ends, if any is after `start`, else 0.

    Args:
        wave: (samples,), of any scale.
        start: only what comes after this sample counts.
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
