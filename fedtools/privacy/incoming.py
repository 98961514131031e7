"""What a client's counts of words may be, as a server takes them."""

from __future__ import annotations

from math import sqrt

from fedtools.files.values import Values
from fedtools.privacy.options import CLIENT, LAPLACE, USER
from fedtools.privacy.plan import Plan

# Sums of all clients' counts, in steps of the grid, are exact in float64.
_EXACT = 1 << 52
# The logarithm of how seldom noise is refused: once in e^50 messages.
_SELDOM = 50


def bounds_on_counts(plan: Plan | None, words: float, size: int, clients: int) -> Values:
    """The bounds on counts that an honest client sends.

    They must not depend on the data, and an honest client must never be beyond them: else who is
    refused would tell of the data what no noise is on.

    Args:
        plan: of differential privacy, or None.
        words: the largest sum of a client's weighted counts.
        size: V, of the vocabulary.
        clients: of the experiment.
    """
    if plan is None or plan.options.mechanism != LAPLACE:
        return Values(least=0.0, total=words)
    total = min(words, _EXACT // clients * plan.grid)
    if plan.options.unit == USER:
        total = min(total, plan.steps * plan.grid)
    if plan.options.trust != CLIENT:
        return Values(least=0.0, total=total, grid=plan.grid)
    # The sum of the noise's magnitudes is at most a gamma variable's, of shape V, and a step more
    # for each word (S. Boucheron et al., "Concentration inequalities", 2013, section 2.4).
    noise = plan.scale * (size + sqrt(2 * size * _SELDOM) + _SELDOM) + size * plan.grid
    return Values(least=-noise, most=total + noise, total=total + noise, grid=plan.grid)
