"""The server's rules as an attacker simulates them, on a few changes in memory.

A rule takes changes (n, D), of which the last `crafted` are the attackers', and returns the
aggregate (D,). An attacker knows the rule, and not what the server keeps to itself: bounds and the
root set are estimated from the honest changes among these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

# (changes (n, D), how many of the last are crafted) -> the aggregate (D,).
Rule = Callable[[np.ndarray, int], np.ndarray]

# Steps and smoothing of Weiszfeld's algorithm.
_STEPS, _SMOOTHING = 10, 1e-6


def mean(changes: np.ndarray, crafted: int) -> np.ndarray:
    """Return the mean."""
    return np.asarray(changes.mean(0))


def clip(changes: np.ndarray, crafted: int) -> np.ndarray:
    """Return the mean of changes clipped to the median norm of the honest ones."""
    norms = np.linalg.norm(changes, axis=1)
    bound = np.median(norms[: len(norms) - crafted])
    factors = np.minimum(1.0, bound / np.maximum(norms, np.finfo(float).tiny))
    return np.asarray(factors @ changes / len(changes))


def median(changes: np.ndarray, crafted: int) -> np.ndarray:
    """Return the median of each value.

    D. Yin, Y. Chen, K. Ramchandran, P. Bartlett: Byzantine-robust distributed learning, ICML 2018.
    """
    return np.asarray(np.median(changes, axis=0))


def multi_krum(changes: np.ndarray, crafted: int) -> np.ndarray:
    """Return the mean of the n - f changes nearest to their n - f - 2 neighbours; f is `crafted`.

    P. Blanchard, E. El Mhamdi, R. Guerraoui, J. Stainer: Machine learning with adversaries, NeurIPS
    2017.
    """
    count = len(changes)
    squares = np.square(changes).sum(1)
    apart = squares[:, None] + squares - 2 * changes @ changes.T
    np.fill_diagonal(apart, np.inf)
    near = max(1, count - crafted - 2)
    scores = np.sort(apart, axis=1)[:, :near].sum(1)
    chosen = np.sort(np.argsort(scores, kind="stable")[: count - crafted])
    return np.asarray(changes[chosen].mean(0))


def geometric_median(changes: np.ndarray, crafted: int) -> np.ndarray:
    """Return the geometric median, by ten steps of the smoothed Weiszfeld algorithm.

    K. Pillutla, S. Kakade, Z. Harchaoui: Robust aggregation for federated learning, IEEE TSP 2022.
    """
    found = changes.mean(0)
    for _ in range(_STEPS):
        weights = 1 / np.maximum(np.linalg.norm(changes - found, axis=1), _SMOOTHING)
        found = weights @ changes / weights.sum()
    return np.asarray(found)


def fltrust(changes: np.ndarray, crafted: int) -> np.ndarray:
    """Return the mean by positive cosines to a root change, which is the mean of the honest ones.

    X. Cao, M. Fang, J. Liu, N. Gong: FLTrust, NDSS 2021. All changes get the root's norm.
    """
    root = changes[: len(changes) - crafted].mean(0)
    norms = np.maximum(np.linalg.norm(changes, axis=1), np.finfo(float).tiny)
    length = np.linalg.norm(root)
    trust = np.maximum(0.0, changes @ root / (norms * max(float(length), np.finfo(float).tiny)))
    if not trust.sum():
        return np.zeros_like(root)
    return np.asarray((trust / norms * length) @ changes / trust.sum())


RULES: Mapping[str, Rule] = {
    "mean": mean,
    "clip": clip,
    "median": median,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
    "fltrust": fltrust,
}
