"""Training objectives: a loss, an action after each step, and a state kept in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from torch import Tensor, nn

# (model, batch) -> the loss of each model, shape (K,); K is 1 for a single model.
Loss = Callable[[nn.Module, Any], Tensor]
State = dict[str, "Tensor | np.ndarray"]


class Objective:
    """Training objective; tasks subclass it where they need more than a loss.

    `objective + penalty` adds a term to the loss, and `objective.replaced(loss)` replaces it;
    labels, state and the action after each step are kept.

    Args:
        loss: the loss of each model, shape (K,).
    """

    # Whether the state is kept between rounds; only for one client or the server.
    keep = False
    # The share of the training's steps taken so far, for schedules.
    done = 0.0

    def __init__(self, loss: Loss):
        self.loss = loss

    def __add__(self, penalty: Loss) -> Objective:
        return self.replaced(lambda model, batch: self.loss(model, batch) + penalty(model, batch))

    def replaced(self, loss: Loss) -> Objective:
        """Return the same objective with another loss."""
        return _Replaced(self, loss)

    def labelled(self, batch: Any) -> Any:
        """Return the batch with the labels to train on."""
        return batch

    def new_round(self) -> None:
        """Start a new round with the state kept from the last one."""

    @property
    def empty_labels(self) -> Mapping[int, float]:
        """Return each client's share of utterances with an empty label in this round's training."""
        return {}

    def after_step(self, model: nn.Module, active: int) -> None:
        """Act after a step of the optimiser, such as by updating a teacher.

        Args:
            model: the model or stack.
            active: how many models of a stack, counted from the first, took this step. Momentum
                also changes the others, but their results were saved before.
        """

    def state(self) -> State:
        """Return the tensors to keep in checkpoints, for `load`."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the tensors returned by `state`."""


class _Replaced(Objective):
    """An objective with another loss; everything else is delegated to the original objective."""

    def __init__(self, first: Objective, loss: Loss):
        super().__init__(loss)
        self._first = first
        self.keep = first.keep

    @property
    def empty_labels(self) -> Mapping[int, float]:
        return self._first.empty_labels

    def labelled(self, batch: Any) -> Any:
        return self._first.labelled(batch)

    def new_round(self) -> None:
        self._first.new_round()

    def after_step(self, model: nn.Module, active: int) -> None:
        self._first.after_step(model, active)

    def state(self) -> State:
        return self._first.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        self._first.load(state)


def total(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors, added in order."""
    return reduce(add, parts)


def squared_distance(model: nn.Module, start: Mapping[str, Tensor], active: int | None) -> Tensor:
    """Compute the squared distance of each model's parameters from `start`, (K,).

    Args:
        model: the model or stack.
        start: the parameters to measure from.
        active: how many models of a stack, counted from the first, still train; None for a single
            model.
    """
    rows = [
        (value[:active] - start[name][:active]) if active else (value - start[name])[None]
        for name, value in model.named_parameters()
    ]
    return total(row.square().flatten(1).sum(1) for row in rows)
