"""Fixes of ESPnet's encoders, so that an utterance's output does not depend on padding.

ESPnet's own output depends on the batch in four ways. Lengths after the convolutions of the input
layer count frames that reach into the padding (101 frames become 24 alone, 25 or 26 in a batch).
The convolutions in the blocks of a conformer or branchformer read transformed padding where a
single utterance has zeros. The variance of `utterance_mvn` includes padding. The older relative
positions ("legacy") depend on the length of the batch. Here, all of these use only an utterance's
own frames, for models of `asr.build_model`; parameters and their names stay ESPnet's.

In training, BatchNorm's statistics are over all frames of a padded batch, as in ESPnet, including
the masked convolution's output for padding; so are the running statistics. Batches hold utterances
of similar length, so that the share of padding is small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from espnet.nets.pytorch_backend.transformer.embedding import LegacyRelPositionalEncoding
from espnet.nets.pytorch_backend.transformer.subsampling import TooShortUttError, check_short_utt
from espnet2.layers.utterance_mvn import UtteranceMVN
from torch import Tensor, nn

from fedtools.models.pooling import inside


class OwnUtteranceMVN(UtteranceMVN):
    """ESPnet's normalisation of each utterance, with the variance over its own frames."""

    def forward(self, x: Tensor, ilens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Normalise (B, T, D) with lengths (B,), not in place; padding becomes zeros."""
        ilens = x.new_full([len(x)], x.shape[1], dtype=torch.long) if ilens is None else ilens
        own = inside(x, ilens)[..., None]
        count = ilens.to(x).view(-1, 1, 1)
        x = x.masked_fill(~own, 0.0)
        centred = (x - x.sum(1, keepdim=True) / count).masked_fill(~own, 0.0)
        found = centred if self.norm_means else x
        if self.norm_vars:
            deviation = (centred.square().sum(1, keepdim=True) / count).sqrt()
            found = found / deviation.clamp(min=self.eps)
        return found, ilens


def keep_to_own_frames(encoder: nn.Module) -> None:
    """Make the output of an ESPnet encoder for an utterance independent of padding.

    When used, the encoder raises ESPnet's TooShortUttError if any utterance, not only the longest
    one, is too short for the convolutions of the input layer.
    """
    # Imported late: on import it warns of a missing package that only GPUs need.
    from espnet.nets.pytorch_backend.transformer.attention import (
        LegacyRelPositionMultiHeadedAttention,
    )

    own = encoder.own_frames = _Own()
    encoder.register_forward_pre_hook(own.begin)
    if is_convolutional(encoder):
        encoder.embed.register_forward_pre_hook(own.shorten)
        encoder.embed.register_forward_hook(own.put_mask)
    for block in encoder.encoders:
        block.register_forward_pre_hook(own.enter)
    for module in encoder.modules():
        if isinstance(module, nn.Conv1d) and module.padding != (0,):
            module.register_forward_pre_hook(own.hide)
        elif isinstance(module, LegacyRelPositionMultiHeadedAttention):
            module.rel_shift = partial(own.shift, module.zero_triu)
        elif isinstance(module, LegacyRelPositionalEncoding):
            module.register_forward_hook(partial(_shorten_table, module.pe.shape[1]))


def is_convolutional(encoder: nn.Module) -> bool:
    """Return whether the input layer has convolutions, and takes a mask."""
    return hasattr(getattr(encoder, "embed", None), "conv")


def positions(encoder: nn.Module, frames: Any) -> Any:
    """Return the number of output frames for a number of input frames, or for an array of them."""
    for one in encoder.embed.conv if is_convolutional(encoder) else ():
        if hasattr(one, "kernel_size"):
            frames = -((one.kernel_size[0] - 1 - frames) // one.stride[0])
    return frames


def embed(encoder: nn.Module, speech: Tensor, lengths: Tensor) -> tuple:
    """Return the first block's input, with positions if these are relative, and the mask.

    Args:
        encoder: an encoder changed by `keep_to_own_frames`.
        speech: (B, frames, bins), normalised.
        lengths: (B,) numbers of frames.
    """
    encoder.own_frames.begin(encoder, (speech, lengths))
    mask = encoder.own_frames.mask
    if is_convolutional(encoder):
        return encoder.embed(speech, mask)
    return (speech if encoder.embed is None else encoder.embed(speech)), mask


class _Own:
    """The mask of an encoder's current batch: which frames are an utterance's own.

    Attributes:
        mask: (B, 1, T), after the input layer.
    """

    mask: Tensor | None = None

    def begin(self, encoder: nn.Module, given: tuple) -> None:
        """Set the mask to the input's frames, before the encoder runs."""
        self.mask = inside(*given[:2])[:, None]

    def shorten(self, layer: nn.Module, given: tuple) -> None:
        """Shorten the mask, before the convolutions of the input layer, to their output frames.

        A frame remains if all of its input is the utterance's own. (In ESPnet, if its first input
        frame is.)
        """
        mask = _mask_of(*given)
        shortest = int(mask.sum(2).min())
        too_short, least = check_short_utt(layer, shortest)
        if too_short:
            problem = f"has {shortest} frames and is too short: the input layer needs {least}"
            raise TooShortUttError(problem, shortest, least)
        for one in layer.conv:
            if hasattr(one, "kernel_size"):
                mask = mask[:, :, one.kernel_size[0] - 1 :: one.stride[0]]
        self.mask = mask

    def put_mask(self, layer: nn.Module, given: tuple, output: tuple) -> tuple:
        """Replace the mask in the input layer's output."""
        return output[0], self.mask

    def enter(self, block: nn.Module, given: tuple) -> None:
        """Set the mask to that of a block, which may be the first one in use."""
        self.mask = _mask_of(*given)

    def hide(self, convolution: nn.Module, given: tuple) -> tuple:
        """Set frames after the end to zero before a convolution over time, like its own padding."""
        return (given[0].masked_fill(~self.mask, 0.0),)

    def shift(self, zero_triu: bool, scores: Tensor) -> Tensor:
        """Apply ESPnet's `rel_shift` to each utterance's own (heads, length, length).

        It prepends a zero to each row, and reads rows of `length` from the flattened result.
        """
        frames = scores.shape[-1]
        length = self.mask.sum((1, 2))[:, None, None]
        rows = torch.arange(frames, device=scores.device)
        place = (rows[:, None] + 1) * length + rows
        place = place // (length + 1) * (frames + 1) + place % (length + 1)
        place = place.masked_fill(~(self.mask & self.mask.transpose(1, 2)), 0)
        index = place.flatten(1)[:, None].expand(-1, scores.shape[1], -1)
        shifted = F.pad(scores, (1, 0)).flatten(2).gather(2, index).view_as(scores)
        return shifted.tril() if zero_triu else shifted


def _mask_of(hidden: Tensor | tuple, mask: Tensor | None) -> Tensor:
    """Return the mask that a layer is given; none means that there is no padding."""
    frames = hidden[0] if isinstance(hidden, tuple) else hidden
    return frames.new_ones(len(frames), 1, frames.shape[1], dtype=bool) if mask is None else mask


def _shorten_table(size: int, layer: nn.Module, given: tuple, output: tuple) -> None:
    """Restore the table of positions after an utterance longer than the table."""
    layer.pe = layer.pe[:, -size:]
