"""ESPnet models of which only a part is trained, starting from a base model.

Frozen tensors, including BatchNorm's statistics, are those of the base, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espnet2.asr.espnet_model import ESPnetASRModel
from torch import nn

from fedtools.models.adapt.adapters import freeze
from fedtools.models.adapt.base import adapt_to


class AdaptedModel(ESPnetASRModel):
    """ESPnet's model with its encoder always in evaluation mode; SpecAugment follows the mode."""

    def train(self, mode: bool = True) -> AdaptedModel:
        """Set training mode for all but the encoder."""
        super().train(mode)
        self.encoder.eval()
        return self


def adapt_model(base: Path | None, model: nn.Module, config: Mapping[str, Any], where: str) -> None:
    """Load the base's tensors into an `AdaptedModel`, and freeze all that is not trained.

    Trained are the parts of the encoder that `Adapt` selects, and the last layer, except with kind
    "none". Arguments and errors are those of `adapt_to`.
    """
    how = adapt_to(base, model.state_dict(), model.encoder, config, where)
    if isinstance(model.normalize, nn.Module):
        freeze(model.normalize)
    if how.kind == "none":
        model.ctc.requires_grad_(False)
