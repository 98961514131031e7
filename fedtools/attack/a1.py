"""Attack A1: are two personalised models of one speaker? By the distance of their footprints.

Tomashenko et al. (ICASSP 2022), section 3.2.1, equation 4.
"""

from __future__ import annotations

import numpy as np

# Weights of means and standard deviations, section 4.3.1.
ALPHA = (1.0, 10.0)


def distances(vectors: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """||a - b|| / (||a|| ||b||) for all pairs: the distance of a / ||a||^2 and b / ||b||^2.

    Args:
        vectors: (N, D).
        others: (M, D); by default the same vectors.

    Returns:
        (N, M), float64; infinite where one vector of a pair is zero.
    """
    others = vectors if others is None else others
    one, two = (_inverted(np.asarray(rows, np.float64)) for rows in (vectors, others))
    # The middle of all is taken away: what is left is as far apart, and rounds less.
    middle = np.where(np.isfinite(one).all(1)[:, None], one, 0).mean(0)
    one, two = one - middle, two - middle
    with np.errstate(invalid="ignore"):
        squares = (one**2).sum(1)[:, None] + (two**2).sum(1) - 2 * one @ two.T
    squares = np.where(np.isfinite(squares), squares, np.inf)
    return np.sqrt(np.maximum(squares, 0))


def rho(
    footprints: np.ndarray, others: np.ndarray | None = None, alpha: tuple[float, float] = ALPHA
) -> np.ndarray:
    """Equation 4 for all pairs of models. It is a distance: small where speakers seem the same.

    Args:
        footprints: (N, 2, D), mean and standard deviation of each model.
        others: (M, 2, D); by default the same models.
        alpha: weights of the distance of means and of that of deviations.

    Returns:
        (N, M).
    """
    others = footprints if others is None else others
    total = np.zeros((len(footprints), len(others)))
    for row, weight in enumerate(alpha):
        if weight:
            total += weight * distances(footprints[:, row], others[:, row])
    return total


def _inverted(vectors: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return vectors / (vectors**2).sum(1, keepdims=True)
