"""An utterance in a padded batch as ESPnet's encoder hears it alone, with the same length.

ESPnet's encoders do not keep to that: lengths behind the convolutions of the input layer count
frames that reach into the padding (101 frames are 24 alone, 25 or 26 in a batch), the convolutions
of a conformer's or branchformer's blocks hear what padding has become there where a lone utterance
has zeros, the variance of `utterance_mvn` counts padding, and the older relative positions
("legacy") depend on the length of the batch. Here each of these keeps to an utterance's own frames,
for a model as `fedtools.models.asr.build_model` makes it; parameters and their names stay ESPnet's.

In training, BatchNorm's mean and variance are those of all frames of a padded batch, as in ESPnet:
padding counts there with what the masked convolution makes of zeros, and so do running statistics.
Batches hold utterances of similar length, so that its share is small.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from espnet.nets.pytorch_backend.transformer.embedding import LegacyRelPositionalEncoding
from espnet.nets.pytorch_backend.transformer.subsampling import TooShortUttError, check_short_utt
from espnet2.layers.utterance_mvn import UtteranceMVN
from torch import Tensor, nn

from fedtools.models.pooling import inside


class OwnUtteranceMVN(UtteranceMVN):
    """ESPnet's normalisation of each utterance; its variance is of the utterance's own frames."""

    def forward(self, x: Tensor, ilens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, T, D), which is left as it is, and (B,) to the same; padding becomes zeros."""
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
    """Make one of ESPnet's encoders hear an utterance in a batch as it hears it alone.

    Raises, when it is used: ESPnet's TooShortUttError if any utterance, not the longest one alone,
    is too short for the convolutions of the input layer.
    """
    # It says at once that a package is missing which no CPU needs: not before a model is built.
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
    """Whether the input layer has convolutions, and is given a mask."""
    return hasattr(getattr(encoder, "embed", None), "conv")


def embed(encoder: nn.Module, speech: Tensor, lengths: Tensor) -> tuple:
    """What the first block is given: hidden frames, with positions if these are relative; a mask.

    Args:
        speech: (B, frames, bins), normalised.
        lengths: (B,) their numbers of frames.
    """
    encoder.own_frames.begin(encoder, (speech, lengths))
    mask = encoder.own_frames.mask
    if is_convolutional(encoder):
        return encoder.embed(speech, mask)
    return (speech if encoder.embed is None else encoder.embed(speech)), mask


class _Own:
    """Which frames of the batch that an encoder works on are an utterance's own.

    Attributes:
        mask: (B, 1, T), behind the input layer.
    """

    mask: Tensor | None = None

    def begin(self, encoder: nn.Module, given: tuple) -> None:
        """Before the encoder: the input's frames."""
        self.mask = inside(*given[:2])[:, None]

    def shorten(self, layer: nn.Module, given: tuple) -> None:
        """Before the convolutions of the input layer: of their frames, those all of whose input is
        the utterance's own. (ESPnet takes those whose first frame is.)"""
        mask = _mask_of(*given)
        shortest = int(mask.sum(2).min())
        too_short, least = check_short_utt(layer, shortest)
        if too_short:
            said = f"has {shortest} frames and is too short: the input layer needs {least}"
            raise TooShortUttError(said, shortest, least)
        for one in layer.conv:
            if hasattr(one, "kernel_size"):
                mask = mask[:, :, one.kernel_size[0] - 1 :: one.stride[0]]
        self.mask = mask

    def put_mask(self, layer: nn.Module, given: tuple, output: tuple) -> tuple:
        """After the input layer: its output with that mask."""
        return output[0], self.mask

    def enter(self, block: nn.Module, given: tuple) -> None:
        """Before a block, which may be the first one to be used."""
        self.mask = _mask_of(*given)

    def hide(self, convolution: nn.Module, given: tuple) -> tuple:
        """Before a convolution over time: zeros after the end, as those that it pads with."""
        return (given[0].masked_fill(~self.mask, 0.0),)

    def shift(self, zero_triu: bool, scores: Tensor) -> Tensor:
        """What ESPnet's `rel_shift` makes of each utterance's own (heads, length, length).

        It reads rows of `length` values from rows of one more, whose first is zero.
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
    """The mask that a layer is given; ESPnet's mean by none that there is no padding."""
    frames = hidden[0] if isinstance(hidden, tuple) else hidden
    return frames.new_ones(len(frames), 1, frames.shape[1], dtype=bool) if mask is None else mask


def _shorten_table(size: int, layer: nn.Module, given: tuple, output: tuple) -> None:
    """After an utterance longer than the table of positions: as it was, for those that follow."""
    layer.pe = layer.pe[:, -size:]
