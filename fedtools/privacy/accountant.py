"""Epsilon of Gaussian noise on sums of clients' vectors, for a client with all that it sends.

In each round the vectors of the clients that take part, each with an L2 norm of at most C, are
added up, and the sum is released with Gaussian noise of standard deviation z C; z is the noise
multiplier. Two federations are adjacent if they differ in one client, whose vectors are all zero in
one of them (zero-out). The number of clients, that of rounds, the share of clients and what the sum
is divided by are public. What clients send may depend on all earlier releases. Epsilon and delta
are those of all releases together.

- Everybody takes part (share 1). A client moves a release by at most C, and T rounds are one
  Gaussian mechanism with mu = sqrt(T) / z. Experiments on the same clients are one with mu^2 =
  mu_1^2 + mu_2^2 + ... (Dong, Roth and Su, Gaussian differential privacy, arXiv:1905.02383,
  corollary 3.3). Its delta is exact (Balle and Wang, Improving the Gaussian mechanism, ICML 2018,
  theorem 8): delta = Phi(mu/2 - epsilon/mu) - exp(epsilon) Phi(-mu/2 - epsilon/mu).
- A secret sample. Each client tosses a coin of its own in each round, and takes part with
  probability `share` (Poisson sampling). A client with zeros is as good as absent, so that this is
  the subsampled Gaussian mechanism under adding or removing one, in the worse direction. Google's
  dp-accounting convolves distributions of the privacy loss, on a grid that bounds epsilon from
  above (Doroshenko et al., Connect the dots, PoPETs 2022). It holds neither for samples of a fixed
  size, nor for a reader who knows the sample, as whoever receives the messages does.

A person may be k clients. If everybody takes part, such a person moves a release by up to k C. In a
sample, a binomial number of the k clients take part, which is a mixture of Gaussians; its bound is
attained (Ganesh, Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians
mechanisms, arXiv:2401.10294, theorem 3.1), and less than that for groups in any mechanism (Vadhan,
The complexity of differential privacy, 2017, lemma 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from importlib.metadata import version
from math import comb, exp, expm1, floor, isfinite, log1p, log2, log10, sqrt
from typing import Any

from fedtools.core.errors import INSTALL_PRIVACY, UserError

# Larger noise multipliers are not searched.
_MOST_NOISE = 1e6
# They have five digits, of which there are so many between two powers of ten.
_DIGITS, _DECADE = 5, 90_000
# The grid of privacy losses has an interval of this part of a round's root mean square loss, which
# raises epsilon by less than 1e-4 of itself, and no more than 0.01; but it has no more than some
# tens of thousands of points for a round, and a million for all, where losses are in the hundreds.
_FINE, _COARSE = 0.02, 0.01
_ROUND_POINTS, _ALL_POINTS = 3e4, 1e6
# Below it, rounding errors of the convolution decide.
LEAST_DELTA = 1e-12


@dataclass(frozen=True)
class Gaussian:
    """The releases of an experiment: Gaussian noise on sums of clients' vectors.

    Attributes:
        noise: the noise multiplier z: the standard deviation of the noise, in units of the largest
            norm C of a client's vector.
        rounds: the number of releases.
        share: the probability with which a client takes part in a round, in secret and independent
            of all other clients and rounds; 1: all clients take part in all rounds.
        clients: the number of clients that are one person, who is to be protected.
        discrete: whether the noise is a sum of discrete Gaussians, see
            `fedtools.privacy.distributed`; z then is what has its rho, 1 / (2 z^2) a round.
    """

    noise: float
    rounds: int
    share: float = 1.0
    clients: int = 1
    discrete: bool = False

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            ValueError: if one is out of range.
        """
        if not (isfinite(self.noise) and self.noise > 0):
            raise ValueError(f"a noise multiplier of {self.noise}")
        if self.rounds < 1 or self.clients < 1:
            raise ValueError(f"{self.rounds} rounds, {self.clients} clients")
        if not 0 < self.share <= 1:
            raise ValueError(f"a share of {self.share}")

    @property
    def mu(self) -> float:
        """Return mu = clients sqrt(rounds) / noise, that of all rounds if everybody takes part."""
        return self.clients * sqrt(self.rounds) / self.noise


def epsilon_of(mechanisms: Sequence[Gaussian], delta: float) -> float:
    """Compute the epsilon of all releases of experiments on the same clients.

    Args:
        mechanisms: the experiments. One that was run several times, with other seeds or options,
            is listed as often.
        delta: above 0 and below 1; if a share is below 1, at least 1e-12.

    Returns:
        Epsilon. With discrete noise it is a bound. Otherwise, if all shares are 1, it is exact. If
        not, it is too large by 1e-4 of itself or less, and by up to 1 % with shares below 0.001; it
        may be wrong by 1 % with a delta below 1e-10.

    Raises:
        UserError: if a share is below 1 and dp-accounting is missing.
        ValueError: if delta is out of range.
    """
    _check_delta(delta, mechanisms)
    if any(one.discrete for one in mechanisms):
        from fedtools.privacy.distributed import epsilon_of_rho

        # A Gaussian has that rho, too, also with a sample, of which this takes no account.
        return epsilon_of_rho(_joint_mu(mechanisms) ** 2 / 2, delta)
    closed = _epsilon_of_mu(_joint_mu(mechanisms), delta)
    if _all_take_part(mechanisms):
        return closed
    # What a sample reveals, all clients together reveal.
    try:
        return _epsilon_of_losses(_composed(mechanisms), delta, closed)
    except OverflowError:
        # Losses of next to no noise, which dp-accounting cannot represent.
        return closed


def delta_of(mechanisms: Sequence[Gaussian], epsilon: float) -> float:
    """Compute the delta of all releases of experiments on the same clients.

    Args:
        mechanisms: see `epsilon_of`.
        epsilon: finite, not negative.

    Returns:
        Delta. If a share is below 1, it is a bound, and 1e-12 stands for all that is less.

    Raises:
        UserError: if a share is below 1 and dp-accounting is missing.
        ValueError: if epsilon is out of range.
    """
    if not (isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"an epsilon of {epsilon}")
    mu = _joint_mu(mechanisms)
    closed = _delta_at(mu, epsilon / mu - mu / 2) if mu else 0.0
    if _all_take_part(mechanisms):
        return closed
    try:
        found = float(_composed(mechanisms).get_delta_for_epsilon(epsilon))
    except OverflowError:
        return closed
    return max(min(found, closed), LEAST_DELTA)


def noise_for(
    epsilon: float,
    delta: float,
    rounds: int,
    share: float = 1.0,
    already: Sequence[Gaussian] = (),
) -> float:
    """Compute the smallest noise multiplier of five digits that keeps epsilon.

    Args:
        epsilon: the epsilon of the new experiment and those before it, together; above 0.
        delta: see `epsilon_of`.
        rounds, share: of the new experiment, see `Gaussian`; the person is one client of it.
        already: experiments on the same clients before it.

    Returns:
        The noise multiplier z, with which `epsilon_of` is at most epsilon.

    Raises:
        UserError: if earlier experiments leave too little, or if a share is below 1 and
            dp-accounting is missing.
        ValueError: if a value is out of range.
    """
    if not (isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"an epsilon of {epsilon}")

    def excess(noise: float) -> float:
        found = epsilon_of([*already, Gaussian(noise, rounds, share)], delta)
        # A logarithm, which is nearly linear in that of the noise.
        return log1p(max((found - epsilon) / epsilon, -1 + 1e-9))

    def fail() -> UserError:
        left = max(epsilon - spent, 0)
        problem = (
            f"experiments on these clients have spent epsilon {spent:.6g} of {epsilon:g} at delta "
            f"{delta:g}; what is left, {left:.3g}, is too little for {rounds} rounds"
        )
        return UserError(problem, remedy="allow a larger epsilon in total, or take other clients")

    spent = epsilon_of(already, delta)
    if spent >= epsilon:
        raise fail()
    found = _least(excess, _first_guess(epsilon, delta, Gaussian(1, rounds, share), already))
    if found is None:
        raise fail()
    return found


def accountant_of(mechanisms: Sequence[Gaussian]) -> str:
    """Return what computes their epsilon, with its version, for a record.

    Raises:
        UserError: if a share is below 1 and dp-accounting is missing.
    """
    if any(one.discrete for one in mechanisms):
        return "zCDP of the distributed discrete Gaussian (Kairouz et al., 2021)"
    if _all_take_part(mechanisms):
        return "closed form of Gaussian noise (Balle and Wang, 2018)"
    import_dp_accounting()
    return f"privacy loss distributions, dp-accounting {version('dp-accounting')}"


def import_dp_accounting() -> Any:
    """Return the package dp_accounting; raise a `UserError` that says what to install without."""
    try:
        import dp_accounting
    except ImportError:
        problem = "differential privacy with a secret sample of clients needs dp-accounting"
        raise UserError(problem, remedy=INSTALL_PRIVACY) from None
    return dp_accounting


def _check_delta(delta: float, mechanisms: Sequence[Gaussian]) -> None:
    least = 0.0 if _all_take_part(mechanisms) else LEAST_DELTA
    if not (0 < delta < 1 and delta >= least):
        raise ValueError(f"a delta of {delta}; the least is {least}")


def _all_take_part(mechanisms: Sequence[Gaussian]) -> bool:
    return all(one.share == 1 for one in mechanisms)


def _joint_mu(mechanisms: Sequence[Gaussian]) -> float:
    return sqrt(sum(one.mu**2 for one in mechanisms))


def _delta_at(mu: float, x: float) -> float:
    """Compute delta at epsilon = mu (x + mu/2).

    The density phi of the normal distribution has exp(epsilon) phi(x + mu) = phi(x), so that delta
    = Phi(-x) - exp(epsilon) Phi(-x - mu) = phi(x) (m(x) - m(x + mu)), where m = Phi(-x) / phi(x) is
    Mills' ratio, sqrt(pi/2) erfcx(x / sqrt(2)): no large epsilon is ever exponentiated.
    """
    from scipy.special import erfcx, ndtr

    density, further = exp(-x * x / 2) / 2, erfcx((x + mu) / sqrt(2))
    # Mills' ratio overflows far below 0, where Phi is near 1.
    if x < 0:
        return float(ndtr(-x) - density * further)
    return float(density * (erfcx(x / sqrt(2)) - further))


def _epsilon_of_mu(mu: float, delta: float) -> float:
    """Compute the epsilon of a Gaussian mechanism."""
    from scipy.optimize import brentq
    from scipy.special import ndtri

    if not mu or _delta_at(mu, -mu / 2) <= delta:
        return 0.0
    # The first term alone is delta at the upper end; a little further it is less in any rounding.
    ends = -mu / 2, 1e-6 - ndtri(delta)
    x = brentq(lambda x: _delta_at(mu, x) - delta, *ends, xtol=1e-15, maxiter=1000)
    return float(mu * (x + mu / 2))


def _epsilon_of_losses(losses: Any, delta: float, most: float) -> float:
    """Compute epsilon from dp-accounting's distribution of the privacy loss.

    Args:
        losses: the distribution.
        most: an epsilon that is known to suffice.
    """
    import numpy as np
    from scipy.optimize import brentq

    # Above 700, it divides by exp(-loss), which is 0 or nearly so.
    with np.errstate(over="ignore", divide="ignore"):
        found = float(losses.get_epsilon_for_delta(delta))
    if found < 700 or losses.get_delta_for_epsilon(most) >= delta:
        return min(found, most)
    return float(brentq(lambda epsilon: losses.get_delta_for_epsilon(epsilon) - delta, 0, most))


def _composed(mechanisms: Sequence[Gaussian]) -> Any:
    """Return dp-accounting's distribution of the privacy loss of all releases."""
    sampled = [one for one in mechanisms if one.share < 1]
    mu = _joint_mu([one for one in mechanisms if one.share == 1])
    # As one Gaussian release.
    joint = [Gaussian(1 / mu, 1)] if mu else []
    parts = [*joint, *sampled]
    interval = _interval(parts)
    first, *others = (_distribution(one, interval) for one in parts)
    return reduce(lambda before, next_: before.compose(next_), others, first)


# Those of earlier experiments are needed for each multiplier that `noise_for` tries.
@lru_cache(maxsize=8)
def _distribution(one: Gaussian, interval: float) -> Any:
    """Return dp-accounting's distribution of the privacy loss of an experiment's rounds.

    Its default is adding or removing one, in the worse direction.
    """
    made = import_dp_accounting().pld.privacy_loss_distribution
    grid = {"value_discretization_interval": interval}
    if one.share == 1 or one.clients == 1:
        sampled = {"sensitivity": one.clients, "sampling_prob": one.share}
        single = made.from_gaussian_mechanism(one.noise, **sampled, **grid)
    else:
        numbers = range(one.clients + 1)
        chances = [_binomial(one, number) for number in numbers]
        single = made.from_mixture_gaussian_mechanism(one.noise, numbers, chances, **grid)
    return single.self_compose(one.rounds)


def _binomial(one: Gaussian, number: int) -> float:
    """Return the probability that so many of a person's clients are in a sample."""
    absent = (1 - one.share) ** (one.clients - number)
    return float(comb(one.clients, number) * one.share**number * absent)


def _loss(one: Gaussian) -> float:
    """Return about the root mean square of the privacy loss of a round of a sample.

    It is the root of the chi-square divergence from the noise alone; several clients of a person
    have more.
    """
    return one.clients * one.share * sqrt(expm1(min(one.noise**-2, 700)))


def _interval(mechanisms: Sequence[Gaussian]) -> float:
    """Return the interval of the grid of privacy losses, a power of two."""
    rounds = sum(one.rounds for one in mechanisms)
    squared = sum(one.rounds * _loss(one) ** 2 for one in mechanisms)
    # Losses of a round, and of all, that are hardly ever exceeded.
    largest, total = 0.0, 0.0
    for one in mechanisms:
        many, noise = one.clients, one.noise
        taken = many * (many + 16 * noise) / (2 * noise**2)
        sampled = one.share * expm1(taken) if taken < 500 else 0.0
        largest = max(largest, log1p(sampled) if sampled else taken)
        spread = sqrt(one.rounds) * _loss(one)
        total += min(one.rounds * one.share * taken, spread**2 / 2 + 12 * spread)
    fine = min(_FINE * sqrt(squared / rounds), _COARSE)
    # It hardly ever changes while `noise_for` tries multipliers.
    return 2.0 ** floor(log2(max(fine, largest / _ROUND_POINTS, total / _ALL_POINTS)))


def _first_guess(epsilon: float, delta: float, new: Gaussian, already: Sequence[Gaussian]) -> float:
    """Return about the noise multiplier of the new experiment; its own is ignored.

    Many rounds of a sample are nearly one Gaussian mechanism, with mu = share
    sqrt(rounds (exp(1 / noise^2) - 1)) (Bu et al., Deep learning with Gaussian differential
    privacy, 2020).
    """
    from scipy.special import ndtri

    # Where the first term of delta alone is delta.
    tail = -float(ndtri(delta))
    room = (sqrt(tail**2 + 2 * epsilon) - tail) ** 2
    gone = sum(one.mu**2 if one.share == 1 else one.rounds * _loss(one) ** 2 for one in already)
    each = max(room - gone, room / 100) / new.rounds
    return 1 / sqrt(each if new.share == 1 else log1p(each / new.share**2))


def _least(excess: Callable[[float], float], guess: float) -> float | None:
    """Return the least number of five digits for which a falling function is not above 0, or None.

    It is bracketed, and then found by the Illinois method, with bisections where that is slow.

    Args:
        excess: the function, of a number above 0; about as steep as the number's logarithm.
        guess: about the number.
    """
    low = high = _place(guess)
    above = below = excess(_number(low))
    step = abs(above) + 1e-3
    while below > 0:
        low, above = high, below
        high, step = _place(_number(high) * exp(step)), 2 * step
        if _number(high) > _MOST_NOISE:
            return None
        below = excess(_number(high))
    while above <= 0:
        high, below = low, above
        low, step = _place(_number(low) * exp(-step)), 2 * step
        above = excess(_number(low))
    tries, side = 0, 0
    while high - low > 1:
        tries += 1
        share = above / (above - below) if tries % 4 else 0.5
        between = _number(low) * (_number(high) / _number(low)) ** share
        middle = min(max(_place(between), low + 1), high - 1)
        found = excess(_number(middle))
        # An end that has stayed twice is pulled towards 0.
        if found > 0:
            low, above, below, side = middle, found, below / (2 if side > 0 else 1), 1
        else:
            high, below, above, side = middle, found, above / (2 if side < 0 else 1), -1
    return _number(high)


def _place(number: float) -> int:
    """Return the place of a number among those of five digits, in order."""
    exponent = floor(log10(number)) - _DIGITS + 1
    return exponent * _DECADE + round(number / 10.0**exponent) - _DECADE // 9


def _number(place: int) -> float:
    """Return the number of five digits at a place, the inverse of `_place`."""
    exponent, digits = divmod(place, _DECADE)
    return float(f"{_DECADE // 9 + digits}e{exponent}")
