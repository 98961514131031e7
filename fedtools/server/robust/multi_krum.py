"""Multi-Krum: the mean of the updates that lie closest to most others.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer: Machine learning with adversaries:
Byzantine tolerant gradient descent, NeurIPS 2017, section 4 and its multi-Krum. Of n clients, f of
which may be attackers, 2 f + 2 < n:

    s(k)  the sum of the squared distances of D_k to the n - f - 2 other updates closest to it
    w <- w + the mean of the n - f updates D_k with the lowest s(k)

Weights do not count. Clients whose data differ from most others' are left out like attackers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Lt

from fedtools.server.robust import RULES
from fedtools.server.robust.base import Part, Rule

# Decimal digits by which scores are compared: of equal scores the first client's counts as lower,
# whatever rounding makes of them.
_DIGITS = 10


@RULES.register("multi_krum")
@dataclass(frozen=True)
class MultiKrum(Rule):
    """The mean of the updates with the lowest Krum scores.

    Attributes:
        attackers: the largest share of a round's clients that may be attackers; f is this share of
            their number, rounded up, and below half of it.
    """

    needs: ClassVar[Literal["norms", "pairs", "values"]] = "pairs"

    attackers: Annotated[float, Ge(0), Lt(0.5)] = 0.2

    def shares(self, part: Part) -> np.ndarray:
        """Return 1 / m for the m chosen clients, and 0 for the others."""
        chosen = self.chosen(part.distances)
        shares = np.zeros(len(part.squares))
        shares[chosen] = 1 / max(1, len(chosen))
        return shares

    def tolerated(self, clients: int) -> int:
        """Return f of a number of clients."""
        # Without rounding, 0.1 x 30 would be a little over 3.
        share = math.ceil(round(self.attackers * clients, 9))
        return max(0, min(share, (clients - 3) // 2))

    def chosen(self, distances: np.ndarray) -> np.ndarray:
        """Return the positions of the clients with the lowest scores.

        Args:
            distances: squared distances of all pairs, (n, n).
        """
        clients = len(distances)
        dishonest = self.tolerated(clients)
        nearest = np.sort(distances + np.diag(np.full(clients, np.inf)), axis=1)
        scores = nearest[:, : max(0, clients - dishonest - 2)].sum(1)
        largest = float(scores.max(initial=0.0))
        rounded = np.round(scores / largest, _DIGITS) if largest > 0 else scores
        order = np.argsort(rounded, kind="stable")
        return order[: clients - dishonest]
