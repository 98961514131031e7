"""Clipping of updates to a fixed norm, and the mean of what is left.

Z. Sun, P. Kairouz, A. T. Suresh, H. B. McMahan: Can you really backdoor federated learning?, 2019,
section 4, "norm thresholding of updates":

    w <- w + sum_k p_k D_k min(1, M / |D_k|)        D_k = w_k - w, p_k the client's weight

M is fixed: a bound that follows the round's own updates grows when attackers send longer ones. If
no update is longer than M, the result has the bytes of the mean.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedtools.core.config import AboveZero
from fedtools.exchange.messages import CLIPPED
from fedtools.server.robust import RULES
from fedtools.server.robust.base import Part, Rule


@RULES.register("clip")
@dataclass(frozen=True)
class Clip(Rule):
    """The weighted mean of updates that are clipped to a fixed norm.

    Attributes:
        norm: M, the largest norm of an update; null takes the median norm of the first round's
            updates, and "server" the norm of what the server learns in the first round from clips
            or utterances of its own (`--data root=FOLDER`).
        statistics: the same for BatchNorm statistics, which are clipped by themselves.
    """

    uses_weights: ClassVar[bool] = True
    is_mean: ClassVar[bool] = True
    records: ClassVar[bool] = True

    norm: AboveZero | Literal["server"] | None = None
    statistics: AboveZero | Literal["server"] | None = None

    def root_in(self, number: int) -> bool:
        return number == 1 and "server" in (self.norm, self.statistics)

    def shares(self, part: Part) -> np.ndarray:
        """Return p_k min(1, M / |D_k|)."""
        found: np.ndarray = part.weights * self.factors(part)
        return found

    def factors(self, part: Part) -> np.ndarray:
        """Return min(1, M / |D_k|), (n,)."""
        norms, most = part.norms, self._bound(part)
        found: np.ndarray = np.divide(most, norms, out=np.ones_like(norms), where=norms > most)
        return found

    def statuses(self, part: Part, shares: np.ndarray) -> list[str]:
        return [CLIPPED if factor < 1 else "" for factor in self.factors(part).tolist()]

    def record(self, part: Part) -> float | None:
        """Return the bound, once most updates are not 0."""
        return self._bound(part) or None

    def _bound(self, part: Part) -> float:
        given = self.statistics if part.statistics else self.norm
        if isinstance(given, float):
            return given
        if part.bound is not None:
            return part.bound
        if given == "server":
            return float(np.sqrt(part.root or 0.0))
        return statistics.median_low(part.norms.tolist()) if len(part.squares) else 0.0
