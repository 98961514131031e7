"""Adaptive: attackers who know the server's rule, and simulate it on what they know.

V. Shejwalkar, A. Houmansadr: Manipulating the Byzantine, NDSS 2021, tailor a change to a
rule: of mean + gamma p, the one that moves the aggregate most. Attackers do not know
the honest clients' changes, so that their own honest changes stand for these: m of them, and so
many copies of the crafted change that its share is that of the attackers in the round.

    k     <- max(1, round(m^2 / (n - m)))              m attackers among n clients of the round
    A(g)  <- rule(u_1 ... u_m, k times mean + g p)
    gamma <- the g of a grid for which A(g) lies furthest in the direction p, or nearest to what the
             attackers aim at, if this is a model; the least of equals

The grid is geometric, half an octave apart, from 1/16 to 32 times min-max's gamma, and has 0. With
one attacker, whose changes do not lie apart, it is around the length of the change over that of p.

Whatever its rule, the server refuses changes that are many times as long as the median one
(`Method.max_norm_ratio`). Attackers know only their own lengths, and keep to half of that ratio.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedtools.client.attackers.minmax import largest_gamma

# The server's, simulated: changes (n, D), how many of the last are crafted -> the aggregate (D,).
Rule = Callable[[np.ndarray, int], np.ndarray]
_OCTAVES = (-4, 5)
# Of the ratio at which the server refuses a change.
_MARGIN = 0.5


def copies_of(attackers: int, clients: int) -> int:
    """Return k: the copies whose share, with the attackers' own changes, is that of a round."""
    others = clients - attackers
    return max(1, int(attackers**2 / others + 0.5)) if others else attackers


def best_gamma(
    honest: np.ndarray,
    direction: np.ndarray,
    rule: Rule,
    copies: int,
    ratio: float = 0.0,
    aim: np.ndarray | None = None,
) -> float:
    """Return the gamma of the grid that moves the simulated aggregate best.

    Args:
        honest: the attackers' own changes, (m, D).
        direction: p, (D,).
        rule: the server's.
        copies: k.
        ratio: the largest of a change's norm to the median norm; 0 for any.
        aim: the change that the aggregate should be, (D,); None for as far along p as it gets.
    """
    length, mean = np.linalg.norm(direction), honest.mean(0)
    if not length:
        return 0.0
    unit = largest_gamma(honest, direction) or float(np.linalg.norm(mean) / length)
    first, last = _OCTAVES
    grid = [0.0, *(unit * 2 ** (half / 2) for half in range(2 * first, 2 * last + 1))]
    norms, gains = np.linalg.norm(honest, axis=1), []
    for gamma in grid:
        crafted = np.tile(mean + gamma * direction, (copies, 1))
        own = np.linalg.norm(crafted, axis=1)
        if ratio and own[0] > _MARGIN * ratio * np.median([*norms, *own]):
            # It may be refused, and then moves nothing.
            gains.append(-np.inf)
            continue
        found = rule(np.concatenate([honest, crafted]), copies)
        gains.append(float(found @ direction if aim is None else -np.linalg.norm(found - aim)))
    return grid[int(np.argmax(gains))]


def adaptive(
    honest: np.ndarray,
    direction: np.ndarray,
    rule: Rule,
    clients: int,
    ratio: float,
    aim: np.ndarray | None = None,
) -> np.ndarray:
    """Return what all attackers of a round of `clients` send, (m, D); arguments as above."""
    gamma = best_gamma(honest, direction, rule, copies_of(len(honest), clients), ratio, aim)
    return np.tile(honest.mean(0) + gamma * direction, (len(honest), 1))
