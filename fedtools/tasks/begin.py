"""Initial states of experiments with models."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedtools.core.errors import UserError
from fedtools.exchange.states import Spec, check_finite, load_state, spec_of
from fedtools.exchange.values import check_values, of_model
from fedtools.methods.base import GIVEN, PERSONAL, SHARED, Method
from fedtools.models.adapt.adaptation import BASE, FACTORS, OF_PRODUCTS, combine_of, has_base
from fedtools.models.adapt.adapters import count
from fedtools.models.pretrained.folder import Folder
from fedtools.models.pretrained.options import is_pretrained
from fedtools.models.training import load_model
from fedtools.tasks.base import NewExperiment, State


def begin_with(
    new: NewExperiment[Method], model: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[State, State]:
    """Return a new experiment's full and sent state: `tensors` of `model`, or those of its start.

    The start is the file `new.start`, if there is one.
    """
    if new.start:
        state = load_state(new.start, spec_of(tensors))
        check_finite(state, new.start)
        check_values(state, of_model(state), new.start)
        load_model(tensors, state)
    parameters = {name for name, _ in model.named_parameters()}
    kinds = kinds_of(new.method, parameters, spec_of(tensors), new.where)
    combine = combine_of(new.options.model)
    for name, kind in kinds.items() if combine in OF_PRODUCTS else ():
        if name.endswith(FACTORS) and kind == PERSONAL:
            problem = f"method_conf.personal: {name} cannot be personal with combine {combine}"
            raise UserError(problem, path=new.where, remedy="use combine mean")
    sent = SHARED, GIVEN
    return tensors, {name: value for name, value in tensors.items() if kinds[name] in sent}


def split_base(
    new: NewExperiment[Method],
) -> tuple[NewExperiment[Method], Path | None]:
    """Return the experiment with the start of its trained part, and the file of its model's base.

    An adapted model's base is the asset `base`, with `start` a state of the trained parameters, or
    without that asset `start` itself. A model that is not adapted has no base.
    """
    if not has_base(new.options.model):
        return new, None
    if "base" in new.assets:
        return new, new.assets["base"] / BASE
    return replace(new, start=None), new.start


def report_trained(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Print how many parameters of a model are trained, unless all are, and what is not used.

    Args:
        model: the model.
        options: the section `model`.
    """
    folder = Folder.open(options.get("path", "")) if is_pretrained(options) else None
    if folder and folder.heads:
        instead = f"its own head ({folder.heads[0]}, ...) is not used: a new one is trained"
        print(f"{folder.path}: {instead}", file=sys.stderr)
    trained, everything = count(model)
    if trained < everything:
        unit, name = (1e6, "M") if everything >= 1e5 else (1e3, "k")
        share = 100 * trained / everything
        counts = f"{trained / unit:.1f} of {everything / unit:.1f} {name} parameters"
        print(f"trains {counts} ({share:.1f} %)", file=sys.stderr)


def kinds_of(method: Method, parameters: set[str], spec: Spec, where: str | Path) -> dict[str, str]:
    """Return `Method.kinds`, or raise a `UserError` if a pattern matches nothing."""
    try:
        return method.kinds(parameters, spec)
    except ValueError as error:
        raise UserError(f"method_conf.{error}", path=where) from None


def personal_parameters(method: Method, model: nn.Module) -> set[str]:
    """Return the names of the parameters that stay at each client."""
    names = (name for name, _ in model.named_parameters())
    return {name for name in names if method.parameter_kind(name) == PERSONAL}
