"""Scores of pairs of models that use a cohort: other people's models, known to the attacker.

A cohort is a set of models of people who are in no trial that is scored with it. Either it is
given, as models of other experiments, or people are split into parts, and a pair is scored with the
models of all parts that neither model is in.

Scoring needs only the inner products of all pairs of vectors, from any origin: scores are computed
relative to the mean of the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement

import numpy as np

from fedtools.attack.knowledge import Block
from fedtools.core.errors import UserError
from fedtools.core.seeds import generator, seed64
from fedtools.score.calibration import Ratios, fit_ratios

# Number of parts that people are split into.
_PARTS = 5


Rule = Callable[[np.ndarray, Block], np.ndarray]


def blocks(people: Sequence[str], known: Sequence[bool] | np.ndarray, seed: int) -> list[Block]:
    """Return the pairs of attacked models, in blocks with one cohort each.

    Args:
        people: the person of each model.
        known: whether each model is of a given cohort; if none is, other parts are the cohort.
        seed: random seed of the parts.

    Raises:
        UserError: if the cohort shares a person with the attacked models, or there are fewer than
            three people and no cohort.
    """
    owners, known = np.array(people), np.asarray(known, bool)
    attacked, given = np.flatnonzero(~known), np.flatnonzero(known)
    if len(given):
        if shared := set(owners[given]) & set(owners[attacked]):
            problem = f"{min(shared)!r} is both attacked and in the cohort"
            raise UserError(problem, remedy="give models of other people")
        return [Block(attacked, attacked, given)]
    names = sorted(set(owners), key=lambda name: (seed64(seed, "cohort", name), name))
    if len(names) < 3:
        problem = f"no cohort: models of {len(names)} people are known"
        raise UserError(problem, remedy="give --cohort, models of other people")
    count = min(_PARTS, len(names))
    part = {name: number % count for number, name in enumerate(names)}
    parts = np.array([part[name] for name in owners])
    return [
        Block(
            *(np.flatnonzero(parts == one) for one in pair), np.flatnonzero(~np.isin(parts, pair))
        )
        for pair in combinations_with_replacement(range(count), 2)
    ]


def cosines(products: np.ndarray, block: Block) -> np.ndarray:
    """Return cosines of a block's pairs, relative to the mean of its cohort: (rows, columns).

    They are 0 where a vector is that mean.
    """
    middle, length = _from_cohort(products, block.cohort)
    rows, columns, _ = block
    inner = products[np.ix_(rows, columns)] - (middle[rows][:, None] + middle[columns])
    scale = length[rows][:, None] * length[columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scale > 0, inner / scale, 0.0).clip(-1, 1)


def normed(products: np.ndarray, block: Block, shared: np.ndarray | None = None) -> np.ndarray:
    """Return cosines, each normalised by those of both models with the cohort, see `s_norm`.

    Args:
        shared: (models, models), which pairs share an update: they normalise nothing.
    """
    rows, columns, cohort = block
    sides = [cosines(products, Block(side, cohort, cohort)) for side in (rows, columns)]
    if shared is not None:
        sides = [
            np.where(shared[np.ix_(side, cohort)], np.nan, found)
            for side, found in zip((rows, columns), sides, strict=True)
        ]
    return s_norm(cosines(products, block), *sides)


def s_norm(scores: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Normalise scores of pairs by the scores of both models with a cohort (s-norm).

    Each model's scores with the cohort have a mean and a deviation. The result is the number of
    deviations that a score is above the mean, averaged over both models.

    Args:
        scores: (rows, columns).
        rows, columns: scores of each side's models with the cohort's, (models, cohort); NaN does
            not count.
    """
    sides = []
    for others in (rows, columns):
        spread = np.nanstd(others, 1)
        sides.append((np.nanmean(others, 1), np.where(spread > 0, spread, 1.0)))
    (one, narrow), (other, wide) = sides
    return ((scores - one[:, None]) / narrow[:, None] + (scores - other) / wide) / 2


def score_pairs(products: np.ndarray, some: Sequence[Block], rule: Rule) -> np.ndarray:
    """Return scores of all pairs by a rule, (models, models); NaN where no block has a pair."""
    found = np.full(products.shape, np.nan)
    for block in some:
        _put(found, block, rule(products, block))
    return found


def combine(
    layers: Sequence[np.ndarray],
    people: Sequence[str],
    some: Sequence[Block],
    *,
    others: int,
    seed: int,
    shared: np.ndarray | None = None,
) -> tuple[np.ndarray, list[Ratios]]:
    """Return log-likelihood ratios of all pairs, by logistic regression on all layers' cosines.

    Each block's regression is trained on pairs of its cohort alone. Their cosines are relative to a
    mean as those of the block are: of models of the cohort by neither person of a pair.

    Args:
        layers: the products of each layer.
        people: the person of each model.
        some: the blocks.
        others: pairs of two people that a regression is trained on, drawn at random; 0: all.
        seed: random seed of the draw, and of the parts that a cohort is split into.
        shared: (models, models), which pairs share an update: none of these is trained on.

    Returns:
        (models, models), NaN where no block has a pair; and each block's regression.

    Raises:
        UserError: if a cohort has fewer than three people, or no pair of one person, or of two.
    """
    found, fitted = np.full(layers[0].shape, np.nan), []
    known: dict[bytes, Ratios] = {}
    for block in some:
        key = block.cohort.tobytes()
        if key not in known:
            known[key] = _trained(layers, people, block.cohort, others, seed, shared)
        ratios = known[key]
        values = sum(
            weight * cosines(layer, block)
            for weight, layer in zip(ratios.weights, layers, strict=True)
        )
        _put(found, block, values + ratios.offset)
        fitted.append(ratios)
    return found, fitted


def _trained(
    layers: Sequence[np.ndarray],
    people: Sequence[str],
    cohort: np.ndarray,
    others: int,
    seed: int,
    shared: np.ndarray | None,
) -> Ratios:
    """Train the regression of one cohort."""
    apart = np.full(2 * (len(cohort),), True) if shared is None else ~shared[np.ix_(cohort, cohort)]
    pairs, targets = _training_pairs(people, cohort, apart, others, seed)
    own = [people[index] for index in cohort]
    inner = [
        Block(*(cohort[numbers] for numbers in one))
        for one in blocks(own, np.zeros(len(own), bool), seed)
    ]
    columns = [score_pairs(layer, inner, cosines)[pairs[:, 0], pairs[:, 1]] for layer in layers]
    return fit_ratios(np.stack(columns, 1), targets)


def _training_pairs(
    people: Sequence[str], cohort: np.ndarray, apart: np.ndarray, others: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of the cohort's models, (pairs, 2), and whether each is of one person.

    Args:
        apart: (cohort, cohort), which pairs may be trained on.
    """
    owners = np.array(people)[cohort]
    one, other = np.nonzero(np.triu(apart, 1))
    same = owners[one] == owners[other]
    if not same.any():
        raise UserError("nobody in the cohort has two models", remedy="give a second --round")
    if same.all():
        raise UserError("all pairs of two people in the cohort share an update")
    rest = np.flatnonzero(~same)
    if others and others < len(rest):
        drawn = generator(seed, "cohort's pairs").choice(len(rest), others, replace=False)
        rest = rest[np.sort(drawn)]
    chosen = np.concatenate([np.flatnonzero(same), rest])
    return np.stack([cohort[one[chosen]], cohort[other[chosen]]], 1), same[chosen]


def _from_cohort(products: np.ndarray, cohort: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each model's term for centring products on the cohort, and its centred length.

    A centred product is the product less both models' terms.
    """
    across = products[:, cohort].mean(1)
    whole = across[cohort].mean()
    squares = np.diagonal(products) - 2 * across + whole
    # What rounding alone leaves counts as 0.
    least = 1e-12 * (np.diagonal(products) + np.abs(whole))
    return across - whole / 2, np.sqrt(np.where(squares > least, squares, 0.0))


def _put(matrix: np.ndarray, block: Block, values: np.ndarray) -> None:
    """Put in the scores of a block, and of the same pairs the other way round."""
    matrix[np.ix_(block.rows, block.columns)] = values
    matrix[np.ix_(block.columns, block.rows)] = values.T
