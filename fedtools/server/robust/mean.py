"""The mean of the clients' models, with their weights: no robustness, and the default.

One client can move the mean anywhere within `max_norm_ratio`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedtools.server.robust import RULES
from fedtools.server.robust.base import MEAN, Part, Rule


@RULES.register(MEAN)
@dataclass(frozen=True)
class Mean(Rule):
    """The weighted mean of the clients' updates."""

    uses_weights: ClassVar[bool] = True
    is_mean: ClassVar[bool] = True

    def shares(self, part: Part) -> np.ndarray:
        """Return p_k."""
        return part.weights
