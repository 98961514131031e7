"""Distributions over words from noisy counts, and the release of the paper as it is written."""

from __future__ import annotations

from fractions import Fraction
from math import frexp, ldexp

import numpy as np

from fedtools.privacy.key import NoiseKey
from fedtools.privacy.noise import discrete_laplace

PAPER_WARNING = (
    "differential privacy as equations 8 and 9 of the paper have it protects less than it says: "
    "a larger epsilon protects less, not more; every round releases all counts again, and epsilons "
    "add up; noise is for one count of one word, while an utterance has many words and a user many "
    "utterances; weights over an N-best list multiply what a word counts; the noisy sum that it "
    "divides by may be zero or negative; and clients send q_i and c_i without any noise. "
    "Use the mechanism laplace"
)


def project(counts: np.ndarray) -> np.ndarray:
    """The nearest vector, in L2, that is not negative and has the same sum; 0 if that is below 0.

    With 0 for each negative count alone, half of the noise of all words that nobody said would be
    counts. (T. Wang et al., "Locally differentially private frequency estimation with consistency",
    NDSS 2020: "Norm-Sub".)

    Args:
        counts: (size,).
    """
    total = counts.sum()
    if total <= 0:
        return np.zeros_like(counts)
    falling = np.sort(counts)[::-1]
    # The number to subtract, if the first k are all that stays positive.
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
    """Equations 8 and 9, as they are written; warn users by `PAPER_WARNING`.

    Noise is discrete Laplace on a grid of a 2^-30 of its scale, 1 / epsilon.

    Args:
        marginals: (clients, size), q_i of equation 4, after smoothing.
        totals: (clients,), c_i of equation 5, not negative.
        epsilon: of equation 9, above 0.
        key, experiment, number, draw: as of `Plan.release`.

    Returns:
        (size,): adds up to 1, unless the noisy sum is 0 and it is not finite; may be negative
        anywhere, and is the wrong way round if the noisy sum is negative. A caller that needs a
        distribution has to mend it, which the paper does not: see `mend`.
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
    """What `paper_release` gives, as a distribution, so that the method can go on.

    Negative values become 0, as does noise on what is no word, and the rest is normalised; nothing
    else can be done without leaving the paper. Where nothing finite is left, the background.

    Args:
        marginal: (size,).
        background: (size,), u(w); 0 for what is no word.
    """
    kept = np.maximum(np.where(np.isfinite(marginal) & (background > 0), marginal, 0), 0)
    return kept / kept.sum() if kept.sum() > 0 else background
