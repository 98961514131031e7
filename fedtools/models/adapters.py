"""Adapters: train a small part of a pretrained model, and share the frozen rest among clients.

What is frozen is no parameter and in no state: its tensors are buffers that `state_dict` leaves
out, so that they are neither sent, nor checkpointed, nor kept for a client. What is trained keeps
the name that it has in the model; of LoRA (E. Hu et al.: LoRA: low-rank adaptation of large
language models, ICLR 2022) these are `lora_a` and `lora_b` of a linear layer:

    y = W x + b + alpha / rank * B A x

In a stack, what is trained has a leading client dimension, and the frozen rest has none: a batch of
all clients, (K x B, ...), goes through it as one.
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

from fedtools.models.adaptation import Adapt


class Rows:
    """How many clients the rows of a batch belong to, in equal parts; set before each pass."""

    def __init__(self) -> None:
        self.clients = 1


def freeze(model: nn.Module) -> None:
    """Turn all parameters and buffers into buffers that no state holds; tied ones stay tied."""
    frozen: dict[int, Tensor] = {}
    for layer in model.modules():
        for name, value in [*layer._parameters.items(), *layer._buffers.items()]:
            if value is not None:
                layer._parameters.pop(name, None)
                layer._buffers.pop(name, None)
                kept = frozen.setdefault(id(value), value.detach())
                layer.register_buffer(name, kept, persistent=False)


def adapt(model: nn.Module, how: Adapt, clients: int | None) -> Rows:
    """Freeze a model in place, but for what is trained.

    Args:
        clients: of a stack; None for a model without client dimension.

    Returns:
        what must know, before each pass, how many clients there are.

    Raises:
        ValueError: if a pattern matches nothing.
    """
    linear = [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    every = model.named_parameters(remove_duplicate=False)
    # Tables of sines and cosines are parameters too, which nobody trains.
    names = [name for name, value in every if value.requires_grad]
    if how.kind == "lora":
        _check_patterns("targets", how.targets, linear, "linear layer")
    _check_patterns("also", how.also, names, "parameter")
    freeze(model)
    rows, tied = Rows(), dict[int, nn.Parameter]()
    for path, layer in list(model.named_modules()):
        trained = [name for name in layer._buffers if how.trains(f"{path}.{name}")]
        trained = [name for name in trained if f"{path}.{name}" in names]
        rank = how.rank if how.kind == "lora" and path in linear else 0
        if rank and not any(fnmatchcase(path, pattern) for pattern in how.targets):
            rank = 0
        if trained or rank:
            kind = _kind_of(layer)
            own = kind(layer, trained, clients, rows, tied)
            if rank:
                own.add_low_rank(rank, how.alpha / rank)
            _replace(model, path, own)
    return rows


def _check_patterns(option: str, patterns: Iterable[str], names: list[str], what: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"{option}: no {what} matches {pattern!r}; there are {names[0]}, ... {names[-1]}"
            )


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


class Trained(nn.Module):
    """A layer of which some parameters are trained, by each client of a stack its own.

    Args:
        layer: frozen.
        names: of its parameters that are trained.
        clients: of a stack, or None.
        rows: says how many clients a batch has.
        tied: trained parameters by the id of the frozen tensor in whose place they are: what two
            layers have in common is trained, counted and sent once, under its first name.
    """

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
                # In a list: torch would register it under a second name.
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
            # Such as the stride of a convolution, which others ask for.
            return getattr(super().__getattr__("layer"), name)

    def own(self, name: str) -> Tensor:
        """A trained parameter, (K, ...), of the clients of the batch."""
        value = self._tied[name][0] if name in self._tied else self._parameters[name]
        assert value is not None
        return value[: self._rows.clients] if self._clients else value[None]

    def forward(self, values: Tensor, *others: Any, **options: Any) -> Tensor:
        clients = self._rows.clients if self._clients else 1
        # Such as the lengths of the rows.
        split = [
            one.chunk(clients) if isinstance(one, Tensor) else [one] * clients
            for one in (values, *others)
        ]
        found = [
            functional_call(
                self.layer, {name: self.own(name)[k] for name in self._names}, given, options
            )
            for k, given in enumerate(zip(*split, strict=True))
        ]
        return torch.cat(found) if clients > 1 else found[0]


class TrainedLinear(Trained):
    """A linear layer, with or without an adapter of low rank."""

    layer: nn.Linear
    scale = 0.0

    def add_low_rank(self, rank: int, scale: float) -> None:
        """Give it an adapter that does nothing yet: A is drawn as torch draws weights, B is 0."""
        outputs, inputs = self.layer.weight.shape
        like = {"device": self.layer.weight.device, "dtype": self.layer.weight.dtype}
        bound = 1 / math.sqrt(inputs)
        down = torch.empty(1, rank, inputs, **like).uniform_(-bound, bound)
        up = torch.zeros(1, outputs, rank, **like)
        count = self._clients or 1
        down, up = (value.repeat_interleave(count, 0) for value in (down, up))
        self.lora_a = nn.Parameter(down if self._clients else down[0])
        self.lora_b = nn.Parameter(up if self._clients else up[0])
        self.scale = scale

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
            low = torch.matmul(rows, self._low("lora_a").transpose(1, 2))
            found = torch.baddbmm(found, low, self._low("lora_b").transpose(1, 2), alpha=self.scale)
        return found.view(*values.shape[:-1], -1)

    def _low(self, name: str) -> Tensor:
        value = self._parameters[name]
        assert value is not None
        return value[: self._rows.clients] if self._clients else value[None]


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
