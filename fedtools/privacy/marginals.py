"""Distributions over words from noisy counts, and the paper's mechanism as published."""

from __future__ import annotations

from fractions import Fraction
from math import frexp, ldexp

import numpy as np

from fedtools.privacy.key import NoiseKey
from fedtools.privacy.noise import discrete_laplace

PAPER_WARNING = (
    "the differential privacy of equations 8 and 9 of the paper is weaker than claimed: "
    "a larger epsilon protects less, not more; every round releases all counts again, so epsilons "
    "add up; noise is scaled to one count of one word, while an utterance has many words and a "
    "user many utterances; weights over an N-best list multiply the count of a word; the noisy sum "
    "in the denominator may be zero or negative; and clients send q_i and c_i without any noise. "
    "Use the mechanism laplace"
)


def project(counts: np.ndarray) -> np.ndarray:
    """Return the nearest nonnegative vector in L2 with the same sum, or zeros if that is negative.

    Merely clipping negative counts would keep the positive half of the noise of all words that were
    never said. (T. Wang et al., "Locally differentially private frequency estimation with
    consistency", NDSS 2020: "Norm-Sub".)

    Args:
        counts: (size,).
    """
    total = counts.sum()
    if total <= 0:
        return np.zeros_like(counts)
    falling = np.sort(counts)[::-1]
    # The amount to subtract from all counts if only the k largest stay positive, for each k.
    excess = (np.cumsum(falling) - total) / np.arange(1, len(counts) + 1)
    last = np.flatnonzero(falling > excess)[-1]
    nearest: np.ndarray = np.maximum(counts - excess[last], 0)
    return nearest


def paper_release(
    marginals: np.ndarray,
    totals: np.ndarray,
    epsilon: float,
    key: NoiseKey,
    *,
    experiment: str,
    number: int,
    draw: int = 1,
) -> np.ndarray:
    """Release a marginal by equations 8 and 9 as published; callers must print `PAPER_WARNING`.

    Noise is discrete Laplace of scale 1 / epsilon, on a grid of 2^-30 of the scale.

    Args:
        marginals: (clients, size), q_i of equation 4, after smoothing.
        totals: (clients,), c_i of equation 5, not negative.
        epsilon: epsilon of equation 9, above 0.
        key, experiment, number, draw: see `Plan.release`.

    Returns:
        (size,): adds up to 1, but is not finite if the noisy sum is 0; values may be negative, and
        all signs are reversed if the noisy sum is negative. A caller that needs a distribution has
        to correct it, which the paper does not do: see `mend`.
    """
    if not (np.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon is {epsilon:g}; it must be a finite number above 0")
    weighted = totals @ marginals
    grid = ldexp(1.0, frexp(1 / epsilon)[1] - 30)
    scale = 1 / Fraction(epsilon) / Fraction(grid)
    inputs = np.concatenate([weighted, totals]).astype("<f8").tobytes()
    stream = key.stream("paper", experiment, number, draw, repr(epsilon), inputs)
    noise = discrete_laplace(stream, scale, len(weighted)) * grid
    with np.errstate(divide="ignore", invalid="ignore"):
        released: np.ndarray = (weighted + noise) / (totals.sum() + noise.sum())
    return released


def mend(marginal: np.ndarray, background: np.ndarray) -> np.ndarray:
    """Turn the output of `paper_release` into a distribution.

    Negative values, and noise on symbols that are not words, become 0, and the rest is normalised.
    This is the least change to the paper's mechanism that lets the method continue. If nothing
    finite is left, the background is returned.

    Args:
        marginal: (size,).
        background: (size,), u(w); 0 for symbols that are not words.
    """
    kept = np.maximum(np.where(np.isfinite(marginal) & (background > 0), marginal, 0), 0)
    return kept / kept.sum() if kept.sum() > 0 else background
