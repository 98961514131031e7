"""The geometric median of the updates, by the smoothed Weiszfeld algorithm (RFA).

K. Pillutla, S. M. Kakade, Z. Harchaoui: Robust aggregation for federated learning, IEEE
Transactions on Signal Processing 70, 2022, algorithm 2: v minimises sum_k a_k |v - D_k|, smoothed
where |v - D_k| is below nu. With the clients' weights a_k:

    v <- sum_k a_k D_k
    repeat:  b_k <- a_k / max(nu, |v - D_k|),   v <- sum_k b_k D_k / sum_k b_k

v is always a mean of the D_k with weights c_k, so that the distances follow from the inner products
G of all pairs: |v - D_k|^2 = c' G c - 2 (G c)_k + G_kk. No iteration reads the updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedtools.core.config import AboveZero, Positive
from fedtools.server.robust import RULES
from fedtools.server.robust.base import Part, Rule


@RULES.register("geometric_median")
@dataclass(frozen=True)
class GeometricMedian(Rule):
    """The point with the least weighted sum of distances to the updates.

    Attributes:
        iterations: steps of Weiszfeld's algorithm.
        smoothing: nu, below which a distance does not increase a weight further.
    """

    needs: ClassVar[Literal["norms", "pairs", "values"]] = "pairs"
    uses_weights: ClassVar[bool] = True

    iterations: Positive = 10
    smoothing: AboveZero = 1e-6

    def shares(self, part: Part) -> np.ndarray:
        """Return c_k after the last iteration."""
        shares, distances = part.weights, part.distances
        for _ in range(self.iterations):
            # |v - D_k|^2 by distances of pairs, in which the lengths of the updates cancel.
            mixed = distances @ shares
            apart = np.sqrt(np.maximum(mixed - 0.5 * (shares @ mixed), 0.0))
            weights = part.weights / np.maximum(self.smoothing, apart)
            shares = weights / weights.sum()
        return shares
