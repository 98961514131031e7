"""Epsilon of noise that clients add to their own vectors, before a secure sum.

In each round every client adds discrete Gaussian noise, with a standard deviation of s steps, to a
vector of d whole numbers with an L2 norm of at most Delta steps, and a secure sum reveals the sum
alone (P. Kairouz, Z. Liu, T. Steinke: The distributed discrete Gaussian mechanism for federated
learning with secure aggregation, ICML 2021). At least m of the clients whose vectors are in the sum
are honest: they add their noise, and tell it to nobody. The client that is protected is one of
them. What others add, noise included, is a function of what they know, and protects no less.

Two federations are adjacent if they differ in one client, whose vectors are all zero in one of them
(zero-out); it adds noise in both. So a sum differs by a whole vector x with |x| <= Delta. Who takes
part is public, and depends on no client's data; there is no amplification by sampling. A sum modulo
a public number is a function of the sum. What clients send may depend on all earlier sums.

One sum. Let W be a discrete Gaussian of variance m s^2 in each coordinate. For whole numbers x, the
Renyi divergence of order alpha between x + W and W is at most alpha x^2 / (2 m s^2) in a
coordinate, and at most the sum of these over all coordinates (C. Canonne, G. Kamath, T. Steinke:
The discrete Gaussian for differential privacy, NeurIPS 2020, theorem 4). The noise S of a sum is
not W, but near:

- If X and Y are discrete Gaussians of variances a and b, P(X + Y = z) is exp(-z^2 / (2 (a + b)))
  times a sum of exp(-(x - a z / (a + b))^2 / (2 v)) over all whole x, with v = ab / (a + b). By
  Poisson's formula that sum is between 1 - r and 1 + r times a constant, r = 2 sum_{k >= 1} exp(-2
  pi^2 v k^2). So the logarithm of the ratio of P(X + Y = z) and the probability of z under a
  discrete Gaussian of variance a + b is at most log((1 + r) / (1 - r)) in magnitude, which for v >=
  1 is below 5 exp(-2 pi^2 v).
- A sum with another share is a function of the sum before and of that share, so that the bound on
  the sum before holds on, and that of the new share is added. With k shares before, v is
  s^2 k / (k + 1). Thus in each coordinate |log P(S = z) / P(W = z)| <= tau / 2, where tau =
  10 sum_{k < m} exp(-2 pi^2 s^2 k / (k + 1)), k from 1, as in theorem 1 of Kairouz, Liu and
  Steinke. As k / (k + 1) >= 1/2, tau is at most 10 (m - 1) exp(-pi^2 s^2), which is used here.

Concentrated differential privacy (M. Bun, T. Steinke: Concentrated differential privacy, TCC 2016):
the Renyi divergence of order alpha is at most alpha rho. Distributions whose log ratio is at most t
have rho = t^2 / 2, and sqrt(rho) adds up along a chain of distributions (their triangle-like
inequality, by which privacy of groups follows, with the best order in between). In a coordinate,
x_i + S, x_i + W, W, S is such a chain, and sqrt(2 rho) of its links are tau / 2, |x_i| / (sqrt(m)
s), tau / 2. By Minkowski's inequality the sum over all coordinates is at most

    rho = epsilon^2 / 2,    epsilon = Delta / (sqrt(m) s) + tau sqrt(d).

This is the second of the two bounds of theorem 1 of Kairouz, Liu and Steinke. The first,
sqrt(Delta^2 / (m s^2) + tau d / 2), is not used, since what is written here does not prove it for
orders near 1; nor is one with the L1 norm of x, epsilon^2 = Delta^2 / (m s^2) + 2 tau |x|_1 /
(sqrt(m) s) + tau^2 d, where |x|_1 <= min(sqrt(d), Delta) Delta for whole numbers (their proposition
14). It makes no difference: shares are at least 3 steps, so that tau is below (m - 1) 2^-124, and
the sum of the shares as good as one discrete Gaussian.

All sums. Rho adds up over rounds and experiments on the same clients, also if later ones depend on
the results of earlier ones (Bun and Steinke). It gives epsilon at a delta by corollary 13 of
Canonne, Kamath and Steinke. For epsilons from 1 to 30, that is 4 to 15 % more than a Gaussian of
the same variance has (`fedtools.privacy.accountant`), as the conversion is not exact.

A person may be k clients: their vectors together have a norm of up to k Delta. The distance between
drawn and exact noise (`fedtools.privacy.discrete_gaussian`) is neglected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, isfinite, log, log1p, pi, sqrt

from fedtools.core.errors import UserError
from fedtools.privacy.discrete_gaussian import LEAST_DEVIATION, MOST_DEVIATION


@dataclass(frozen=True)
class Distributed:
    """The sums of an experiment, with noise of the clients' own.

    Attributes:
        share_deviation: s, the standard deviation of the noise that a client adds to each value,
            in steps; from 3 to 2^44.
        least: m, the least number of honest clients whose vectors are in a sum, with the one that
            is protected.
        norm: Delta, the largest L2 norm of a client's vector before noise, in steps.
        values: d, the number of values of a vector.
        rounds: the number of sums.
    """

    share_deviation: float
    least: int
    norm: float
    values: int
    rounds: int

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            ValueError: if one is out of range.
        """
        if not LEAST_DEVIATION <= self.share_deviation <= MOST_DEVIATION:
            raise ValueError(f"a share with a deviation of {self.share_deviation}")
        if self.least < 1 or self.values < 1 or self.rounds < 1:
            raise ValueError(f"{self.least} clients, {self.values} values, {self.rounds} rounds")
        if not (isfinite(self.norm) and self.norm > 0):
            raise ValueError(f"a norm of {self.norm}")

    @property
    def rho(self) -> float:
        """Return rho of concentrated differential privacy, of all rounds together."""
        moved = self.norm / (sqrt(self.least) * self.share_deviation)
        apart = bound_on_tau(self.share_deviation, self.least) * sqrt(self.values)
        return self.rounds * (moved + apart) ** 2 / 2


def bound_on_tau(share_deviation: float, least: int) -> float:
    """Compute a bound on tau, twice the largest log ratio of a sum of shares and one Gaussian.

    Args:
        share_deviation: standard deviation of each share, at least sqrt(2).
        least: the number of shares.
    """
    return 10 * (least - 1) * exp(-((pi * share_deviation) ** 2))


def epsilon_of_rho(rho: float, delta: float) -> float:
    """Compute the epsilon that concentrated differential privacy gives.

    For each order alpha > 1, epsilon = alpha rho + log(1 - 1 / alpha) - log(alpha delta) / (alpha -
    1) (Canonne, Kamath and Steinke, corollary 13, solved for epsilon). Its derivative by alpha is
    rho + log(alpha delta) / (alpha - 1)^2, so it is least where rho (alpha - 1)^2 + log(alpha) =
    log(1 / delta). The left side grows, so there is one such order; as any order is a bound, its
    error does not matter.

    Args:
        rho: the sum of all experiments' on the same clients; finite, not negative.
        delta: above 0 and below 1.

    Returns:
        Epsilon.

    Raises:
        ValueError: if a value is out of range.
    """
    if not (isfinite(rho) and rho >= 0):
        raise ValueError(f"a rho of {rho}")
    if not 0 < delta < 1:
        raise ValueError(f"a delta of {delta}")
    if not rho:
        return 0.0
    tail = -log(delta)
    # With alpha - 1 for log(alpha) the left side is more, and without log(alpha) less.
    ends = 2 * tail / (1 + sqrt(1 + 4 * rho * tail)), sqrt(tail) / sqrt(rho)
    _, more = _boundary(lambda more: rho * more * more + log1p(more) >= tail, *ends)
    found = (1 + more) * rho - log1p(1 / more) + (tail - log1p(more)) / more
    return max(found, 0.0)


def rho_for(epsilon: float, delta: float) -> float:
    """Compute the largest rho with which `epsilon_of_rho` is at most epsilon.

    Args:
        epsilon: above 0, finite.
        delta: above 0 and below 1.

    Raises:
        ValueError: if a value is out of range.
    """
    if not (isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"an epsilon of {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"a delta of {delta}")
    tail = -log(delta)
    # Where rho + 2 sqrt(rho log(1 / delta)), a weaker bound (Bun and Steinke, 2016), is epsilon.
    low = (epsilon / (sqrt(tail + epsilon) + sqrt(tail))) ** 2
    high = 2 * low
    while epsilon_of_rho(high, delta) <= epsilon:
        low, high = high, 2 * high
    return _boundary(lambda rho: epsilon_of_rho(rho, delta) > epsilon, low, high)[0]


def share_for(
    epsilon: float, delta: float, rounds: int, norm: float, least: int, values: int
) -> float:
    """Compute the smallest standard deviation of a client's share that keeps epsilon.

    Args:
        epsilon: of all rounds together, above 0.
        delta: above 0 and below 1.
        rounds, norm, least, values: see `Distributed`.

    Returns:
        The standard deviation, in steps; 3 if less were enough.

    Raises:
        UserError: if more noise is needed than can be drawn.
        ValueError: if a value is out of range.
    """
    allowed = rho_for(epsilon, delta)

    def enough(share: float) -> bool:
        return Distributed(share, least, norm, values, rounds).rho <= allowed

    if enough(LEAST_DEVIATION):
        return LEAST_DEVIATION
    if not enough(MOST_DEVIATION):
        problem = f"epsilon {epsilon:g} at delta {delta:g} needs more noise than can be drawn"
        remedy = "allow a larger epsilon, fewer rounds, or a smaller norm"
        raise UserError(problem, remedy=remedy)
    return _boundary(enough, LEAST_DEVIATION, MOST_DEVIATION)[1]


def _boundary(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Halve an interval of numbers above 0, in their logarithms, while rounding allows.

    Args:
        holds: what is true at the upper end, and false at the lower.

    Returns:
        Both ends.
    """
    while low < (middle := sqrt(low) * sqrt(high)) < high:
        if holds(middle):
            high = middle
        else:
            low = middle
    return low, high
