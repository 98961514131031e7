"""Encoders of pretrained models of all kinds, frozen except for the part that is trained."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fedtools.core.config import option_error
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.adapt.adapters import Rows, adapt
from fedtools.models.pretrained.encoders import Encoder, WhisperEncoder
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import Pretrained
from fedtools.models.pretrained.wave import WaveEncoder


class Recogniser(nn.Module):
    """A model with the interface of ESPnet's that `fedtools.models.acoustic.asr` uses.

    Derived classes have `encoder`, `criterion` and `specaug`, ESPnet's SpecAugment or None.
    """

    normalize = None
    encoder: Encoder
    specaug: nn.Module | None

    def encode(self, speech: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode (B, T, bins) and (B,) to (B, T', D) and (B,), with SpecAugment in training."""
        specaug = self.specaug if self.training else None
        encoded: tuple[Tensor, Tensor] = self.encoder(speech, lengths, specaug)
        return encoded

    def train(self, mode: bool = True) -> Recogniser:
        """Set training mode for all but the pretrained encoder."""
        super().train(mode)
        self.encoder.eval()
        return self


def depth_of(encoder: Encoder, options: Pretrained, where: str | Path) -> int | None:
    """Return the number of frozen layers at the bottom, see `Encoder.lower`; None without a cache.

    Args:
        encoder: the encoder.
        options: options of the pretrained model, which decide whether outputs are cached.
        where: source of the options, for messages.

    Raises:
        UserError: if no layer at the bottom is frozen.
    """
    if not options.cache_frozen:
        return None
    depth = len(encoder.layers) + 1
    # The state holds only what is trained.
    for name in encoder.state_dict():
        level, _ = encoder.levels(name)
        if not level:
            problem = f"cache_frozen: no layer at the bottom is frozen, as adapt trains {name}"
            raise option_error(problem, where, "cache_frozen", True)
        depth = min(depth, level - 1)
    return depth


def _whisper(folder: Folder, window: int) -> Encoder:
    return WhisperEncoder(folder.load().model.encoder, window)


def _wave(folder: Folder, window: int) -> Encoder:
    return WaveEncoder(folder.load(), folder.normalized)


_ENCODERS = {"whisper": _whisper, "wav2vec2": _wave, "hubert": _wave, "wavlm": _wave}


def build_encoder(
    folder: Folder, how: Adapt, clients: int | None, window: int = 1
) -> tuple[Encoder, Rows]:
    """Return the encoder of a folder's model, frozen except for the part that is trained.

    Args:
        folder: the model's folder.
        how: options that select the trained part.
        clients: number of clients in a stack, or None.
        window: see `Pretrained`.

    Raises:
        UserError: if the model cannot be loaded.
        ValueError: if `how` does not fit the model.
    """
    encoder = _ENCODERS[folder.kind](folder, window)
    return encoder, adapt(encoder, how, clients)
