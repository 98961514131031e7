"""Encoders of pretrained models over batches of any length, independent of padding.

transformers' Whisper takes only windows of 30 s, and ignores masks. Here the positions are cut to
the length of the batch, and frames after an utterance's end are set to zero before each
convolution, as for an utterance without padding, and masked in attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.models.pooling import inside


class Encoder(nn.Module):
    """Layers over the output of `embed`, which derived classes define.

    Attributes:
        size: values per position.
        step: input frames per position.
        window: frames; silence is appended to utterances up to a multiple of it.
        shortest, longest: the fewest and the most frames of an utterance; None for no bound.
    """

    size: int
    step: int
    window = 1
    shortest: int
    longest: int | None
    layers: nn.ModuleList
    layer_norm: nn.Module

    def embed(
        self, frames: Tensor, lengths: Tensor | None, specaug: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the first layer's input, its lengths, and the attention mask."""
        raise NotImplementedError

    def run(
        self, hidden: Tensor, mask: Tensor | None, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Run the layers from `first` to before `last`."""
        for layer in self.layers[first:last]:
            hidden = layer(hidden, mask)
        return hidden

    def positions(self, frames: Any) -> Any:
        """Return the number of positions for a number of frames, or for an array of them."""
        raise NotImplementedError

    def levels(self, name: str) -> tuple[int, int]:
        """Return the first and the last level at which a parameter is used.

        Level 0 is below the first layer; layers are numbered from 1, and the last normalisation
        follows.
        """
        part, _, rest = name.partition(".")
        if part == "layers":
            level = int(rest.partition(".")[0]) + 1
        else:
            level = len(self.layers) + 1 if part == "layer_norm" else 0
        return level, level

    def forward(
        self, frames: Tensor, lengths: Tensor | None = None, specaug: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode audio.

        Args:
            frames: (N, T, bins), padded with any values.
            lengths: (N,), numbers of frames; by default all are T.
            specaug: ESPnet's SpecAugment, or None.

        Returns:
            (N, T', D), and numbers of positions (N,).
        """
        return self.lower(frames, lengths, len(self.layers) + 1, specaug)

    def lower(
        self, frames: Tensor, lengths: Tensor | None, depth: int, specaug: nn.Module | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the bottom layers' output for audio, and numbers of positions.

        Args:
            frames, lengths, specaug: see `forward`.
            depth: number of layers; one more than there are includes the last normalisation.
        """
        hidden, lengths, mask = self.embed(frames, lengths, specaug)
        hidden = self.run(hidden, mask, 0, depth)
        return self.layer_norm(hidden) if depth > len(self.layers) else hidden, lengths

    def upper(
        self, hidden: Tensor, lengths: Tensor, depth: int, until: int | None = None
    ) -> Tensor:
        """Continue from the output of `lower` up to level `until`, by default to the end."""
        count = len(self.layers)
        until = count + 1 if until is None else until
        if depth > count:
            return hidden
        padded = bool((lengths < hidden.shape[1]).any())
        mask = attention_mask(hidden, lengths.to(hidden.device)) if padded else None
        hidden = self.run(hidden, mask, depth, until)
        return self.layer_norm(hidden) if until > count else hidden


class WhisperEncoder(Encoder):
    """The encoder of Whisper (Radford et al., ICML 2023), (N, frames, bins) -> (N, positions, D).

    Args:
        encoder: the encoder of transformers.
        window: seconds; if over 1, silence is appended to utterances up to a multiple of it.
    """

    # Input frames per position, and the fewest frames of an utterance, which is a second.
    step, shortest = 2, 100

    def __init__(self, encoder: nn.Module, window: int = 1):
        super().__init__()
        self.window = window * self.shortest if window > 1 else 1
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        # Sinusoidal, never trained.
        self.embed_positions = encoder.embed_positions.requires_grad_(False)
        self.layers, self.layer_norm = encoder.layers, encoder.layer_norm
        self.size: int = encoder.config.d_model
        self.longest: int = encoder.config.max_source_positions * self.step

    def positions(self, frames: Any) -> Any:
        """Return the number of positions for a number of frames, or for an array of them."""
        return (self._with_silence(frames) + 1) // self.step

    def _with_silence(self, frames: Any) -> Any:
        whole = -(-frames // self.window) * self.window
        # An utterance that is too long stays so, and fails later.
        most = frames + (self.longest - frames) * (frames < self.longest)
        return whole - (whole - most) * (whole > most)

    def _pad(self, frames: Tensor, lengths: Tensor, silence: Tensor) -> tuple[Tensor, Tensor]:
        """Append silence, (N, 1, 1), to each utterance, and return frames and their numbers."""
        whole = self._with_silence(lengths)
        padded = silence.expand(-1, int(whole.max()), frames.shape[2]).clone()
        own = inside(frames, lengths)[..., None]
        there = min(frames.shape[1], padded.shape[1])
        padded[:, :there] = torch.where(own, frames, silence)[:, :there]
        return padded, whole

    def embed(
        self, frames: Tensor, lengths: Tensor | None, specaug: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the first layer's input, its lengths, and the attention mask."""
        if lengths is None:
            lengths = torch.full((len(frames),), frames.shape[1], device=frames.device)
        lengths = lengths.to(frames.device)
        silence = _silence(frames, lengths) if self.window > 1 else None
        if specaug is not None:
            frames, lengths = specaug(frames, lengths)
        if silence is not None:
            frames, lengths = self._pad(frames, lengths, silence)
        padded = bool((lengths < frames.shape[1]).any())
        if padded:
            frames = frames * inside(frames, lengths)[..., None]
        hidden = F.gelu(self.conv1(frames.transpose(1, 2)))
        if padded:
            hidden = hidden * inside(frames, lengths)[:, None]
        hidden = F.gelu(self.conv2(hidden)).transpose(1, 2)
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        hidden = hidden + self.embed_positions(positions)
        lengths = self.positions(lengths)
        return hidden, lengths, attention_mask(hidden, lengths) if padded else None


# Largest difference between two values of Whisper's log mel energies.
_RANGE = 2.0


def _silence(frames: Tensor, lengths: Tensor) -> Tensor:
    """Return the front end's value for silence after each utterance, (N, 1, 1)."""
    own = inside(frames, lengths)[..., None]
    return frames.masked_fill(~own, -math.inf).amax((1, 2), keepdim=True) - _RANGE


def attention_mask(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Return the additive attention mask (N, 1, 1, T) that hides positions after an end."""
    seen = inside(hidden, lengths)[:, None, None]
    return torch.zeros_like(seen, dtype=hidden.dtype).masked_fill(
        ~seen, torch.finfo(hidden.dtype).min
    )
