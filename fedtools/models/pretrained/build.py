"""Encoders of pretrained models, of any kind, frozen but for what is trained."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fedtools.files.config import option_error
from fedtools.models.adaptation import Adapt
from fedtools.models.adapters import Rows, adapt
from fedtools.models.pretrained.encoders import Encoder, WhisperEncoder
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import Pretrained
from fedtools.models.pretrained.wave import WaveEncoder


class Recogniser(nn.Module):
    """What `fedtools.models.asr` asks of ESPnet's models below their last layer, of an encoder.

    Derived classes have `encoder`, `criterion` and `specaug`, ESPnet's SpecAugment or None.
    """

    normalize = None
    encoder: Encoder
    specaug: nn.Module | None

    def encode(self, speech: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, bins) and (B,) to (B, T', D) and (B,); in training with SpecAugment."""
        specaug = self.specaug if self.training else None
        encoded: tuple[Tensor, Tensor] = self.encoder(speech, lengths, specaug)
        return encoded

    def train(self, mode: bool = True) -> Recogniser:
        """Work as in training; what is pretrained always works as in testing."""
        super().train(mode)
        self.encoder.eval()
        return self


def depth_of(encoder: Encoder, options: Pretrained, where: str | Path) -> int | None:
    """The most layers of a bottom that is frozen, see `Encoder.lower`.

    None where its outputs are not to be kept.

    Args:
        where: what the options were read from, for messages.

    Raises:
        UserError: if there is no such bottom.
    """
    if not options.cache_frozen:
        return None
    depth = len(encoder.layers) + 1
    # What is in no state is frozen.
    for name in encoder.state_dict():
        level, _ = encoder.levels(name)
        if not level:
            problem = f"cache_frozen: no layer at the bottom is frozen: adapt trains {name}"
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
    """The encoder of a folder's model, frozen but for what is trained.

    Args:
        clients: of a stack, or None.
        window: see `Pretrained`.

    Raises:
        UserError: if the folder holds no such model.
        ValueError: if `how` does not fit it.
    """
    encoder = _ENCODERS[folder.kind](folder, window)
    return encoder, adapt(encoder, how, clients)
