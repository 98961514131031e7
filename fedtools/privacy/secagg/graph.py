"""Who shares masks with whom: a k-regular graph that every client recomputes.

J. H. Bell, K. A. Bonawitz, A. Gascon, T. Lepoint, M. Raykova: Secure single-server aggregation with
(poly)logarithmic overhead, CCS 2020, section 3. Clients stand on a ring in a random order, and each
is a neighbour of the k / 2 before it and the k / 2 behind it (a Harary graph). With k of the order
of log n instead of n, a client computes k masks, and not n - 1.

There the server draws the order. Here it follows from a hash of what is fixed before the first
message, such as the public keys of the clients' roster, so that nobody who takes part can choose
its neighbours: the keys that clients make for an attempt have no influence on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Graph:
    """The neighbours of n clients, which are numbered from 0.

    Attributes:
        neighbours: of each client, the numbers of its neighbours, ascending; i is in the row of j
            exactly if j is in the row of i.
    """

    neighbours: tuple[tuple[int, ...], ...]


def harary(seed: bytes, names: Sequence[str], degree: int) -> Graph:
    """Place clients on a ring, and connect each to the nearest.

    Args:
        seed: a hash of everything that the order depends on.
        names: n different names.
        degree: k, the number of neighbours, even; or n - 1 or more: all are neighbours of all.

    Raises:
        ValueError: if a smaller degree is odd or below 2.
    """
    clients = len(names)
    if degree >= clients - 1:
        everybody = range(clients)
        return Graph(tuple(tuple(j for j in everybody if j != i) for i in everybody))
    if degree < 2 or degree % 2:
        raise ValueError(f"a degree of {degree}")
    ring = _order(seed, names)
    steps = [step for step in range(-(degree // 2), degree // 2 + 1) if step]
    found: list[tuple[int, ...]] = [()] * clients
    for place, client in enumerate(ring):
        found[client] = tuple(sorted(ring[(place + step) % clients] for step in steps))
    return Graph(tuple(found))


def _order(seed: bytes, names: Sequence[str]) -> list[int]:
    """Return the clients' numbers in the order of keyed hashes of their names."""
    # 256 bits never tie, so that all orders are equally likely.
    hashes = [hashlib.sha256(b"ring" + seed + name.encode()).digest() for name in names]
    return sorted(range(len(names)), key=hashes.__getitem__)
