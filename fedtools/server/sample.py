"""Client sampling: a function of the seed and the round only.

Each client draws a 64-bit number, keyed by seed, round and its position in C order. The clients
with the lowest numbers take part ("fixed"), or all clients with numbers below a threshold
("poisson"). With "poisson" clients are sampled independently, which privacy amplification by
subsampling usually assumes; with "fixed" all subsets of the given size are equally likely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ldexp
from typing import Any, Protocol

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.seeds import seed64
from fedtools.exchange.experiment import Experiment


class Drawn(Protocol):
    """The fields of `fedtools.methods.base.Phase` that sampling uses."""

    @property
    def client_update(self) -> Any:
        """Return the client update; None if no client takes part."""

    @property
    def everybody(self) -> bool:
        """Return whether all clients take part."""

    @property
    def sample(self) -> Callable[[Experiment, int], list[str]] | None:
        """Return what draws the clients instead of the seed, if anything does."""


def draw(experiment: Experiment, number: int, phase: Drawn) -> list[str]:
    """Draw the clients of an experiment's round, by (seed, round) or as its phase draws them."""
    options = experiment.options
    if phase.client_update is None:
        return []
    if phase.sample:
        return phase.sample(experiment, number)
    count = options.clients_per_round
    if phase.everybody or count is None:
        return experiment.clients
    return sample_clients(experiment.clients, count, experiment.seed, number, options.sampling)


def sample_clients(
    clients: Sequence[str],
    fraction_or_count: float | int,
    seed: int,
    round: int,
    sampling: str = "fixed",
) -> list[str]:
    """Draw the clients of a round.

    Args:
        clients: all clients of the federation, in C order, without duplicates.
        fraction_or_count: a float in (0, 1] is a share of the clients, rounded to at least one
            client; an int is a number of clients. So 1.0 is all clients, and 1 is one client. With
            "poisson" it is the expected number.
        seed: the seed of the experiment.
        round: the round.
        sampling: "fixed" or "poisson", which may draw no client.

    Returns:
        The clients drawn, in C order.

    Raises:
        UserError: if there is no client, or the share or number cannot be drawn.
    """
    total = len(clients)
    if not total:
        raise UserError("there are no clients to sample from")
    count = _count(fraction_or_count, total)
    drawn = _numbers(seed64(seed, "sample", round), total)
    if sampling == "poisson":
        share = fraction_or_count if isinstance(fraction_or_count, float) else count / total
        chosen = np.flatnonzero(drawn <= np.uint64(min(ldexp(share, 64), 2**64 - 1)))
    else:
        # Ties, which are next to impossible, go to the first clients.
        chosen = np.sort(np.argsort(drawn, kind="stable")[:count])
    return [clients[place] for place in chosen.tolist()]


def _count(fraction_or_count: float | int, total: int) -> int:
    if isinstance(fraction_or_count, float):
        if not 0 < fraction_or_count <= 1:
            raise UserError(
                f"{fraction_or_count} is not a share of the clients",
                remedy="give a share over 0.0 and up to 1.0, or an integer number of clients",
            )
        return max(1, int(fraction_or_count * total + 0.5))
    if isinstance(fraction_or_count, bool) or not 1 <= fraction_or_count <= total:
        raise UserError(
            f"{fraction_or_count} clients cannot be drawn from {total}",
            remedy=f"give a number from 1 to {total}, or a share such as 0.1",
        )
    return fraction_or_count


def _numbers(key: int, total: int) -> np.ndarray:
    """Return the first `total` numbers of the generator SplitMix64, uint64 (total,).

    G. Steele, D. Lea, C. Flood: Fast splittable pseudorandom number generators, OOPSLA 2014. It
    uses integer arithmetic only and so is the same everywhere; numpy's own streams may change.
    """
    values = np.arange(1, total + 1, dtype=np.uint64)
    values *= np.uint64(0x9E3779B97F4A7C15)
    values += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values
