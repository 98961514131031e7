"""The acoustic model cut in two: an extractor at the bottom, and a classifier on its features.

Zhu et al. (Interspeech 2022), section 2.2: the extractor is the two convolutions and the first
blocks of the encoder, and the classifier is everything above.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtools.models.acoustic.asr import classify, outputs
from fedtools.models.acoustic.padding import embed
from fedtools.models.pooling import inside
from fedtools.models.pretrained.encoders import Encoder

# Enough frames for every convolution.
_PROBE_FRAMES = 200
# Above all levels of an encoder, see `Encoder.levels`.
_HEAD = 1 << 30


@dataclass(frozen=True)
class Cut(ABC):
    """A cut through the encoder.

    Attributes:
        blocks: number of encoder blocks below the cut, in addition to the convolutions.
        size: values per frame of features.
        share: ratio of the number of feature values to the number of input values.
        step: input frames from one frame of features to the next.
    """

    blocks: int
    size: int = 0
    share: float = 0.0
    step: int = 1

    @staticmethod
    def above(model: nn.Module, extractor: Collection[str], bins: int) -> Cut:
        """Return the cut above the parameters of an extractor.

        Args:
            model: the model.
            extractor: names of the extractor's parameters.
            bins: values per frame of the input.

        Raises:
            ValueError: if these are not exactly the parameters of the encoder's bottom, or the
                encoder does more than run its blocks in sequence.
        """
        kind = LayerCut if isinstance(model.encoder, Encoder) else BlockCut
        return kind.find(model, extractor, bins)

    @abstractmethod
    def extract(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the features below the cut, with SpecAugment in training.

        Args:
            model: the model.
            batch: see `fedtools.models.acoustic.asr.represent`.

        Returns:
            features (B, T, D), and their numbers of frames (B,).
        """

    @abstractmethod
    def classify(self, model: nn.Module, features: Tensor, lengths: Tensor) -> Tensor:
        """Return the result of `asr.classify` from the features of `extract`."""

    def _try(self, model: nn.Module, bins: int, frames: int) -> Tensor:
        """Return features of a trial batch; raise a `ValueError` if the parts are not the whole."""
        training, device = model.training, next(model.parameters()).device
        random = torch.Generator().manual_seed(0)
        speech = torch.randn(2, frames, bins, generator=random).to(device)
        batch = {"speech": speech, "speech_lengths": torch.tensor([frames, frames // 2])}
        with torch.no_grad():
            features, lengths = self.extract(model.eval(), batch)
            parts = self.classify(model, features, lengths)
            whole, _ = outputs(model, batch)
        model.train(training)
        if whole.shape != parts.shape or not torch.allclose(whole, parts, atol=1e-4):
            raise ValueError("this encoder does more than run its blocks in sequence")
        return features


class BlockCut(Cut):
    """A cut through one of ESPnet's encoders."""

    @classmethod
    def find(cls, model: nn.Module, extractor: Collection[str], bins: int) -> BlockCut:
        """Find the cut; see `Cut.above`."""
        if not hasattr(model.encoder, "encoders"):
            raise ValueError("an encoder without blocks, such as tdnn, cannot be cut in two")
        parameters = {name for name, _ in model.named_parameters()}
        bottom = {name for name in parameters if name.startswith("encoder.embed.")}
        blocks = len(model.encoder.encoders)
        for block in range(blocks):
            if bottom == set(extractor):
                features = cls(block)._try(model, bins, _PROBE_FRAMES)
                share = features[0].numel() / (_PROBE_FRAMES * bins)
                # Convolutions lose a few frames at the ends.
                step = round(_PROBE_FRAMES / features.shape[1])
                return cls(block, features.shape[2], share, step)
            bottom |= {name for name in parameters if name.startswith(f"encoder.encoders.{block}.")}
        raise ValueError(
            f"an extractor is encoder.embed.* and some of the first of {blocks} blocks, "
            f"encoder.encoders.0.* to encoder.encoders.{max(0, blocks - 2)}.*"
        )

    def extract(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the features; see `Cut.extract`."""
        encoder = model.encoder
        speech, lengths = batch["speech"].clone(), batch["speech_lengths"]
        with torch.autocast(speech.device.type, enabled=False):
            if model.specaug is not None and model.training:
                speech, lengths = model.specaug(speech, lengths)
            if model.normalize is not None:
                speech, lengths = model.normalize(speech, lengths)
        hidden, mask = embed(encoder, speech, lengths)
        for block in encoder.encoders[: self.blocks]:
            hidden, mask = block(hidden, mask)
        # Relative positions, if any, are passed from block to block together with the features.
        features = hidden[0] if isinstance(hidden, tuple) else hidden
        return features, mask.squeeze(1).sum(1)

    def classify(self, model: nn.Module, features: Tensor, lengths: Tensor) -> Tensor:
        """Return CTC log posteriors, natural log, (B, T, tokens)."""
        encoder = model.encoder
        mask = inside(features, lengths)[:, None]
        positions = _relative_positions(encoder, features)
        hidden = features if positions is None else (features, positions)
        for block in encoder.encoders[self.blocks :]:
            hidden, mask = block(hidden, mask)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        if getattr(encoder, "normalize_before", True):
            hidden = encoder.after_norm(hidden)
        return model.ctc.log_softmax(hidden).float()


class LayerCut(Cut):
    """A cut through a pretrained encoder; frozen parameters belong to the side of their layer."""

    @classmethod
    def find(cls, model: nn.Module, extractor: Collection[str], bins: int) -> LayerCut:
        """Find the cut; see `Cut.above`."""
        encoder, personal, shared = model.encoder, dict[str, int](), dict[str, int]()
        for name, _ in model.named_parameters():
            part, _, rest = name.partition(".")
            first, last = encoder.levels(rest) if part == "encoder" else (_HEAD, _HEAD)
            if name in extractor:
                personal[name] = last
            else:
                shared[name] = first
        if not personal:
            raise ValueError("no trained parameter is personal, so there is no extractor")
        if not shared:
            raise ValueError("all trained parameters are personal, so there is no classifier")
        highest, lowest = max(personal, key=personal.__getitem__), min(shared, key=shared.get)
        if personal[highest] >= shared[lowest]:
            raise ValueError(
                f"{highest} is personal, but {lowest}, which is no higher in the model, is shared: "
                "an extractor has to be the bottom of the model, such as encoder.layers.[0-1].*"
            )
        cut = cls(
            personal[highest], encoder.size, encoder.size / (encoder.step * bins), encoder.step
        )
        cut._try(model, bins, 2 * encoder.shortest)
        return cut

    def extract(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the features; see `Cut.extract`."""
        speech, lengths = batch.get("speech"), batch["speech_lengths"]
        if speech is None:
            hidden = batch["hidden"]
            return model.encoder.upper(hidden, lengths, model.depth, self.blocks), lengths
        specaug = model.specaug if model.training else None
        return model.encoder.lower(speech.clone(), lengths, self.blocks, specaug)

    def classify(self, model: nn.Module, features: Tensor, lengths: Tensor) -> Tensor:
        """Return CTC log posteriors, or the decoder's input if the model has a decoder."""
        return classify(model, model.encoder.upper(features, lengths, self.blocks))


def _relative_positions(encoder: nn.Module, features: Tensor) -> Tensor | None:
    """Return the table of relative positions that an encoder gives its blocks; None without one."""
    for module in encoder.modules():
        if "RelPositionalEncoding" in type(module).__name__:
            return module(features)[1]
    return None
