"""Bounds on the elements of tensors: the values that a model or a mechanism can produce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError


@dataclass(frozen=True)
class Values:
    """Bounds on a tensor with finite elements.

    Attributes:
        least, most: bounds on each element.
        total: the maximum sum of the magnitudes of all elements.
        grid: a step of which each element is an integer multiple; 0 for no grid.
    """

    least: float = -math.inf
    most: float = math.inf
    total: float = math.inf
    grid: float = 0.0

    def allow(self, values: np.ndarray) -> bool:
        """Return whether elements, of one tensor or of many, are within the bounds on each."""
        return not self.problem(values)

    def problem(self, values: np.ndarray) -> str:
        """Return what is wrong with elements, apart from the bound on their sum; "" if nothing."""
        if values.size and not values.min() >= self.least:
            return f"{values.min():g} is below {self.least:g}"
        if values.size and not values.max() <= self.most:
            return f"{values.max():g} is over {self.most:g}"
        if self.grid:
            steps = values / self.grid
            if (steps != np.rint(steps)).any():
                return f"an element is no multiple of {self.grid:g}"
        return ""

    def total_problem(self, total: float) -> str:
        """Return what is wrong with a sum of magnitudes; "" if nothing."""
        return "" if total <= self.total else f"{total:g} in all is over {self.total:g}"


def check_values(
    state: Mapping[str, np.ndarray], bounds: Mapping[str, Values], path: str | Path
) -> None:
    """Raise a `UserError` naming the file and the first tensor that is out of bounds."""
    for name, one in bounds.items():
        if problem := one.problem(state[name]):
            raise UserError(f"{problem} in tensor {name!r}", path=path)


# Name endings of BatchNorm's running statistics, which training accumulates instead of fitting.
STATISTICS = (".running_mean", ".running_var")

# A variance must not be negative: activations are divided by its square root.
_VARIANCE = Values(least=0.0)


def of_model(names: Iterable[str]) -> Mapping[str, Values]:
    """Return the bounds on a model's tensors: name -> bounds, for those that have any."""
    return {name: _VARIANCE for name in names if name.endswith(".running_var")}
