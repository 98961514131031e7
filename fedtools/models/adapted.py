"""ESPnet models of which a part is trained, on top of the model that they begin with: their base.

What is frozen, BatchNorm's statistics included, is the base's and works as in testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espnet2.asr.espnet_model import ESPnetASRModel
from torch import nn

from fedtools.models.adapters import freeze
from fedtools.models.base import adapt_to


class AdaptedModel(ESPnetASRModel):
    """ESPnet's model; its encoder never works as in training, SpecAugment does."""

    def train(self, mode: bool = True) -> AdaptedModel:
        """As of any module."""
        super().train(mode)
        self.encoder.eval()
        return self


def adapt_model(base: Path | None, model: nn.Module, config: Mapping[str, Any], where: str) -> None:
    """Give an `AdaptedModel` the tensors of its base, and freeze them, but for what is trained.

    That is what `Adapt` says of the encoder, and the last layer, except with kind "none".
    Arguments and errors as of `adapt_to`.
    """
    how = adapt_to(base, model.state_dict(), model.encoder, config, where)
    if isinstance(model.normalize, nn.Module):
        freeze(model.normalize)
    if how.kind == "none":
        model.ctc.requires_grad_(False)
