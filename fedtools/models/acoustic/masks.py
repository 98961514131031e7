"""SpecAugment of features that a client sent, by the options for its audio."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def scaled(specaug: nn.Module, frames: int, share: float) -> nn.Module:
    """Return a SpecAugment that masks the same share of features as the original does of audio.

    A frame of features stands for several frames of audio, and has more values. Unchanged, a mask
    of 12 of 80 bins would be one of 12 of 256 values, and 40 frames, 0.4 s of audio, would be 1.6
    s. Widths given as shares of the utterance do not change.

    Args:
        specaug: ESPnet's SpecAugment of audio.
        frames: frames of audio per frame of features.
        share: ratio of values per frame, features to audio.
    """
    found: Any = copy.deepcopy(specaug)
    if found.time_warp is not None:
        found.time_warp.window = max(1, round(found.time_warp.window / frames))
    for mask, factor in ((found.freq_mask, share), (found.time_mask, 1 / frames)):
        if hasattr(mask, "mask_width_range"):
            # The upper end is exclusive.
            low, high = mask.mask_width_range
            widest = round((high - 1) * factor)
            mask.mask_width_range = round(low * factor), max(widest, round(low * factor)) + 1
    return found  # type: ignore[no-any-return]
