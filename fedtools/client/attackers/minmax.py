"""Min-max: as far in a direction as the attackers' own honest changes lie apart.

V. Shejwalkar, A. Houmansadr: Manipulating the Byzantine: optimizing model poisoning attacks and
defenses for federated learning, NDSS 2021: the min-max attack, for attackers who know no rule and
no other client's change:

    largest gamma with  max_i |mean + gamma p - u_i| <= max_ij |u_i - u_j|

where u_i are the attackers' own honest changes and p is the direction.
"""

from __future__ import annotations

import numpy as np

from fedtools.client.attackers.options import Direction

# Halvings of the interval of gamma, down to the precision of float64.
_HALVINGS = 60


def direction_of(honest: np.ndarray, name: Direction) -> np.ndarray:
    """Return a direction p that lowers accuracy, (D,), from honest changes (m, D)."""
    mean = honest.mean(0)
    if name == "std":
        return np.asarray(-honest.std(0))
    if name == "sign":
        return np.asarray(-np.sign(mean))
    return np.asarray(-mean / (np.linalg.norm(mean) or 1.0))


def largest_gamma(honest: np.ndarray, direction: np.ndarray) -> float:
    """Return min-max's gamma by bisection; 0 if there is no direction.

    Args:
        honest: the attackers' own changes, (m, D).
        direction: p, (D,).
    """
    mean, length = honest.mean(0), float(direction @ direction)
    if not length:
        return 0.0
    # |mean + gamma p - u|^2 = |mean - u|^2 + 2 gamma (mean - u) p + gamma^2 |p|^2
    apart = mean - honest
    own, along = np.square(apart).sum(1), apart @ direction
    most = max(float(np.square(honest - one).sum(1).max()) for one in honest)

    def fits(gamma: float) -> bool:
        return float((own + 2 * gamma * along + gamma**2 * length).max()) <= most

    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def minmax(honest: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """Return what all attackers send: the mean plus gamma p, (m, D)."""
    crafted = honest.mean(0) + largest_gamma(honest, direction) * direction
    return np.tile(crafted, (len(honest), 1))
