"""The coordinate-wise median of the clients' models.

D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-robust distributed learning: towards optimal
statistical rates, ICML 2018, definition 1 and algorithm 1, option I. Of an even number of clients
it is the mean of the two in the middle. Weights do not count: who states much data would have more
of the vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedtools.server.robust import RULES
from fedtools.server.robust.base import Rule


@RULES.register("median")
@dataclass(frozen=True)
class Median(Rule):
    """The median of each coordinate; it has no meaning for factors of adapters."""

    needs: ClassVar[Literal["norms", "pairs", "values"]] = "values"

    def centre(self, values: np.ndarray) -> np.ndarray:
        """Return the medians of the rows, in float64; the rows are sorted in place."""
        values.sort(axis=1)
        clients = values.shape[1]
        low, high = values[:, (clients - 1) // 2], values[:, clients // 2]
        found: np.ndarray = low.astype(np.float64) + high
        found *= 0.5
        return found
