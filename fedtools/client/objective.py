"""What training minimises: a loss, what follows a step, and a state that checkpoints keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from torch import Tensor, nn

# The loss of each model of a batch, shape (K,); K is 1 for a model that is no stack.
Loss = Callable[[nn.Module, Any], Tensor]
State = dict[str, "Tensor | np.ndarray"]


class Objective:
    """What training minimises; tasks derive from it where a loss alone does not say it.

    `objective + penalty` has a term more, and `objective.replaced(loss)` another loss; the labels,
    the state and what follows a step stay the first one's.

    Args:
        loss: of each model, shape (K,).
    """

    # Whether its state lives on from round to round; of one client, or the server.
    keep = False
    # The share of the training's steps taken so far, for what grows or falls along it.
    done = 0.0

    def __init__(self, loss: Loss):
        self.loss = loss

    def __add__(self, penalty: Loss) -> Objective:
        return self.replaced(lambda model, batch: self.loss(model, batch) + penalty(model, batch))

    def replaced(self, loss: Loss) -> Objective:
        """The same objective with another loss."""
        return _Replaced(self, loss)

    def labelled(self, batch: Any) -> Any:
        """The batch with the labels to be trained on."""
        return batch

    def new_round(self) -> None:
        """Begin the next round with a state that was kept."""

    @property
    def empty_labels(self) -> Mapping[int, float]:
        """Each client's share of utterances trained on with an empty label in this round."""
        return {}

    def after_step(self, model: nn.Module, active: int) -> None:
        """Follow a step of the optimiser, such as with an update of a teacher.

        Args:
            active: of a stack, how many models took this step, the first ones; momentum moves the
                others on too, but not to where they will end.
        """

    def state(self) -> State:
        """The tensors that checkpoints keep, and `load` puts back."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Put back what `state` gave."""


class _Replaced(Objective):
    """An objective whose loss is another; all else is the first one's."""

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
    """The sum of tensors, one after the other; there is at least one."""
    return reduce(add, parts)


def squared_distance(model: nn.Module, start: Mapping[str, Tensor], active: int | None) -> Tensor:
    """The squared distance of each model's parameters from those of `start`, (K,).

    Args:
        active: of a stack, how many models still train, the first ones; None: it is no stack.
    """
    rows = [
        (value[:active] - start[name][:active]) if active else (value - start[name])[None]
        for name, value in model.named_parameters()
    ]
    return total(row.square().flatten(1).sum(1) for row in rows)
