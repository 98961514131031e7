"""Attack A1: are two personalised models of one speaker? By the distance of their footprints.

Tomashenko et al. (ICASSP 2022), section 3.2.1, equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedtools.attack.footprint_files import Prints
from fedtools.attack.options import A1
from fedtools.attack.verify import Model, decide
from fedtools.files.sections import Bootstrap


def distances(vectors: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """||a - b|| / (||a|| ||b||) for all pairs: the distance of a / ||a||^2 and b / ||b||^2.

    Args:
        vectors: (N, D).
        others: (M, D); by default the same vectors.

    Returns:
        (N, M), float64; infinite where one vector of a pair is zero.
    """
    others = vectors if others is None else others
    (one, short), (two, thin) = (
        _directions(np.asarray(rows, np.float64)) for rows in (vectors, others)
    )
    # The middle of all is taken away: what is left is as far apart, and rounds less.
    middle = one.mean(0)
    one, two = one - middle, two - middle
    angles = (one**2).sum(1)[:, None] + (two**2).sum(1) - 2 * one @ two.T
    with np.errstate(invalid="ignore"):
        # Lengths and directions apart: a model that hardly moved must not cost others their digits.
        squares = (short[:, None] - thin) ** 2 + short[:, None] * thin * np.maximum(angles, 0)
    return np.sqrt(np.where(np.isfinite(squares), squares, np.inf))


def rho(
    footprints: np.ndarray, others: np.ndarray | None = None, alpha: tuple[float, float] = A1.alpha
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


def _directions(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of length 1, 0 for those of length 0, and 1 / their lengths before."""
    lengths = np.linalg.norm(vectors, axis=1)
    with np.errstate(divide="ignore"):
        return vectors / np.where(lengths, lengths, 1)[:, None], 1 / lengths


def attack(
    prints: Prints,
    models: Mapping[str, Model],
    out: Path,
    options: A1 = A1(),
    *,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[Mapping[str, object]]:
    """Decide all trials by the distance of footprints, layer by layer; write OUT/a1.tsv.

    Both parts of a footprint, means alone and deviations alone (figures 4 and 5), on trials of any
    two speakers, and where sex is known on strict ones.

    Args:
        prints: as `read_footprints` gives them.
        models: those with a speaker; see `fedtools.attack.verify`.
        out: gets also trials.<kind>, and a score for each in a1.<layer>.<kind>.
        seed: see `make_trials`.
        resamples: of intervals.
    """
    ways = {"both": options.alpha, "means": (1.0, 0.0), "deviations": (0.0, 1.0)}
    # A distance: the nearer, the more alike.
    matrices = (
        (layer, way, -rho(values, alpha=weights))
        for layer, values in prints.layers.items()
        for way, weights in ways.items()
    )
    chosen = {"others": options.others, "resamples": resamples, "seed": seed}
    return decide(out, "a1", models, prints.models, matrices, "both", **chosen)
