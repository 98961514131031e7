"""SpecAugment of features that a client sent, by the options that are those of its audio."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def scaled(specaug: nn.Module, frames: int, share: float) -> nn.Module:
    """A SpecAugment that masks as much speech, and as large a share of a frame, as before.

    A frame of features stands for several of audio, and has more values than these: as they are,
    masks of 12 bins of 80 would be 12 of 256 values, and 40 frames of 0.4 s would be of 1.6 s.
    Widths that are shares of the utterance stay.

    Args:
        specaug: ESPnet's, of audio.
        frames: of audio to a frame of features.
        share: values of a frame of features for each of a frame of audio.
    """
    found: Any = copy.deepcopy(specaug)
    if found.time_warp is not None:
        found.time_warp.window = max(1, round(found.time_warp.window / frames))
    for mask, factor in ((found.freq_mask, share), (found.time_mask, 1 / frames)):
        if hasattr(mask, "mask_width_range"):
            # The end is above the widest.
            low, high = mask.mask_width_range
            widest = round((high - 1) * factor)
            mask.mask_width_range = round(low * factor), max(widest, round(low * factor)) + 1
    return found  # type: ignore[no-any-return]
