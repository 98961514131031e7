"""Correlated noise for clients that take turns: banded matrix factorisation.

C. A. Choquette-Choo et al.: (Amplified) banded matrix factorization: a unified approach to private
training, NeurIPS 2023; K. Pillutla et al.: Correlated noise mechanisms for differentially private
learning, 2025. Clients are in m cohorts, one of which takes part in each round, so that a client's
turns are m rounds apart. With x_t the sum of a round's changes, and the coefficients c_0, ...,
c_(b-1) of b bands, at most m, the mechanism is Gaussian noise on

    y_t = c_0 x_t + c_1 x_(t-1) + ... + c_(b-1) x_(t-b+1)

A client is in the sums of at most k = ceil(T / m) rounds, and what these add to y are parts of
(y_1, ..., y_T) that do not overlap, as b is at most m. So its data move all y together by at most
sqrt(k) |c| C, where |c| is the norm of the coefficients: T rounds are one Gaussian mechanism. The
estimates

    e_t = (y_t - c_1 e_(t-1) - ... - c_(b-1) e_(t-b+1)) / c_0

are post-processing, and so are their sums, which are what a model has learnt by round t. Their
noise partly cancels: the coefficients minimise the mean squared error of all these sums. One band
is independent noise.

The coefficients are multiples of 2^-10, so that all 2^10 y_t are whole numbers, and the noise can
be a rounded Gaussian, as for sums of all clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# The denominator of all coefficients.
UNIT = 1 << 10


def carried(coefficients: np.ndarray, rounds: int) -> np.ndarray:
    """Return how much of a round's noise is in the sum of the estimates 0, 1, ... rounds later.

    These are the coefficients of 1 / ((1 - x) c(x)).

    Args:
        coefficients: c, (b,).
        rounds: T.

    Returns:
        (T,).
    """
    from scipy.signal import lfilter

    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    found: np.ndarray = np.cumsum(lfilter([1.0], coefficients, impulse))
    return found


def error_of(coefficients: np.ndarray, rounds: int) -> float:
    """Return the mean squared error of the sums of estimates, for noise of the coefficients' norm.

    Args:
        coefficients: c, (b,), of any scale.
        rounds: T.
    """
    later = np.square(carried(coefficients, rounds))
    # The noise of round s is in the sums of rounds s, ..., T.
    total = later @ np.arange(rounds, 0, -1)
    return float(np.square(coefficients).sum() * total / rounds)


def make_coefficients(bands: int, rounds: int) -> list[int]:
    """Return coefficients that minimise `error_of`, as whole numbers of 2^-10.

    Args:
        bands: b, from 1 to T.
        rounds: T.

    Returns:
        b whole numbers, the first of which is 2^10.
    """
    from scipy.optimize import minimize

    if not 1 <= bands <= rounds:
        raise ValueError(f"{bands} bands of {rounds} rounds")
    # 1 / sqrt(1 - x), the square root of the matrix of sums, is near the best for many bands.
    start = np.cumprod([1.0, *((2 * at - 1) / (2 * at) for at in range(1, bands))])

    def error(others: np.ndarray) -> float:
        return math.log(error_of(np.array([1.0, *others]), rounds))

    best = minimize(error, start[1:], method="L-BFGS-B").x if bands > 1 else np.zeros(0)
    return [UNIT, *np.rint(UNIT * best).astype(int).tolist()]


def norm_of(coefficients: Sequence[int]) -> float:
    """Return |c|, the norm of coefficients in units of 2^-10."""
    return math.sqrt(sum(one * one for one in coefficients)) / UNIT


def mixed(coefficients: Sequence[int], sums: np.ndarray) -> np.ndarray:
    """Return 2^10 y_t, int64 (values,).

    Args:
        coefficients: c, in units of 2^-10.
        sums: int64 (b, values): x_t, x_(t-1), ...; zeros for rounds before the first.
    """
    found: np.ndarray = np.tensordot(np.array(coefficients, np.int64), sums, 1)
    return found


def estimate(
    coefficients: Sequence[int], released: np.ndarray, estimates: np.ndarray
) -> np.ndarray:
    """Return e_t, float64 (values,), in steps.

    Args:
        coefficients: c, in units of 2^-10.
        released: int64 (values,): 2^10 y_t with its noise.
        estimates: float64 (b - 1, values): e_(t-1), e_(t-2), ...
    """
    first, *others = coefficients
    found: np.ndarray = (released - np.tensordot(np.array(others, float), estimates, 1)) / first
    return found
