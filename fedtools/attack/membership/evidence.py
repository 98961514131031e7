"""Losses of utterances under models, and cosines of updates with the descent of these losses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedtools.attack.victims import State
from fedtools.core.errors import UserError
from fedtools.federation.federation import Federation
from fedtools.models.training import load_model
from fedtools.tasks.base import Items
from fedtools.tasks.parts import MODELS

# Updates in memory at a time share the gradients: at least so many, and as many as are this large.
_HELD = 8
_BYTES = 1 << 28
Name = TypeVar("Name", bound=Hashable)


class Evidence:
    """Losses and gradients of utterances under models that began with one global model.

    It needs memory for one model and `_HELD` updates.

    Args:
        federation: opened federation.
        number: the round that began with the global model.
        items: all utterances.
    """

    def __init__(self, federation: Federation, number: int, items: Items):
        self._items, self._models = items, federation.task.need(MODELS)
        federation.load_result(None, number - 1)
        tensors = self._models.tensors(self._models.build())
        self._start = {name: value.clone() for name, value in tensors.items()}

    def begun(self, parts: Iterable[Sequence[str]]) -> dict[str, float]:
        """Return the loss of each utterance under the global model.

        Raises:
            UserError: if a loss is not finite.
        """
        self._load({})
        names = list(dict.fromkeys(name for part in parts for name in part))
        return dict(zip(names, self._losses(names), strict=True))

    def under(
        self, states: Iterable[tuple[Name, State]], wanted: Callable[[Name], Iterable[str]]
    ) -> Iterator[tuple[Name, np.ndarray]]:
        """Yield each model's losses and cosines of update and descent, (n, 2), for its utterances.

        Args:
            states: names of models and the tensors sent.
            wanted: returns a model's utterances, given its name; each once.
        """
        left = iter(states)
        size = sum(value.nbytes for value in self._models.build().parameters())
        while some := self._of_some(islice(left, max(_HELD, _BYTES // size)), wanted):
            yield from some.items()

    def _of_some(
        self, states: Iterable[tuple[Name, State]], wanted: Callable[[Name], Iterable[str]]
    ) -> dict[Name, np.ndarray]:
        """Return the same for models whose updates are in memory together."""
        begun, updates, found = self._load({}), dict[Name, Tensor](), dict[Name, np.ndarray]()
        places: dict[Name, dict[str, int]] = {}
        for name, state in states:
            updates[name] = self._load(state) - begun
            places[name] = {item: index for index, item in enumerate(wanted(name))}
            losses = self._losses(list(places[name]))
            found[name] = np.stack([losses, np.zeros_like(losses)], 1)
        norms = {name: update.norm() for name, update in updates.items()}
        self._load({})
        for item in dict.fromkeys(item for own in places.values() for item in own):
            descent = -self._gradient(item)
            length = descent.norm()
            for name in (name for name, own in places.items() if item in own):
                along = descent @ updates[name] / (length * norms[name]).clamp(min=1e-30)
                found[name][places[name][item], 1] = along.item()
        return found

    def _load(self, state: State) -> Tensor:
        """Load the global model, then the sent tensors, and return the network's parameters."""
        model = self._models.build().eval()
        tensors = self._models.tensors(model)
        load_model(tensors, self._start)
        load_model(tensors, state)
        return torch.cat([value.detach().flatten() for value in model.parameters()])

    @torch.no_grad()
    def _losses(self, names: Sequence[str]) -> np.ndarray:
        losses = self._items.losses(self._models.build(), names).double().cpu().numpy()
        for name, loss in zip(names, losses, strict=True):
            if not np.isfinite(loss):
                problem = f"the loss of {name!r} is {loss}"
                raise UserError(problem, remedy="leave it out of the data")
        return losses

    def _gradient(self, name: str) -> Tensor:
        model = self._models.build()
        model.zero_grad(set_to_none=True)
        self._items.losses(model, [name])[0].backward()
        parts = [
            torch.zeros_like(value) if value.grad is None else value.grad
            for value in model.parameters()
        ]
        found = torch.cat([part.flatten() for part in parts])
        model.zero_grad(set_to_none=True)
        return found
