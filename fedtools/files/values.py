"""What the elements of a tensor may be: whatever a model or a mechanism can have made of data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.files.errors import UserError


@dataclass(frozen=True)
class Values:
    """Bounds on a tensor whose elements are finite.

    Attributes:
        least, most: of each element.
        total: the largest sum of magnitudes of all its elements.
        grid: of which each element is a whole multiple; 0 for no grid.
    """

    least: float = -math.inf
    most: float = math.inf
    total: float = math.inf
    grid: float = 0.0

    def allow(self, values: np.ndarray) -> bool:
        """Whether these elements, of one tensor or of many, are within the bounds on each."""
        return not self.problem(values)

    def problem(self, values: np.ndarray) -> str:
        """What is wrong with these elements, the bound on their sum apart; "" if nothing is."""
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
        """What is wrong with a sum of magnitudes; "" if nothing is."""
        return "" if total <= self.total else f"{total:g} in all is over {self.total:g}"


def check_values(
    state: Mapping[str, np.ndarray], bounds: Mapping[str, Values], path: str | Path
) -> None:
    """Fail with a `UserError` naming the file and the first tensor that is not within bounds."""
    for name, one in bounds.items():
        if problem := one.problem(state[name]):
            raise UserError(f"{problem} in tensor {name!r}", path=path)


# How the names of BatchNorm's running statistics end, which training counts and does not fit.
STATISTICS = (".running_mean", ".running_var")

# A variance is not negative: its square root is what every activation is divided by.
_VARIANCE = Values(least=0.0)


def of_model(names: Iterable[str]) -> Mapping[str, Values]:
    """The bounds on a model's tensors: name -> bounds, of those that have any."""
    return {name: _VARIANCE for name in names if name.endswith(".running_var")}
