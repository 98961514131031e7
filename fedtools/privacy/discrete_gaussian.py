"""Discrete Gaussian noise from a keyed stream, exact up to a stated total variation distance.

P(X = k) is proportional to exp(-k^2 / (2 sigma^2)) over all whole numbers k (C. Canonne, G. Kamath,
T. Steinke: The discrete Gaussian for differential privacy, NeurIPS 2020, definition 1). Clients of
a secure sum each add such noise to a vector of whole numbers: a sum of discrete Gaussians is nearly
one again (`fedtools.privacy.distributed`), and that proof does not hold for rounded Gaussians.

Drawing a value. Propose k from the rounded Gaussian (`fedtools.privacy.gaussian`), whose
probability is the integral of the normal density from k - 1/2 to k + 1/2. With the density taken
out at k, and u and -u taken together,

    P_rounded(k) = phi(k / sigma) / sigma * g(k),
    g(k) = E exp(-u^2 / (2 sigma^2)) cosh(c u),   c = k / sigma^2,   u uniform in [-1/2, 1/2],

so that k accepted with probability g(0) / g(k), which is at most 1, has the discrete Gaussian
distribution; a rejected one is drawn anew. Acceptance has probability g(0) altogether (but for a
factor of 1 + 2^-255), at least 0.995. With the series of cosh, g(k) = q_0 + N(c^2), where

    N(y) = sum over j >= 1 of q_j y^j,   q_j = E exp(-u^2 / (2 sigma^2)) u^(2j) / (2j)!,

so k is rejected with probability r(k) = N / (q_0 + N), in which nothing cancels. As the weight
exp(-u^2 / (2 sigma^2)) falls with |u| and cosh grows, g(k) / g(0) <= E cosh(c u) = sinh(c/2) /
(c/2) <= exp(c^2 / 24), so r(k) <= c^2 / 24.

Deciding a rejection. A uniform number U of 192 bits is below r(k), or not. Its first 64 bits are
drawn for each value, and compared with c^2 / 24, which accepts nearly all. For the others r(k) is
computed in float64, with a relative error below 2^-45: c^2 has at most 5 roundings, which move r by
at most 1.4 times as much; a polynomial of 20 terms with positive coefficients has at most 42, and
the quotient 3 more; terms that are left out are below 2^-110 of N, as |c| / 2 < 2.8 (a rounded
Gaussian is below 16.3 sigma + 1 in magnitude, and sigma is at least 3). It uses no function of a
library but +, * and /, which are the same on every machine. If the first 64 bits with any others
are on one side of r(k) in spite of that error, they decide. Otherwise the other 128 bits are drawn,
U is taken as the middle of its interval of 2^-192, and r(k) is computed to 60 digits (`_decide`).

Total variation distance of a value's distribution from the exact one:

- A proposal's is below 2^-142 + 2^-146, as the module of the rounded Gaussian says.
- A decision is another than with a continuous U with a probability of at most 2^-192, and 2^-194
  for the error of r(k): 60 digits are 203 bits, of which rounding takes less than eight.
- With P and P' the exact and the real distribution of proposals, a(k) the probability of
  acceptance, and A = sum P a, the distributions of accepted values are P a / A and P' a / A'. Half
  the sum of their differences is at most (||P a - P' a|| + |A - A'|) / (2 A), where the norm is
  twice the distance of the proposals at most, and |A - A'| once: together 1.5 / A of it. The error
  of decisions counts likewise, with 2 / A.

So the distance is below 1.51 (2^-142 + 2^-146) + 2^-190, or 2^-141, for each value, as for the
rounded Gaussian; what it means for delta is said there. The stream counts as random, and the
assumption on scipy's `ndtri` is that of the rounded Gaussian.

The time to draw a value depends on the noise, as in `fedtools.privacy.gaussian`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fedtools.privacy.gaussian import MOST_DEVIATION, rounded_gaussian
from fedtools.privacy.noise import Stream

__all__ = ["LEAST_DEVIATION", "MOST_DEVIATION", "discrete_gaussian"]

# Below it, the bounds on errors of this module do not hold.
LEAST_DEVIATION = 3.0
_CHUNK = 1 << 15  # values decided at once; changing it would change the noise
_TAIL = 16  # bytes of a uniform number after the first eight
_BITS = 64 + 8 * _TAIL
# Of the relative error of r(k) in float64, and of the rounding of 64 bits to 53.
_ERROR = 2.0**-44
# Terms of N in float64, and to 60 digits; the sums of the others are below 2^-110 and 2^-290 of it.
_TERMS, _MORE_TERMS = 20, 40


def discrete_gaussian(stream: Stream, deviation: float, size: int) -> np.ndarray:
    """Draw independent discrete Gaussian values.

    Args:
        stream: source of all randomness; the same stream and deviation give the same values on
            every machine, and of a smaller size the first of them. Another deviation scales nearly
            the same normal values, so each needs a stream of its own.
        deviation: sigma, taken as the exact number that the float is; from 3 to 2^44. The variance
            is sigma^2, but for a part of 2^-240 or less.
        size: number of values.

    Returns:
        (size,), int64, each less than 2^49 in magnitude.

    Raises:
        ValueError: if the deviation is out of range.
    """
    if not LEAST_DEVIATION <= deviation <= MOST_DEVIATION:
        raise ValueError(f"a deviation of {deviation}")
    values, kept = _propose(stream, 0, float(deviation), size)
    left, turn = np.flatnonzero(~kept), 1
    # Those left of a smaller size are the first of these, in every turn, and get the same values.
    while len(left):
        values[left], kept = _propose(stream, turn, float(deviation), len(left))
        left, turn = left[~kept], turn + 1
    return values


def _propose(
    stream: Stream, turn: int, deviation: float, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw proposals of a turn, from a stream of its own.

    Returns:
        (size,), int64: rounded Gaussian values; and (size,), bool: whether each is accepted.
    """
    own = Stream(stream.take(b"disc", turn, 32))
    values = rounded_gaussian(own, deviation, size)
    kept = np.empty(size, bool)
    for number, start in enumerate(range(0, size, _CHUNK)):
        ones = slice(start, start + _CHUNK)
        kept[ones] = _accept(own, number, deviation, values[ones])
    return values, kept


def _accept(stream: Stream, number: int, deviation: float, values: np.ndarray) -> np.ndarray:
    """Decide which proposals are accepted.

    Args:
        stream, number: source of a uniform number for each of them.
        deviation: see `discrete_gaussian`.
        values: (size,), int64.

    Returns:
        (size,), bool.
    """
    heads = np.frombuffer(stream.take(b"keep", number, 8 * len(values)), "<u8")
    lows = heads.astype(np.float64) * 2.0**-64
    squares = np.square(values / deviation / deviation)
    # The probability is at most c^2 / 24; the rest is for rounding.
    near = np.flatnonzero(lows < squares * ((1 + 2.0**-40) / 24))
    chances = _chances(squares[near], deviation)
    rejected = (heads[near].astype(np.float64) + 1) * 2.0**-64 <= chances * (1 - _ERROR)
    doubtful = np.flatnonzero(~rejected & (lows[near] < chances * (1 + _ERROR)))
    raw = stream.take(b"last", number, _TAIL * len(doubtful))
    tails = (raw[at : at + _TAIL] for at in range(0, len(raw), _TAIL))
    uniform = [
        head << 8 * _TAIL | int.from_bytes(tail, "big")
        for head, tail in zip(heads[near[doubtful]].tolist(), tails, strict=True)
    ]
    rejected[doubtful] = _decide(uniform, values[near[doubtful]].tolist(), deviation)
    kept = np.ones(len(values), bool)
    kept[near[rejected]] = False
    return kept


def _chances(squares: np.ndarray, deviation: float) -> np.ndarray:
    """Compute probabilities of rejection r in float64, with a relative error below 2^-45.

    Args:
        squares: (size,), float64: c^2, with five roundings at most.
        deviation: see `discrete_gaussian`.
    """
    first, *others = (float(one) for one in _coefficients(deviation)[: _TERMS + 1])
    found: np.ndarray = _chance(squares, first, others)
    return found


def _decide(uniform: Sequence[int], values: Sequence[int], deviation: float) -> list[bool]:
    """Decide from all bits of uniform numbers whether proposals are rejected, to 60 digits.

    Args:
        uniform: whole numbers n below 2^192, where U = (2 n + 1) / 2^193.
        values: the proposals.
        deviation: see `discrete_gaussian`.
    """
    if not uniform:
        return []
    context = _context()
    first, *others = _coefficients(deviation)
    variance = context.mpf(deviation) ** 2
    found = []
    for one, value in zip(uniform, values, strict=True):
        chance = _chance((value / variance) ** 2, first, others)
        found.append(bool(context.ldexp(2 * one + 1, -_BITS - 1) < chance))
    return found


def _chance(square: Any, first: Any, others: Sequence[Any]) -> Any:
    """Compute r = N(c^2) / (q_0 + N(c^2)).

    Args:
        square: c^2, in the numbers to compute with.
        first, others: q_0, and q_1, q_2, ...
    """
    total = others[-1]
    for one in reversed(others[:-1]):
        total = total * square + one
    grown = total * square
    return grown / (first + grown)


@lru_cache(maxsize=8)
def _coefficients(deviation: float) -> tuple[Any, ...]:
    """Compute q_0, q_1, ... to 60 digits.

    q_j (2j)! is the sum over i of (-1 / (2 sigma^2))^i / i! times the moment of u of order 2 (i +
    j), 1 / ((2 (i + j) + 1) 4^(i + j)). Its terms fall by a factor of at least 72 from one to the
    next, so next to nothing cancels.
    """
    context = _context()
    rate = -1 / (2 * context.mpf(deviation) ** 2)
    found = []
    for j in range(_MORE_TERMS + 1):
        total, factor = context.mpf(0), context.mpf(1)
        for i in range(40):
            total += factor / ((2 * (i + j) + 1) * 4 ** (i + j))
            factor = factor * rate / (i + 1)
        found.append(total / context.factorial(2 * j))
    return tuple(found)


def _context() -> Any:
    """Return a context of 60 digits of its own, since the caller's digits are a global variable."""
    from mpmath import MPContext

    context = MPContext()
    context.dps = 60
    return context
