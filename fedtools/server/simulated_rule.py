"""A server's rule on a few changes in memory, as an attacker simulates it who knows the rule.

An attacker does not know what the server keeps to itself: the honest changes among those that it
simulates stand for it. Their median norm is the bound of a clip, and their mean the change of the
server's own data.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedtools.server.robust.base import Part, Rule


def simulated(rule: Rule) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return a function from changes (n, D), the last `crafted` of them an attacker's, to (D,)."""

    def aggregate(changes: np.ndarray, crafted: int) -> np.ndarray:
        if rule.needs == "values":
            return rule.centre(np.ascontiguousarray(changes.T))
        count, honest = len(changes), changes[: len(changes) - crafted]
        inner, root = changes @ changes.T, honest.mean(0)
        part = Part(
            weights=np.full(count, 1 / count),
            squares=inner.diagonal().copy(),
            inner=inner,
            along=changes @ root,
            root=float(root @ root),
            bound=float(np.median(np.linalg.norm(honest, axis=1))),
        )
        found: np.ndarray = rule.shares(part) @ changes
        return found

    return aggregate
