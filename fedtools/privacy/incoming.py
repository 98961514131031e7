"""The server's bounds on word counts from clients."""

from __future__ import annotations

from math import sqrt

from fedtools.exchange.values import Values
from fedtools.privacy.options import CLIENT, LAPLACE, USER
from fedtools.privacy.plan import Plan

# Bound on the sum of all clients' counts, in steps of the grid, for it to be exact in float64.
_EXACT = 1 << 52
# Honest noise is refused with probability below exp(-50) per message.
_SELDOM = 50


def bounds_on_counts(plan: Plan | None, words: float, size: int, clients: int) -> Values:
    """Return bounds that the counts of every honest client satisfy.

    Bounds must not depend on the data, and honest clients must never exceed them: otherwise a
    refusal would leak information about the data without noise.

    Args:
        plan: the plan of differential privacy, or None.
        words: the largest sum of a client's weighted counts.
        size: V, the size of the vocabulary.
        clients: the number of clients of the experiment.
    """
    if plan is None or plan.options.mechanism != LAPLACE:
        return Values(least=0.0, total=words)
    total = min(words, _EXACT // clients * plan.grid)
    if plan.options.unit == USER:
        total = min(total, plan.steps * plan.grid)
    if plan.options.trust != CLIENT:
        return Values(least=0.0, total=total, grid=plan.grid)
    # The sum of the noise magnitudes is bounded by a gamma variable of shape V plus one step per
    # word (tail bound: S. Boucheron et al., "Concentration inequalities", 2013, section 2.4).
    noise = plan.scale * (size + sqrt(2 * size * _SELDOM) + _SELDOM) + size * plan.grid
    return Values(least=-noise, most=total + noise, total=total + noise, grid=plan.grid)
