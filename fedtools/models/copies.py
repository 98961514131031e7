"""Models of one base, which have what is frozen in common, and what is trained of their own."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copy_of(model: Model, clients: int | None = None) -> Model:
    """A model with states of its own, and the other tensors of another.

    Args:
        model: to be copied; its buffers that are in no state are frozen.
        clients: of a stack; the copy has so many, each like the first of `model`.
    """
    shared = frozen_tensors(model)
    copied = copy.deepcopy(model, shared)
    if clients is not None:
        _resize(copied, clients, set(shared))
    return copied


def frozen_tensors(model: nn.Module) -> dict[int, Tensor]:
    """The buffers that are in no state, by their id."""
    return {
        id(layer._buffers[name]): layer._buffers[name]
        for layer in model.modules()
        for name in layer._non_persistent_buffers_set
        if layer._buffers[name] is not None
    }


def _resize(model: nn.Module, clients: int, shared: set[int]) -> None:
    """Give the tensors of a stack's states another client dimension, in place."""
    resized: dict[int, Tensor] = {}
    for layer in model.modules():
        for tensors in (layer._parameters, layer._buffers):
            for name, value in tensors.items():
                if value is None or id(value) in shared:
                    continue
                if id(value) not in resized:
                    own = value.detach()[:1].repeat_interleave(clients, 0)
                    is_parameter = isinstance(value, nn.Parameter)
                    resized[id(value)] = nn.Parameter(own) if is_parameter else own
                tensors[name] = resized[id(value)]
    for layer in model.modules():
        for held in layer.__dict__.get("_tied", {}).values():
            held[0] = resized[id(held[0])]
