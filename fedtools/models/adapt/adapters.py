"""Adapters: train a small part of a pretrained model, and share the frozen rest among clients.

Frozen tensors are not parameters and not in any state: they are buffers that `state_dict` leaves
out, so that they are neither sent, nor checkpointed, nor stored per client. Trained parameters keep
the names that they have in the model. LoRA (E. Hu et al.: LoRA: low-rank adaptation of large
language models, ICLR 2022) adds `lora_a` and `lora_b` to a linear layer or a convolution:

    y = W x + b + alpha / rank * B A x

For a convolution, W is the matrix whose rows are its kernels, (outputs, inputs of a group x
places), and x is the receptive field: A is then a convolution to `rank` channels, with the stride
and dilation of W, and B a convolution of kernel size 1. Without groups and dilation this is peft's.

`Adapt.combine` may make A a constant, or add to B A a constant D that the server sends.

In a stack, trained parameters have a leading client dimension, and the frozen rest has none: a
batch of all clients, (K x B, ...), passes through it at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedtools.models import stacked
from fedtools.models.adapt.adaptation import Adapt, Combine

# Layers of torch, exactly of these types; layers of `fedtools.models.stacked`.
_LINEAR = (nn.Linear,), stacked.Linear
_CONVOLUTION = (nn.Conv1d, nn.Conv2d), stacked.Conv2d


class Rows:
    """The number of clients whose rows are in a batch, in equal parts; set before each pass."""

    def __init__(self) -> None:
        self.clients = 1


def freeze(model: nn.Module) -> None:
    """Turn all parameters and buffers into non-persistent buffers; tied ones stay tied."""
    frozen: dict[int, Tensor] = {}
    for layer in model.modules():
        there = (name for name, value in layer._parameters.items() if value is not None)
        layer.frozen_parameters = frozenset(there)
        for name, value in [*layer._parameters.items(), *layer._buffers.items()]:
            if value is not None:
                layer._parameters.pop(name, None)
                layer._buffers.pop(name, None)
                kept = frozen.setdefault(id(value), value.detach())
                layer.register_buffer(name, kept, persistent=False)


def adapt(model: nn.Module, how: Adapt, clients: int | None) -> Rows:
    """Freeze a model in place, except for the part that is trained.

    Args:
        model: the model.
        how: options that select the trained part.
        clients: number of clients in a stack; None for a model without client dimension.

    Returns:
        the object whose number of clients has to be set before each pass.

    Raises:
        ValueError: if a pattern matches nothing.
    """
    every = model.named_parameters(remove_duplicate=False)
    # Some parameters are never trained, such as tables of sines and cosines.
    names = [name for name, value in every if value.requires_grad]
    low_rank = _targets(model, how.targets) if how.kind == "lora" else set()
    _check_patterns("also", how.also, names, "parameter")
    freeze(model)
    rows, tied = Rows(), dict[int, nn.Parameter]()
    for path, layer in list(model.named_modules()):
        full = {name: f"{path}.{name}" if path else name for name in layer._buffers}
        trained = [name for name in full if full[name] in names and how.trains(full[name])]
        if trained and any(layer.children()):
            if clients:
                raise ValueError(f"{full[trained[0]]} belongs to no layer that a stack can train")
            _thaw(layer, trained)
        elif trained or path in low_rank:
            own = _kind_of(layer)(layer, trained, clients, rows, tied)
            if path in low_rank:
                own.add_low_rank(how.rank, how.alpha / how.rank, how.combine)
            _replace(model, path, own)
    return rows


def _targets(model: nn.Module, patterns: Iterable[str]) -> set[str]:
    """Return the layers that get a low-rank adapter, see `Adapt.targets`."""
    linear, convolutions = (
        [
            path
            for path, layer in model.named_modules()
            if type(layer) in theirs or isinstance(layer, ours)
        ]
        for theirs, ours in (_LINEAR, _CONVOLUTION)
    )
    _check_patterns("targets", patterns, linear + convolutions, "linear layer or convolution")
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    tied = {path for path in linear if id(model.get_submodule(path).weight) in tables}
    found: set[str] = set()
    for pattern in patterns:
        matched = {path for path in linear if fnmatchcase(path, pattern)}
        # An adapter would untie it from the table of tokens, for every model that is exported.
        matched -= tied if pattern == "*" else set()
        found |= matched or {path for path in convolutions if fnmatchcase(path, pattern)}
    return found


def _thaw(layer: nn.Module, names: Iterable[str]) -> None:
    """Turn frozen tensors of a layer that contains other layers back into parameters."""
    for name in names:
        value = layer._buffers.pop(name)
        layer._non_persistent_buffers_set.discard(name)
        layer.register_parameter(name, nn.Parameter(value.clone()))
    layer.frozen_parameters -= set(names)


def _check_patterns(option: str, patterns: Iterable[str], names: list[str], what: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = f"there are {names[0]}, ... {names[-1]}" if names else "there is none"
            raise ValueError(f"{option}: no {what} matches {pattern!r}; {there}")


def count(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trained parameters and of all parameters in one client's model."""
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    others = {id(value): value for value in model.parameters() if not value.requires_grad}
    for layer in model.modules():
        # A `Trained` layer's own parameters replace frozen ones of the layer that it wraps.
        if not isinstance(layer, Trained):
            frozen = getattr(layer, "frozen_parameters", ())
            others |= {id(layer._buffers[name]): layer._buffers[name] for name in frozen}
    for layer in model.modules():
        if isinstance(layer, Trained):
            for name in layer._names:
                others.pop(id(layer.layer._buffers[name]), None)
    return trained, trained + sum(value.numel() for value in others.values())


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors of one client's model, under their names before it was adapted."""
    found: dict[str, Tensor] = {}
    below = {id(layer.layer) for layer in model.modules() if isinstance(layer, Trained)}
    for path, layer in model.named_modules():
        if id(layer) in below:
            continue
        own = layer.merged() if isinstance(layer, Trained) else _tensors(layer)
        found |= {f"{path}.{name}" if path else name: value for name, value in own.items()}
    return found


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a layer, without those of its sublayers."""
    everything = {**layer._parameters, **layer._buffers}
    return {name: value.detach() for name, value in everything.items() if value is not None}


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


class Trained(nn.Module):
    """A layer of which some parameters are trained, separately by each client of a stack.

    Args:
        layer: the frozen layer.
        names: names of its trained parameters.
        clients: number of clients in a stack, or None.
        rows: holds the number of clients in a batch.
        tied: trained parameters by the id of the frozen tensor that they replace: a tensor that two
            layers share is trained, counted and sent once, under its first name.

    Attributes:
        scale: factor of B A; 0 without a low-rank adapter.
    """

    scale = 0.0

    def __init__(
        self,
        layer: nn.Module,
        names: list[str],
        clients: int | None,
        rows: Rows,
        tied: dict[int, nn.Parameter],
    ):
        super().__init__()
        self._names, self._rows, self._clients = names, rows, clients
        self._tied: dict[str, list[nn.Parameter]] = {}
        for name in names:
            value = getattr(layer, name)
            if id(value) in tied:
                # In a list, because torch would register it under a second name.
                self._tied[name] = [tied[id(value)]]
                continue
            own = value[None].repeat_interleave(clients or 1, 0)
            parameter = nn.Parameter(own if clients else own[0])
            tied[id(value)] = parameter
            self.register_parameter(name, parameter)
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Such as the stride of a convolution, which other modules read.
            return getattr(super().__getattr__("layer"), name)

    def own(self, name: str) -> Tensor:
        """Return a tensor for each client of the batch, (K, ...)."""
        value: Tensor = self._tied[name][0] if name in self._tied else getattr(self, name)
        return value[: self._rows.clients] if self._clients else value[None]

    def _of_each(self, value: Tensor) -> Tensor:
        return value[None].repeat_interleave(self._clients, 0) if self._clients else value

    def add_low_rank(self, rank: int, scale: float, combine: Combine = "mean") -> None:
        """Add an adapter that has no effect yet: A is drawn like weights in torch, B is 0.

        Args:
            rank: number of rows of A.
            scale: factor of B A.
            combine: see `Adapt`. A constant is a buffer: it is in states, but is not trained.
        """
        weight = self.layer.weight
        # Layers of keyword networks already have a client dimension.
        ahead = isinstance(self.layer, (_LINEAR[1], _CONVOLUTION[1]))
        clients, (outputs, *self._seen) = weight.shape[:ahead], weight.shape[ahead:]
        inputs = math.prod(self._seen)
        like = {"device": weight.device, "dtype": weight.dtype}
        bound = 1 / math.sqrt(inputs)
        down = torch.empty(*clients, rank, inputs, **like).uniform_(-bound, bound)
        down = self._of_each(down)
        if combine == "fixed_a":
            self.register_buffer("lora_a", down)
        else:
            self.lora_a = nn.Parameter(down)
        self.lora_b = nn.Parameter(self._of_each(torch.zeros(*clients, outputs, rank, **like)))
        if combine == "residual":
            delta = torch.zeros(*clients, outputs, inputs, **like)
            self.register_buffer("lora_delta", self._of_each(delta))
        self.scale = scale

    def weights(self) -> dict[str, Tensor]:
        """Return each client's trained tensors, (K, ...), with its adapter merged into weights."""
        found = {name: self.own(name) for name in self._names}
        if self.scale:
            product = self.own("lora_b") @ self.own("lora_a")
            if "lora_delta" in self._buffers:
                product = product + self.own("lora_delta")
            weight = found["weight"] if "weight" in found else self.layer.weight[None]
            found["weight"] = weight + self.scale * product.unflatten(-1, self._seen)
        return found

    def merged(self) -> dict[str, Tensor]:
        """Return the layer's tensors in one client's model, including the trained ones."""
        own = {name: value[0].detach() for name, value in self.weights().items()}
        return _tensors(self.layer) | own

    def forward(self, values: Tensor, *others: Any, **options: Any) -> Tensor:
        clients, weights = self._rows.clients if self._clients else 1, self.weights()
        # Other arguments may be tensors with one entry per row, such as lengths.
        split = [
            one.chunk(clients) if isinstance(one, Tensor) else [one] * clients
            for one in (values, *others)
        ]
        found = [
            functional_call(
                self.layer, {name: value[k] for name, value in weights.items()}, given, options
            )
            for k, given in enumerate(zip(*split, strict=True))
        ]
        return torch.cat(found) if clients > 1 else found[0]


class TrainedLinear(Trained):
    """A linear layer, with or without a low-rank adapter."""

    layer: nn.Linear

    def forward(self, values: Tensor, *others: Any, **options: Any) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        rows = values.reshape(self._rows.clients if self._clients else 1, -1, values.shape[-1])
        if "weight" in self._names:
            found = torch.matmul(rows, self.own("weight").transpose(1, 2))
            found = found if bias is None or "bias" in self._names else found + bias
        else:
            found = F.linear(rows, weight, None if "bias" in self._names else bias)
        if "bias" in self._names:
            found = found + self.own("bias")[:, None]
        if self.scale:
            low = torch.matmul(rows, self.own("lora_a").transpose(1, 2))
            found = torch.baddbmm(found, low, self.own("lora_b").transpose(1, 2), alpha=self.scale)
        if "lora_delta" in self._buffers:
            delta = self.own("lora_delta").transpose(1, 2)
            found = torch.baddbmm(found, rows, delta, alpha=self.scale)
        return found.view(*values.shape[:-1], -1)


class TrainedLayerNorm(Trained):
    """A layer normalisation over the last dimension."""

    layer: nn.LayerNorm

    def forward(self, values: Tensor, *others: Any, **options: Any) -> Tensor:
        if len(self.layer.normalized_shape) != 1:
            return super().forward(values, *others, **options)
        normal = F.layer_norm(values, self.layer.normalized_shape, eps=self.layer.eps)
        rows = normal.reshape(self._rows.clients if self._clients else 1, -1, values.shape[-1])
        weight, bias = (
            self.own(name)[:, None] if name in self._names else getattr(self.layer, name)
            for name in ("weight", "bias")
        )
        return torch.addcmul(bias, rows, weight).view(values.shape)


def _kind_of(layer: nn.Module) -> type[Trained]:
    if type(layer) is nn.Linear:
        return TrainedLinear
    has_both = type(layer) is nn.LayerNorm and layer.bias is not None
    return TrainedLayerNorm if has_both else Trained
