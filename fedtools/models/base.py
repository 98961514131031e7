"""The base of a model that is adapted: the state of a whole model, which it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedtools.files.config import from_mapping, option_error
from fedtools.files.errors import UserError
from fedtools.files.states import check_finite, load_state, spec_of
from fedtools.files.values import check_values, of_model
from fedtools.models.adaptation import Adapt
from fedtools.models.adapters import adapt
from fedtools.models.training import load_model


def adapt_to(
    base: Path | None,
    tensors: Mapping[str, Tensor],
    body: nn.Module,
    config: Mapping[str, Any],
    where: str,
) -> Adapt:
    """Give a model the tensors of its base, and freeze its body, but for what is trained.

    Args:
        base: the state of a whole model.
        tensors: those of the model, to be overwritten.
        body: what of the model `Adapt` is about.
        config: the section `model`, with options `adapt`.
        where: what `config` was read from, for messages.

    Raises:
        UserError: without a base, if it is of another model, or if the options do not fit.
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
