"""Who takes part in a round, and which job trains whom."""

from __future__ import annotations

from collections.abc import Sequence

from fedtools.files.datadir import byte_order
from fedtools.files.errors import UserError
from fedtools.files.keyed import seed64


def sample_clients(
    clients: Sequence[str], fraction_or_count: float | int, seed: int, round: int
) -> list[str]:
    """Draw the clients of a round, without replacement, every subset equally likely.

    Each client draws a number keyed by (seed, round, client), and the lowest are taken: the sample
    is a function of these alone, whatever the order of the list, the jobs and the earlier rounds.

    Args:
        clients: every client of the federation, in any order.
        fraction_or_count: a float in (0, 1] is a share of the clients, rounded, at least one
            client; an int is a number of clients. So 1.0 is everybody, and 1 is one client.
        seed: the seed of the experiment.
        round: the round.

    Returns:
        The clients drawn, in C order.

    Raises:
        UserError: if there is no client, one comes twice, or the share or number cannot be drawn.
    """
    total = len(clients)
    if not total:
        raise UserError("there is no client to sample from")
    if len(set(clients)) < total:
        twice = next(client for client in byte_order(clients) if list(clients).count(client) > 1)
        raise UserError(f"client {twice!r} comes twice", remedy="list every client once")
    if isinstance(fraction_or_count, float):
        if not 0 < fraction_or_count <= 1:
            raise UserError(
                f"{fraction_or_count} is no share of the clients",
                remedy="give a share over 0.0 and up to 1.0, or a whole number of clients",
            )
        count = max(1, int(fraction_or_count * total + 0.5))
    else:
        count = fraction_or_count
        if isinstance(count, bool) or not 1 <= count <= total:
            raise UserError(
                f"{count} clients cannot be drawn from {total}",
                remedy=f"give a number from 1 to {total}, or a share such as 0.1",
            )
    # Hashes, not numpy's generator, whose streams may change between its releases.
    drawn = sorted(clients, key=lambda client: (seed64(seed, "sample", round, client), client))
    return byte_order(drawn[:count])
