"""The acoustic model cut in two: an extractor at the bottom, and a classifier on its features.

Zhu et al. (Interspeech 2022), section 2.2: the extractor is the two convolutions and the first
blocks of the encoder, the classifier all that follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtools.models.asr import log_posteriors
from fedtools.models.padding import embed
from fedtools.models.pooling import inside

# Long enough for every convolution.
_TRIAL_FRAMES = 200


@dataclass(frozen=True)
class Cut:
    """A place in the encoder.

    Attributes:
        blocks: those of the encoder that are below it, beside the convolutions.
        size: values of a frame of features.
        share: values of features for each of the filterbanks.
        step: frames of filterbanks from one frame of features to the next.
    """

    blocks: int
    size: int = 0
    share: float = 0.0
    step: int = 1

    @classmethod
    def above(cls, model: nn.Module, extractor: Collection[str], bins: int) -> Cut:
        """The cut above the parameters of an extractor.

        Args:
            extractor: their names.
            bins: values of a frame of filterbanks.

        Raises:
            ValueError: if they are not just the parameters of the encoder's bottom, or the encoder
                does more than to run one block after the other.
        """
        parameters = {name for name, _ in model.named_parameters()}
        bottom = {name for name in parameters if name.startswith("encoder.embed.")}
        blocks = len(model.encoder.encoders)
        for block in range(blocks):
            if bottom == set(extractor):
                return cls(block)._tried(model, bins)
            bottom |= {name for name in parameters if name.startswith(f"encoder.encoders.{block}.")}
        raise ValueError(
            f"an extractor is encoder.embed.* and some of the first of {blocks} blocks, "
            f"encoder.encoders.0.* to encoder.encoders.{max(0, blocks - 2)}.*"
        )

    def _tried(self, model: nn.Module, bins: int) -> Cut:
        """With the size of features; refuses encoders of which the two parts are not the whole."""
        training, device = model.training, next(model.parameters()).device
        random = torch.Generator().manual_seed(0)
        speech = torch.randn(2, _TRIAL_FRAMES, bins, generator=random).to(device)
        batch = {
            "speech": speech,
            "speech_lengths": torch.tensor([_TRIAL_FRAMES, _TRIAL_FRAMES // 2]),
        }
        with torch.no_grad():
            features, lengths = self.extract(model.eval(), batch)
            parts = self.classify(model, features, lengths)
            whole, _ = log_posteriors(model, batch)
        model.train(training)
        if whole.shape != parts.shape or not torch.allclose(whole, parts, atol=1e-4):
            raise ValueError("this encoder does more than to run one block after the other")
        share = features[0].numel() / speech[0].numel()
        # Convolutions lose a few frames at the ends.
        step = round(speech.shape[1] / features.shape[1])
        return Cut(self.blocks, features.shape[2], share, step)

    def extract(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What is below the cut, of filterbanks; in training with SpecAugment.

        Args:
            batch: `speech` (B, frames, bins), zero-padded, and `speech_lengths`.

        Returns:
            features (B, T, D), and their numbers of frames (B,).
        """
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
        # With relative positions, these go beside the features from block to block.
        features = hidden[0] if isinstance(hidden, tuple) else hidden
        return features, mask.squeeze(1).sum(1)

    def classify(self, model: nn.Module, features: Tensor, lengths: Tensor) -> Tensor:
        """CTC log posteriors, natural log, (B, T, tokens), from what `extract` gave."""
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


def _relative_positions(encoder: nn.Module, features: Tensor) -> Tensor | None:
    """The table that an encoder with relative positions gives its blocks; other kinds have none."""
    for module in encoder.modules():
        if "RelPositionalEncoding" in type(module).__name__:
            return module(features)[1]
    return None
