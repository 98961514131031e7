"""Encoders of pretrained models over batches of any length, in which padding changes nothing.

transformers' Whisper takes windows of 30 s alone, and ignores masks. Here the positions are cut to
the length of the batch, and what lies behind an utterance's own frames is zero before each
convolution, as behind a lone utterance, and masked in attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.models.adaptation import Adapt
from fedtools.models.adapters import Rows, adapt
from fedtools.models.pooling import inside
from fedtools.models.pretrained.folder import Folder


class WhisperEncoder(nn.Module):
    """The encoder of Whisper (Radford et al., ICML 2023), (N, frames, bins) -> (N, positions, D).

    Args:
        encoder: of transformers.
    """

    # SpecAugment masks the input.
    augments_inside = False
    # Frames of its input to a position, and the fewest of an utterance, a second.
    step, shortest = 2, 100

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.conv1, self.conv2 = encoder.conv1, encoder.conv2
        # Sines and cosines.
        self.embed_positions = encoder.embed_positions.requires_grad_(False)
        self.layers, self.layer_norm = encoder.layers, encoder.layer_norm
        self.size: int = encoder.config.d_model
        self.longest: int = encoder.config.max_source_positions * self.step

    def forward(self, frames: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encode log mel energies.

        Args:
            frames: (N, T, bins), padded with anything.
            lengths: (N,), even numbers of frames; by default all are T long.

        Returns:
            (N, T / 2, D), and numbers of positions (N,).
        """
        hidden, lengths, mask = self.embed(frames, lengths)
        return self.layer_norm(self.run(hidden, mask)), lengths

    def embed(self, frames: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is below the first layer: hidden values, their lengths, the mask of attention."""
        if lengths is None:
            lengths = torch.full((len(frames),), frames.shape[1], device=frames.device)
        lengths = lengths.to(frames.device)
        padded = bool((lengths < frames.shape[1]).any())
        if padded:
            frames = frames * inside(frames, lengths)[..., None]
        hidden = F.gelu(self.conv1(frames.transpose(1, 2)))
        if padded:
            hidden = hidden * inside(frames, lengths)[:, None]
        hidden = F.gelu(self.conv2(hidden)).transpose(1, 2)
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        hidden = hidden + self.embed_positions(positions)
        lengths = (lengths + 1) // self.step
        return hidden, lengths, attention_mask(hidden, lengths) if padded else None

    def run(self, hidden: Tensor, mask: Tensor | None, first: int = 0, last: int | None = None):
        """The layers from `first` to before `last`."""
        for layer in self.layers[first:last]:
            hidden = layer(hidden, mask)
        return hidden


def attention_mask(hidden: Tensor, lengths: Tensor) -> Tensor:
    """What is added to the scores of attention, (N, 1, 1, T): none looks behind an end."""
    seen = inside(hidden, lengths)[:, None, None]
    return torch.zeros_like(seen, dtype=hidden.dtype).masked_fill(
        ~seen, torch.finfo(hidden.dtype).min
    )


def _whisper(folder: Folder) -> nn.Module:
    return WhisperEncoder(folder.load().model.encoder)


def _wave(folder: Folder) -> nn.Module:
    from fedtools.models.pretrained.wave import WaveEncoder

    return WaveEncoder(folder.load(), folder.normalized)


_ENCODERS = {"whisper": _whisper, "wav2vec2": _wave, "hubert": _wave, "wavlm": _wave}


def build_encoder(folder: Folder, how: Adapt, clients: int | None) -> tuple[nn.Module, Rows]:
    """The encoder of a folder's model, frozen but for what is trained.

    Args:
        clients: of a stack, or None.

    Raises:
        UserError: if the folder holds no such model.
        ValueError: if `how` does not fit it.
    """
    encoder = _ENCODERS[folder.kind](folder)
    return encoder, adapt(encoder, how, clients)
