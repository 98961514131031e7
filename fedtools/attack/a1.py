"""Attack A1: are two personalised models of one speaker? By the distance of their footprints.

Tomashenko et al. (ICASSP 2022), section 3.2.1, equation 4: "the L2-normalised Euclidean distance"
of means and of deviations. The equation divides the distance of two vectors by the product of their
lengths, so that a model that moved further seems nearer to all others; the words may as well mean
the distance of vectors of unit length. Both are here, and the scores that speaker verification
would take: cosines, centred on models of other people and normed by their scores with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.attack.cohort import blocks, normed, score_pairs
from fedtools.attack.footprint_files import Prints
from fedtools.attack.knowledge import (
    ANY,
    ATTACKERS,
    IGNORANT,
    LAZY,
    enrols_defended,
    in_versions,
    seen_by,
    share_updates,
)
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
    undefended: Prints | None = None,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> list[Mapping[str, object]]:
    """Decide all trials by the distance of footprints, layer by layer; write OUT/a1.tsv.

    Both parts of a footprint, means alone and deviations alone (figures 4 and 5), on each kind of
    trials; by each of the scores that are asked for. Behind a defence there are rows of each
    attacker of `fedtools.attack.knowledge`; a distance learns nothing, so that it has no
    semi-informed one.

    Args:
        prints: as `read_footprints` gives them, those of the cohort too.
        models: those with a speaker; see `fedtools.attack.verify`.
        out: gets also trials.<kind>, and a score for each in a1.<layer>.<kind>; of unit vectors in
            a1-unit.<layer>.<kind>, with a cohort in a1-cohort.<layer>.<kind>; behind a defence the
            attacker comes before the kind.
        cohort: models of other people, by which scores are centred and normed; by default those of
            `models` that are of neither speaker of a trial, see `fedtools.attack.cohort`.
        undefended: of the same models without the defence, see `footprint_files.undefended`.
        resamples: of intervals.
        seed: see `make_trials`.
    """
    seen = _Seen(prints, undefended, models, cohort or {}, seed)
    matrices = (
        (attacker, layer, way if score == "literal" else f"{way}, {score}", matrix)
        for layer in prints.layers
        for score in options.scores
        for attacker in seen.attackers(score)
        for way, matrix in seen.scores(layer, score, attacker, options.alpha)
    )
    files = {"both": "a1", "both, unit": "a1-unit", "both, cohort": "a1-cohort"}
    chosen = {"others": options.others, "resamples": resamples, "seed": seed}
    return decide(
        out, "a1", models, prints.models, matrices, files, defence=prints.defence, **chosen
    )


@dataclass(frozen=True)
class _Seen:
    """The footprints that are compared, and what else attackers have; see `attack`."""

    prints: Prints
    undefended: Prints | None
    models: Mapping[str, Model]
    cohort: Mapping[str, Model]
    seed: int

    def attackers(self, score: str) -> Sequence[str]:
        """Those of whom a score tells something of its own."""
        if self.undefended is None:
            return (ANY,)
        return ATTACKERS if score == "cohort" else (IGNORANT, LAZY)

    def scores(
        self, layer: str, score: str, attacker: str, alpha: tuple[float, float]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Scores of all pairs of models, large where two are alike, by their name."""
        tested, plain = self.prints.layers[layer], None
        if self.undefended is not None:
            plain = self.undefended.layers[layer]
        for way, matrix in self._of(score, tested, plain, attacker, alpha):
            if plain is not None:
                shared = share_updates(attacker, self.prints.models, self.prints.groups)
                matrix = np.where(shared, np.nan, matrix)
            yield way, matrix

    def _of(
        self,
        score: str,
        tested: np.ndarray,
        plain: np.ndarray | None,
        attacker: str,
        alpha: tuple[float, float],
    ) -> Iterator[tuple[str, np.ndarray]]:
        if score == "cohort":
            means, deviations = (
                self._cohort(tested[:, row], None if plain is None else plain[:, row], attacker)
                for row in (0, 1)
            )
            yield from (("both", means + deviations), ("means", means), ("deviations", deviations))
            return
        ways = {"both": alpha, "means": (1.0, 0.0), "deviations": (0.0, 1.0)}
        enrolled = plain if plain is not None and not enrols_defended(attacker) else tested
        rows, columns = (unit(one) if score == "unit" else one for one in (enrolled, tested))
        for way, weights in ways.items():
            # A distance: the nearer, the more alike.
            yield way, -rho(rows, columns, weights)

    def _cohort(self, tested: np.ndarray, plain: np.ndarray | None, attacker: str) -> np.ndarray:
        """Cosines centred on, and normed by, models of other people."""
        given = self.prints.models, self.models, self.cohort, self.seed
        if plain is None:
            return normed_cosines(tested, *given)
        return normed_cosines(tested, *given, undefended=plain, attacker=attacker)


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
    *,
    undefended: np.ndarray | None = None,
    attacker: str = ANY,
) -> np.ndarray:
    """Cosines of all pairs of models, centred on a cohort and s-normed by it.

    Args:
        vectors: (models, D).
        names: of the models; those of no known speaker have no scores.
        models, cohort: as of `attack`.
        undefended: the same without a defence, and ...
        attacker: ... who has which of the two; rows of the result are what is enrolled.

    Returns:
        (models, models), NaN where there is no score.
    """
    known = {**models, **cohort}
    place = np.array([index for index, name in enumerate(names) if name in known])
    own = [names[index] for index in place]
    people = [known[name].person or known[name].speaker for name in own]
    some = blocks(people, [name in cohort for name in own], seed)
    rows = np.asarray(vectors, np.float64)[place]
    if undefended is not None:
        rows = np.concatenate([np.asarray(undefended, np.float64)[place], rows])
        some = in_versions(some, len(place), attacker)
    rows = rows - rows.mean(0)
    scores = score_pairs(rows @ rows.T, some, normed)
    found = np.full((len(names), len(names)), np.nan)
    found[np.ix_(place, place)] = scores if undefended is None else seen_by(attacker, scores)
    return found
