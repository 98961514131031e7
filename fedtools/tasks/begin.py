"""The states that an experiment with models begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from fedtools.files.errors import UserError
from fedtools.files.states import Spec, check_finite, load_state, spec_of
from fedtools.files.values import check_values, of_model
from fedtools.methods.base import PERSONAL, SHARED, Method
from fedtools.models.training import load_model
from fedtools.tasks.base import NewExperiment, State


def begin_with(
    new: NewExperiment[Method], model: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[State, State]:
    """The states of a new experiment, `tensors` of `model` or those of the file to start with."""
    if new.start:
        state = load_state(new.start, spec_of(tensors))
        check_finite(state, new.start)
        check_values(state, of_model(state), new.start)
        load_model(tensors, state)
    parameters = {name for name, _ in model.named_parameters()}
    kinds = kinds_of(new.method, parameters, spec_of(tensors), new.where)
    return tensors, {name: value for name, value in tensors.items() if kinds[name] == SHARED}


def kinds_of(method: Method, parameters: set[str], spec: Spec, where: str | Path) -> dict[str, str]:
    """tensor name -> SHARED, PERSONAL or RESET; a `UserError` if a pattern matches nothing."""
    try:
        return method.kinds(parameters, spec)
    except ValueError as error:
        raise UserError(f"method_conf.{error}", path=where) from None


def personal_parameters(method: Method, model: nn.Module) -> set[str]:
    """The names of the parameters that stay at each client."""
    names = (name for name, _ in model.named_parameters())
    return {name for name in names if method.parameter_kind(name) == PERSONAL}
