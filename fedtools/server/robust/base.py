"""Interface of a robust rule: what it needs to know of the updates, and what it makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedtools.exchange.messages import LEFT_OUT

# The rule without robustness, which needs no rule.
MEAN = "mean"


@dataclass(frozen=True)
class Part:
    """The updates of a round in one part of the model, for n clients.

    An update is what a client has changed: its tensors minus those that the server sent, and for
    adapters its product B A minus the server's. BatchNorm statistics are a part of their own.

    Attributes:
        weights: the clients' weights in the mean, (n,), which sum to 1.
        squares: squared norms of the updates, (n,).
        inner: inner products of all pairs of updates, (n, n), if the rule `needs` "pairs".
        along: inner products with the update of the server's own data, (n,), if there is one.
        root: the squared norm of that update.
        bound: what the rule has recorded in an earlier round, if anything.
        statistics: whether it is the part of BatchNorm statistics.
    """

    weights: np.ndarray
    squares: np.ndarray
    inner: np.ndarray | None = None
    along: np.ndarray | None = None
    root: float | None = None
    bound: float | None = None
    statistics: bool = False

    @property
    def norms(self) -> np.ndarray:
        """Return the norms of the updates, (n,)."""
        norms: np.ndarray = np.sqrt(self.squares)
        return norms

    @property
    def distances(self) -> np.ndarray:
        """Return the squared distances of all pairs of updates, (n, n)."""
        assert self.inner is not None, "the rule needs no pairs"
        apart = self.squares[:, None] + self.squares[None, :] - 2 * self.inner
        # Equal updates are apart by rounding alone, which may have any sign.
        distances: np.ndarray = np.maximum(apart, 0.0)
        return distances


@dataclass(frozen=True)
class Rule:
    """A robust rule; its fields are its options.

    Attributes:
        needs: "norms" of the updates; inner products of "pairs" of them; or "values", the clients'
            values of one coordinate at a time, from which `centre` computes the next state.
        uses_weights: whether clients' weights in the mean count.
        is_mean: whether a client's weight is its share in a mean of what is left of its update.
        records: whether it may `record` anything.
    """

    needs: ClassVar[Literal["norms", "pairs", "values"]] = "norms"
    uses_weights: ClassVar[bool] = False
    is_mean: ClassVar[bool] = False
    records: ClassVar[bool] = False

    def root_in(self, number: int) -> bool:
        """Return whether the server trains on data of its own in round `number`."""
        return False

    def shares(self, part: Part) -> np.ndarray:
        """Return how much of each update is added to the state that was sent, (n,).

        None of them is negative; for statistics they sum to at most 1, so that variances stay
        positive.
        """
        raise NotImplementedError

    def centre(self, values: np.ndarray) -> np.ndarray:
        """Compute the next state's values, (coordinates,), from the clients', (coordinates, n)."""
        raise NotImplementedError

    def statuses(self, part: Part, shares: np.ndarray) -> list[str]:
        """Return what the ledger says of each client; "" if there is nothing to say."""
        none = (shares == 0) & (part.weights > 0) & (not part.statistics)
        return [LEFT_OUT if left else "" for left in none.tolist()]

    def record(self, part: Part) -> float | None:
        """Return a number that stays fixed from this round on; None to ask again in the next."""
        return None
