"""Copies of a model that share its frozen tensors and have trained tensors of their own."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from fedtools.models.stacked import held_once

Model = TypeVar("Model", bound=nn.Module)


def copy_of(model: Model, clients: int | None = None) -> Model:
    """Return a copy of a model with its own state; all other tensors are shared.

    Args:
        model: model to copy; its non-persistent buffers are the frozen tensors, and shared like
            those that a stack holds once.
        clients: number of clients in the copied stack, each like the first of `model`; None keeps
            the number.
    """
    shared = frozen_tensors(model) | {id(value): value for value in held_once(model).values()}
    copied = copy.deepcopy(model, shared)
    if clients is not None:
        _resize(copied, clients, set(shared))
    return copied


def frozen_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return the non-persistent buffers, which no state holds, by their id."""
    return {
        id(layer._buffers[name]): layer._buffers[name]
        for layer in model.modules()
        for name in layer._non_persistent_buffers_set
        if layer._buffers[name] is not None
    }


def _resize(model: nn.Module, clients: int, shared: set[int]) -> None:
    """Change the client dimension of the tensors in a stack's state, in place."""
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
