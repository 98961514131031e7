"""Attack A1: verify speakers by the distance between the footprints of personalised models.

Tomashenko et al. (ICASSP 2022), section 3.2.1, equation 4: "the L2-normalised Euclidean distance"
of means and of deviations. The equation divides the distance of two vectors by the product of their
lengths, so that a model that moved further seems nearer to all others; the words may also mean the
distance between vectors of unit length. Both are implemented, and so are the scores that speaker
verification would use: cosines, centred on models of other people and normalised by the scores with
these models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from fedtools.attack.knowledge import Attacker, Versions, attackers
from fedtools.attack.options import A1
from fedtools.attack.speakers.cohort import blocks, normed, score_pairs
from fedtools.attack.speakers.footprint_files import Prints
from fedtools.attack.speakers.verify import Model, decide
from fedtools.core.recipe_sections import Bootstrap


def distances(vectors: np.ndarray, others: np.ndarray | None = None) -> np.ndarray:
    """Return ||a - b|| / (||a|| ||b||) for all pairs: the distance of a / ||a||^2 and b / ||b||^2.

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
    # Subtracting a common mean keeps all distances and reduces rounding errors.
    middle = one.mean(0)
    one, two = one - middle, two - middle
    angles = (one**2).sum(1)[:, None] + (two**2).sum(1) - 2 * one @ two.T
    with np.errstate(invalid="ignore"):
        # Lengths and directions apart: a model that hardly moved must not cost others precision.
        squares = (short[:, None] - thin) ** 2 + short[:, None] * thin * np.maximum(angles, 0)
    return np.sqrt(np.where(np.isfinite(squares), squares, np.inf))


def rho(
    footprints: np.ndarray, others: np.ndarray | None = None, alpha: tuple[float, float] = A1.alpha
) -> np.ndarray:
    """Compute equation 4 for all pairs of models: a distance, small where speakers seem the same.

    Args:
        footprints: (N, 2, D), mean and standard deviation of each model.
        others: (M, 2, D); by default the same models.
        alpha: weights of the distance between means and of that between deviations.

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
    """Return unit vectors, 0 for vectors of length 0, and the inverses of the lengths."""
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
    undefended: Prints | None = None,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[Mapping[str, object]]:
    """Decide all trials by the distance between footprints of each layer; write OUT/a1.tsv.

    There are rows for both parts of a footprint, for means alone and for deviations alone (figures
    4 and 5), for each kind of trials and each score in the options. With a defence there are rows
    for each attacker of `fedtools.attack.knowledge`; a distance is not trained, so that it has no
    semi-informed attacker.

    Args:
        prints: footprints as `read_footprints` returns them, including those of the cohort.
        models: models with a known speaker; see `fedtools.attack.speakers.verify`.
        out: directory that also gets trials.<kind>, and a score for each trial in
            a1.<layer>.<kind>; of unit vectors in a1-unit.<layer>.<kind>, with a cohort in
            a1-cohort.<layer>.<kind>; with a defence, the attacker comes before the kind.
        cohort: models of other people, by which scores are centred and normalised; by default those
            of `models` by neither speaker of a trial, see `fedtools.attack.speakers.cohort`.
        undefended: footprints of the same models without the defence, see
            `footprint_files.undefended`.
        resamples: number of bootstrap resamples for intervals.
        seed: see `make_trials`.
    """
    seen = _Seen(prints, undefended, models, cohort or {}, seed)
    matrices = (
        (attacker.name, layer, way if score == "literal" else f"{way}, {score}", matrix)
        for layer in prints.layers
        for score in options.scores
        for attacker in attackers(undefended is not None, learns=score == "cohort")
        for way, matrix in seen.scores(layer, score, attacker, options.alpha)
    )
    files = {"both": "a1", "both, unit": "a1-unit", "both, cohort": "a1-cohort"}
    chosen = {"others": options.others, "resamples": resamples, "seed": seed}
    return decide(
        out, "a1", models, prints.models, matrices, files, defence=prints.defence, **chosen
    )


@dataclass(frozen=True)
class _Seen:
    """Footprints to compare, and what else attackers know; see `attack`."""

    prints: Prints
    undefended: Prints | None
    models: Mapping[str, Model]
    cohort: Mapping[str, Model]
    seed: int

    @cached_property
    def versions(self) -> Versions:
        """Return the versions of all models."""
        return Versions(self.prints.models, self.undefended is not None, self.prints.groups)

    def scores(
        self, layer: str, score: str, attacker: Attacker, alpha: tuple[float, float]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield names and scores of all pairs of models; scores are large where two are alike."""
        sent, versions = self.prints.layers[layer], self.versions
        plain = [self.undefended.layers[layer]] if self.undefended else []
        rows = np.concatenate([*plain, sent])
        if score == "cohort":
            means, deviations = (
                normed_cosines(
                    rows[:, row], versions, self.models, self.cohort, self.seed, attacker
                )
                for row in (0, 1)
            )
            yield from (("both", means + deviations), ("means", means), ("deviations", deviations))
            return
        ways = {"both": alpha, "means": (1.0, 0.0), "deviations": (0.0, 1.0)}
        sides = (rows[versions.number(known)] for known in (attacker.enrols, True))
        enrolled, tested = (unit(one) if score == "unit" else one for one in sides)
        for way, weights in ways.items():
            # The distance is negated: scores are large where two models are alike.
            yield way, versions.seen(-rho(enrolled, tested, weights), attacker)


def unit(footprints: np.ndarray) -> np.ndarray:
    """Return footprints, (models, 2, D), with means and deviations of length 1; zeros stay 0.

    Equation 4 of these is the distance between the vectors themselves, since it divides by 1.
    """
    rows = np.asarray(footprints, np.float64).reshape(-1, footprints.shape[-1])
    return _directions(rows)[0].reshape(footprints.shape)


def normed_cosines(
    vectors: np.ndarray,
    versions: Versions,
    models: Mapping[str, Model],
    cohort: Mapping[str, Model],
    seed: int,
    attacker: Attacker,
) -> np.ndarray:
    """Return cosines of all pairs of models, centred on a cohort and s-normed by it.

    Args:
        vectors: (versions, D).
        versions: of the models; models without a known speaker have no scores.
        models, cohort: as in `attack`.
        attacker: decides which versions are enrolled (the rows of the result) and learnt from.

    Returns:
        (models, models), NaN where there is no score.
    """
    known = {**models, **cohort}
    names = versions.names
    place = np.array([index for index, name in enumerate(names) if name in known])
    own = [names[index] for index in place]
    people = [known[name].person or known[name].speaker for name in own]
    some = blocks(people, [name in cohort for name in own], seed)
    kept = Versions(own, versions.defended, versions.groups)
    each = np.asarray(vectors, np.float64).reshape(-1, len(names), vectors.shape[1])
    rows = each[:, place].reshape(-1, vectors.shape[1])
    rows = rows - rows.mean(0)
    rule = partial(normed, shared=kept.shared)
    scores = score_pairs(rows @ rows.T, kept.blocks(some, attacker), rule)
    found = np.full((len(names), len(names)), np.nan)
    found[np.ix_(place, place)] = kept.seen(scores, attacker)
    return found
