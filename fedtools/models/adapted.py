"""ESPnet models of which a part is trained, on top of the model that they begin with: their base.

What is frozen, BatchNorm's statistics included, is the base's and works as in testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from espnet2.asr.espnet_model import ESPnetASRModel
from torch import nn

from fedtools.files.config import from_mapping, option_error
from fedtools.files.errors import UserError
from fedtools.files.states import check_finite, load_state, spec_of
from fedtools.files.values import check_values, of_model
from fedtools.models.adaptation import Adapt
from fedtools.models.adapters import adapt, freeze
from fedtools.models.training import load_model


class AdaptedModel(ESPnetASRModel):
    """ESPnet's model; its encoder never works as in training, SpecAugment does."""

    def train(self, mode: bool = True) -> AdaptedModel:
        """As of any module."""
        super().train(mode)
        self.encoder.eval()
        return self


def adapt_to(base: Path | None, model: nn.Module, config: Mapping[str, Any], where: str) -> None:
    """Give a model the tensors of its base, and freeze them, but for what is trained.

    That is what `Adapt` says of the encoder, and the last layer, except with kind "none".

    Args:
        base: the state of a whole model.
        model: an `AdaptedModel`.
        config: the section `model`, with options `adapt`.
        where: what `config` was read from, for messages.

    Raises:
        UserError: without a base, if it is of another model, or if the options do not fit.
    """
    how = from_mapping(Adapt, config["adapt"], f"{where}: adapt")
    if base is None:
        remedy = "give --start with the model that is adapted"
        raise UserError("adapt without a trained model", path=where, remedy=remedy)
    state = load_state(base, spec_of(model.state_dict()))
    check_finite(state, base)
    check_values(state, of_model(state), base)
    load_model(model.state_dict(), state)
    try:
        adapt(model.encoder, how, None)
    except ValueError as error:
        raise option_error(f"adapt: {error}", where, "adapt") from None
    if isinstance(model.normalize, nn.Module):
        freeze(model.normalize)
    if how.kind == "none":
        model.ctc.requires_grad_(False)
