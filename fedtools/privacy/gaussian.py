"""Rounded Gaussian noise from a keyed stream, exact up to a stated total variation distance.

The noise X is deviation * Z, where Z is standard normal, rounded to the nearest whole number of
grid steps. If a sum s of clients' vectors is whole too, s + X is s + deviation * Z, rounded: a
function of the output of the Gaussian mechanism (Dwork et al., "Our data, ourselves", EUROCRYPT
2006). So whatever holds for that mechanism holds here, under any composition. Sums and noise in
floating point have no such proof: their low bits reveal the sum (Mironov, CCS 2012; Jin et al.,
"Are we there yet?", IEEE S&P 2022).

Drawing a value. The sign is a fair bit. The magnitude is the inverse of the tail at a uniform
number U of 191 bits, erfc(|Z| / sqrt(2)) = U, where U is an odd multiple of 2^-192, and so neither
0 nor 1. The first 63 bits give deviation * |Z| in float64, and a bound on its error (`_estimate`).
If no half step is within that error, no further bit can change the rounded value. Otherwise the
other 128 bits are drawn, and U is compared with the tail at half steps to 60 digits (`_decide`). So
the last digits of numpy and scipy are without effect.

Total variation distance of a value's distribution from the exact one:

- If U were continuous, it would be decided otherwise only where one of the 191-bit intervals holds
  the tail at a half step. As |Z| < 16.3, these are fewer than 16.3 * deviation + 2, each of
  probability 2^-191: together below 2^-142 for a deviation of 2^44.
- The tail at a half step is in error by a factor of at most 1 + 2^-190: 60 digits are 203 bits, and
  the error of its argument grows at most by a factor of 16.3^2 + 1. The sum over half steps of
  2^-190 times the tail is below 2^-190 * deviation, or 2^-146.

So the distance is below 2^-141 for each value, and below 2^-111 for an experiment of 2^10 releases
of 2^20 values. It multiplies by 1 + exp(epsilon), and adds to delta; the ledger may neglect it, and
also what no known attack does in fewer than 2^128 steps: tell the stream from random bits.

One assumption is not proven: that the relative error of scipy's `ndtri` is below 2^-48. Its source,
Cephes, states 2^-50.3 as the largest that was found in 70,000 trials.

The time to draw a value depends on the noise, as in `fedtools.privacy.noise`. A share of about
deviation / 2^45 of the values is decided to 60 digits, which takes about 0.1 ms each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from fedtools.privacy.noise import Stream

_CHUNK = 1 << 15  # values drawn at once; changing it would change the noise
_TAIL = 16  # bytes of a uniform number after the first eight
_BITS = 63 + 8 * _TAIL
# Magnitudes remain below 16.3 * 2^44 < 2^49: float64 has at least four bits for what is rounded
# off, and sums with numbers below 2^50 are exact in int64 and in float64.
LEAST_DEVIATION, MOST_DEVIATION = 2.0**-10, 2.0**44


def rounded_gaussian(stream: Stream, deviation: float, size: int) -> np.ndarray:
    """Draw independent Gaussian values, rounded to whole numbers.

    Args:
        stream: source of all randomness; the same stream and deviation give the same values on
            every machine, and of a smaller size the first of them. Another deviation scales the
            same normal values, so each needs a stream of its own.
        deviation: the standard deviation before rounding, in steps of the grid, taken as the exact
            number that the float is; from 2^-10 to 2^44.
        size: number of values.

    Returns:
        (size,), int64, each less than 2^49 in magnitude. The variance is nearly deviation^2 + 1/12.

    Raises:
        ValueError: if the deviation is out of range.
    """
    if not LEAST_DEVIATION <= deviation <= MOST_DEVIATION:
        raise ValueError(f"a deviation of {deviation}")
    values = np.empty(size, np.int64)
    for number, start in enumerate(range(0, size, _CHUNK)):
        part = values[start : start + _CHUNK]
        part[:] = _chunk(stream, number, float(deviation), len(part))
    return values


def most_noise(deviation: float) -> int:
    """Return a bound on the magnitude of what is drawn, also of a discrete Gaussian; 0 for 0."""
    return ceil(16.3 * deviation) + 1 if deviation else 0


def _chunk(stream: Stream, number: int, deviation: float, size: int) -> np.ndarray:
    # Other labels than those of the Laplace noise, and the bits of a value next to one another, so
    # that a smaller size has the same first values.
    words = np.frombuffer(stream.take(b"unif", number, 8 * size), "<u8")
    heads = words >> np.uint64(1)
    found, error = _estimate(heads, deviation)
    nearest = np.rint(found)
    values: np.ndarray = nearest.astype(np.int64)
    doubtful = np.flatnonzero(0.5 - np.abs(found - nearest) <= error)
    raw = stream.take(b"rest", number, _TAIL * len(doubtful))
    tails = (raw[at : at + _TAIL] for at in range(0, len(raw), _TAIL))
    uniform = [
        head << 8 * _TAIL | int.from_bytes(tail, "big")
        for head, tail in zip(heads[doubtful].tolist(), tails, strict=True)
    ]
    values[doubtful] = _decide(uniform, deviation)
    np.negative(values, out=values, where=(words & np.uint64(1)).astype(bool))
    return values


def _estimate(heads: np.ndarray, deviation: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute magnitudes before rounding from the first 63 bits of uniform numbers.

    Args:
        heads: (size,), uint64, below 2^63.
        deviation: see `rounded_gaussian`.

    Returns:
        (size,), float64: magnitudes, in steps; and (size,), float64: bounds on their errors, for
        all values of the other bits.
    """
    from scipy.special import ndtri

    # The middle of the interval of U that begins with these bits, times 2^63.
    middle = heads.astype(np.float64) + 0.5
    found = -deviation * ndtri(middle * 2.0**-64)
    # With Mills' ratio M(z) = Q(z) / phi(z) <= sqrt(pi / 2), |dz / dU| is M / U. Half an interval
    # is 2^-64 wide, and U >= head / 2^63 in it, so z moves by less than 0.63 / head, which is less
    # than 1 / (head + 0.5) except for a head of 0, whose interval has no end. Rounding `middle`
    # moves z by less than 2^-51, and the rest is for the errors of ndtri and of the product.
    error = deviation / middle + 2.0**-47 * (found + deviation)
    error[heads == 0] = np.inf
    return found, error


def _decide(uniform: Sequence[int], deviation: float) -> list[int]:
    """Compute rounded magnitudes from all bits of uniform numbers, to 60 digits.

    Args:
        uniform: whole numbers n below 2^191, where U = (2 n + 1) / 2^192.
        deviation: see `rounded_gaussian`.
    """
    if not uniform:
        return []
    from mpmath import MPContext
    from scipy.special import ndtri

    # A context of its own, since the caller's digits are a global variable.
    context = MPContext()
    context.dps = 60
    per_half = 1 / (context.mpf(deviation) * context.sqrt(8))

    def tail(steps: int) -> Any:
        """Compute the probability of a magnitude above `steps` and a half."""
        return context.erfc((2 * steps + 1) * per_half)

    found = []
    for one in uniform:
        exact = context.ldexp(2 * one + 1, -_BITS - 1)
        # Only where to begin, so its error does not matter.
        steps = round(-deviation * float(ndtri(float(exact) / 2)))
        while exact <= tail(steps):
            steps += 1
        while steps and exact > tail(steps - 1):
            steps -= 1
        found.append(steps)
    return found
