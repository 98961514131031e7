"""The base of an adapted model: the state of a complete model that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedtools.core.config import from_mapping, option_error
from fedtools.core.errors import UserError
from fedtools.exchange.states import check_finite, load_state, spec_of
from fedtools.exchange.values import check_values, of_model
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.adapt.adapters import adapt
from fedtools.models.training import load_model


def adapt_to(
    base: Path | None,
    tensors: Mapping[str, Tensor],
    body: nn.Module,
    config: Mapping[str, Any],
    where: str,
) -> Adapt:
    """Load the base's tensors into a model, and freeze its body except for the trained part.

    Args:
        base: file with the state of a complete model.
        tensors: the model's tensors, which are overwritten.
        body: the part of the model that `Adapt` applies to.
        config: the section `model`, with options `adapt`.
        where: source of `config`, for messages.

    Returns:
        the options `adapt`.

    Raises:
        UserError: if there is no base, it belongs to another model, or the options do not fit.
    """
    how = from_mapping(Adapt, config["adapt"], f"{where}: adapt")
    if base is None:
        remedy = "give --start with the model that is adapted"
        raise UserError("adapt without a trained model", path=where, remedy=remedy)
    state = load_state(base, spec_of(tensors))
    check_finite(state, base)
    check_values(state, of_model(state), base)
    load_model(tensors, state)
    try:
        adapt(body, how, None)
    except ValueError as error:
        raise option_error(f"adapt: {error}", where, "adapt") from None
    return how
