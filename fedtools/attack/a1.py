"""Attack A1: are two personalised models of one speaker? By the distance of their footprints.

Tomashenko et al. (ICASSP 2022), section 3.2.1, equation 4: "the L2-normalised Euclidean distance"
of means and of deviations. The equation divides the distance of two vectors by the product of their
lengths, so that a model that moved further seems nearer to all others; the words may as well mean
the distance of vectors of unit length. Both are here, and the scores that speaker verification
would take: cosines, centred on models of other people and normed by their scores with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedtools.attack.cohort import blocks, normed, score_pairs
from fedtools.attack.footprint_files import Prints
from fedtools.attack.knowledge import ANY
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
    cohort: Mapping[str, Model] | None = None,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[Mapping[str, object]]:
    """Decide all trials by the distance of footprints, layer by layer; write OUT/a1.tsv.

    Both parts of a footprint, means alone and deviations alone (figures 4 and 5), on each kind of
    trials; by each of the scores that are asked for.

    Args:
        prints: as `read_footprints` gives them, those of the cohort too.
        models: those with a speaker; see `fedtools.attack.verify`.
        out: gets also trials.<kind>, and a score for each in a1.<layer>.<kind>; of unit vectors in
            a1-unit.<layer>.<kind>, with a cohort in a1-cohort.<layer>.<kind>.
        cohort: models of other people, by which scores are centred and normed; by default those of
            `models` that are of neither speaker of a trial, see `fedtools.attack.cohort`.
        resamples: of intervals.
        seed: see `make_trials`.
    """
    matrices = (
        (ANY, layer, way if score == "literal" else f"{way}, {score}", matrix)
        for layer, values in prints.layers.items()
        for score in options.scores
        for way, matrix in _scores(score, values, prints, models, cohort or {}, options, seed)
    )
    files = {"both": "a1", "both, unit": "a1-unit", "both, cohort": "a1-cohort"}
    chosen = {"others": options.others, "resamples": resamples, "seed": seed}
    return decide(out, "a1", models, prints.models, matrices, files, **chosen)


def _scores(
    score: str,
    values: np.ndarray,
    prints: Prints,
    models: Mapping[str, Model],
    cohort: Mapping[str, Model],
    options: A1,
    seed: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """Scores of all pairs of models in one layer, large where two are alike, by their name."""
    if score == "cohort":
        means, deviations = (
            normed_cosines(values[:, row], prints.models, models, cohort, seed) for row in (0, 1)
        )
        yield from (("both", means + deviations), ("means", means), ("deviations", deviations))
        return
    ways = {"both": options.alpha, "means": (1.0, 0.0), "deviations": (0.0, 1.0)}
    rows = unit(values) if score == "unit" else values
    for way, weights in ways.items():
        # A distance: the nearer, the more alike.
        yield way, -rho(rows, alpha=weights)


def unit(footprints: np.ndarray) -> np.ndarray:
    """Footprints, (models, 2, D), whose means and deviations have the length 1, or 0 as before.

    Equation 4 of these is the distance of the vectors themselves, since it divides by 1.
    """
    rows = np.asarray(footprints, np.float64).reshape(-1, footprints.shape[-1])
    return _directions(rows)[0].reshape(footprints.shape)


def normed_cosines(
    vectors: np.ndarray,
    names: Sequence[str],
    models: Mapping[str, Model],
    cohort: Mapping[str, Model],
    seed: int,
) -> np.ndarray:
    """Cosines of all pairs of models, centred on a cohort and s-normed by it.

    Args:
        vectors: (models, D).
        names: of the models; those of no known speaker have no scores.
        models, cohort: as of `attack`.

    Returns:
        (models, models), NaN where there is no score.
    """
    known = {**models, **cohort}
    place = np.array([index for index, name in enumerate(names) if name in known])
    own = [names[index] for index in place]
    people = [known[name].person or known[name].speaker for name in own]
    some = blocks(people, [name in cohort for name in own], seed)
    rows = np.asarray(vectors, np.float64)[place]
    rows = rows - rows.mean(0)
    found = np.full((len(names), len(names)), np.nan)
    found[np.ix_(place, place)] = score_pairs(rows @ rows.T, some, normed)
    return found
