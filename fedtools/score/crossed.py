"""The difference of two systems, with training seeds and test speakers as random samples.

Each seed of both systems is scored on the same speakers: seeds and speakers are crossed. The
difference for a seed and a speaker is the overall one, plus an effect of the seed, one of the
speaker, and one of both together, all random (two-way random effects with one observation a cell;
S. Searle, G. Casella, C. McCulloch: Variance components, Wiley 1992, chapter 4). Its variance is a
sum of mean squares, whose degrees of freedom F. Satterthwaite approximates (An approximate
distribution of estimates of variance components, Biometrics Bulletin 1946). An error rate is a
ratio of two sums, and is linearised: a speaker's part is its errors minus the rate times its tokens
(W. Cochran: Sampling techniques, 3rd edition, Wiley 1977, section 6.3).

The variance between two or three seeds is hardly known. Where it is small by luck, a difference of
nothing looks certain, and the best of many rows is the one with most luck. Rows of a table's column
are compared with the same system by as many seeds, so that `differences` lets no row have less
variance between seeds than the rows have on average, which is known better. A single difference has
no such help: in simulations, its interval covers the truth in at least 93 % with three seeds,
and in at least 87 % with two.

A bootstrap that draws speakers and, within them, seeds is no substitute: with three seeds it draws
too few of them to know how much these vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedtools.score.bootstrap import MIN_SPEAKERS

_LEVEL = 0.95


class Difference(NamedTuple):
    """A difference of two rates, in percentage points, with its 95 % interval and two-sided p.

    The interval and p are NaN if there are too few speakers.
    """

    value: float
    low: float
    high: float
    p: float


class Effects(NamedTuple):
    """A difference of two rates, and its mean squares; NaN if there are too few speakers.

    Attributes:
        value: in percentage points.
        seeds, speakers: their numbers.
        between, within, both: mean squares of seeds, of speakers, and of both together.
        free: degrees of freedom of speakers.
    """

    value: float
    seeds: int = 1
    speakers: int = 0
    between: float = 0.0
    within: float = np.nan
    both: float = 0.0
    free: float = 0


def difference(
    errors: np.ndarray, others: np.ndarray, tokens: np.ndarray, clients: Sequence[int] | np.ndarray
) -> Difference:
    """Return one system's error rate minus another's, by themselves: see `effects`."""
    found = effects(errors, others, tokens, clients)
    return _difference(found, found.between, found.seeds - 1)


def differences(found: Sequence[Effects | None]) -> list[Difference | None]:
    """Return the differences of several systems to the same one, a column of a table.

    A difference of one seed has no p, since it is not known what another seed would change.
    """
    known = [one for one in found if one and one.seeds > 1 and not np.isnan(one.within)]
    pooled = {}
    for seeds in {one.seeds for one in known}:
        own = [one.between / one.speakers for one in known if one.seeds == seeds]
        # All have the other system's seeds in common, so that differences of two rows have half of
        # their variance in common, and mean squares a quarter.
        pooled[seeds] = np.mean(own), (seeds - 1) * len(own) / (1 + (len(own) - 1) / 4)
    rows: list[Difference | None] = []
    for one in found:
        if one is None:
            rows.append(None)
        elif one.seeds == 1:
            rows.append(_difference(one, one.between, 0)._replace(p=np.nan))
        else:
            mean, free = pooled.get(one.seeds, (np.nan, np.nan))
            rows.append(_difference(one, max(one.between, mean * one.speakers), free))
    return rows


def over_seeds(
    values: Sequence[float] | np.ndarray, variance: float, both: float = 0.0, free: float = np.inf
) -> Difference:
    """Return the mean of several seeds' values, with its interval over seeds and speakers.

    Args:
        values: one of each seed, two or more.
        variance: of their mean over draws of speakers, who are the same for all seeds.
        both: variance over draws of one seed's value less their mean; the interval is too wide if
            it is not known, and 0 stands for it.
        free: degrees of freedom of speakers.
    """
    seeds, mean = len(values), float(np.mean(values))
    between = float(np.var(values, ddof=1))
    found = Effects(mean, seeds, 1, between, seeds * variance, both, free)
    return _difference(found, between, seeds - 1)


def mean_bounds(
    values: Sequence[float], lows: Sequence[float], highs: Sequence[float]
) -> tuple[float, float]:
    """Return the 95 % interval of a mean over seeds, from each seed's over the same speakers.

    As if speakers differed alike with all seeds: it is rather too wide.

    Returns:
        NaN, NaN if a seed has no interval; that of a single seed as it is.
    """
    if len(values) == 1:
        return lows[0], highs[0]
    from scipy.special import ndtri

    widths = (np.asarray(highs, float) - np.asarray(lows, float)) / 2 / ndtri((1 + _LEVEL) / 2)
    return over_seeds(values, float(np.mean(widths**2)))[1:3]


def _difference(found: Effects, between: float, free: float) -> Difference:
    """Return a difference, given the mean square of seeds and its degrees of freedom."""
    if np.isnan(found.within):
        return Difference(found.value, np.nan, np.nan, np.nan)
    variance, freedom = _variance(found, between, free)
    value = found.value
    if variance == 0:
        return Difference(value, value, value, 1.0 if value == 0 else 0.0)
    from scipy.special import stdtr, stdtrit

    error = np.sqrt(variance)
    half = stdtrit(freedom, (1 + _LEVEL) / 2) * error
    p = float(2 * stdtr(freedom, -abs(value) / error))
    return Difference(value, value - half, value + half, p)


def effects(
    errors: np.ndarray, others: np.ndarray, tokens: np.ndarray, clients: Sequence[int] | np.ndarray
) -> Effects:
    """Return one system's error rate minus another's, as the mean over clients and seeds.

    Args:
        errors: (seeds, speakers), of one system with each seed.
        others: the same for the system that it is compared with.
        tokens: (speakers,), reference words, characters or clips.
        clients: (speakers,), the number of each speaker's client; a client's rate is over all of
            its tokens. Clients are fixed, and their speakers drawn; clients of one speaker are
            drawn from each other.
    """
    errors, others = (100 * np.atleast_2d(np.asarray(one, float)) for one in (errors, others))
    parts, value = _parts(errors - others, np.asarray(tokens, float), np.asarray(clients))
    strata = _strata(np.asarray(clients))
    sizes = np.bincount(strata)
    seeds, speakers = parts.shape
    if speakers < MIN_SPEAKERS or sizes.min() < 2:
        return Effects(value, seeds, speakers)
    return Effects(value, seeds, speakers, *_squares(parts, strata, sizes), speakers - len(sizes))


def _parts(values: np.ndarray, tokens: np.ndarray, clients: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the parts of each seed and speaker, (seeds, speakers), and the overall difference.

    Parts are scaled so that a seed's difference is the overall one plus the mean of its parts.
    """
    _, clients = np.unique(clients, return_inverse=True)
    count, speakers = clients.max() + 1, values.shape[1]
    total = np.bincount(clients, tokens)
    mean = values.mean(0)
    rates = np.bincount(clients, mean) / total
    parts = (values - rates[clients] * tokens) / total[clients]
    alone = np.bincount(clients)[clients] == 1
    if alone.any():
        single = values[:, alone] / tokens[alone]
        parts[:, alone] = single - single.mean()
    return parts * speakers / count, float(rates.mean())


def _strata(clients: np.ndarray) -> np.ndarray:
    """Return each speaker's stratum by number: its client, or one for single-speaker clients."""
    _, place, sizes = np.unique(clients, return_inverse=True, return_counts=True)
    place = np.where(sizes[place] == 1, len(sizes), place)
    return np.unique(place, return_inverse=True)[1]


def _squares(
    parts: np.ndarray, strata: np.ndarray, sizes: np.ndarray
) -> tuple[float, float, float]:
    """Return mean squares of parts that sum to 0: of seeds, of speakers, and of both together."""
    seeds, speakers = parts.shape
    scale = (sizes / (sizes - 1))[strata]
    of_speakers = parts.mean(0)
    squares = seeds * float((scale * of_speakers**2).sum()) / speakers
    if seeds == 1:
        return 0.0, squares, 0.0
    of_seeds = parts.mean(1)
    sums = np.stack([np.bincount(strata, row) for row in parts])
    rest = parts - of_speakers - (sums / sizes)[:, strata]
    between = speakers * float((of_seeds**2).sum()) / (seeds - 1)
    both = float((scale * rest**2).sum()) / speakers / (seeds - 1)
    return between, squares, both


def _variance(found: Effects, between: float, free: float) -> tuple[float, float]:
    """Return the variance of a difference, and its degrees of freedom.

    Args:
        between, free: the mean square of seeds, and its degrees of freedom.
    """
    seeds, speakers = found.seeds, found.speakers
    if seeds == 1:
        return found.within / speakers, found.free
    squares = [
        (between, free), (found.within, found.free), (-found.both, (seeds - 1) * found.free)
    ]  # fmt: skip
    total, freedom = sum(one for one, _ in squares), _freedom(squares)
    # A negative estimate of one effect's variance is taken as 0.
    least, of_least = max(squares[:2])
    if total < least:
        total, freedom = least, of_least
    return total / seeds / speakers, freedom


def _freedom(squares: Sequence[tuple[float, float]]) -> float:
    """Return Satterthwaite's degrees of freedom of a sum of mean squares, each with its own."""
    total = sum(one for one, _ in squares) ** 2
    each = sum(one**2 / free for one, free in squares)
    return total / each if each else np.inf


def holm(values: Sequence[float]) -> list[float]:
    """Return the adjusted p of a family of tests, in which NaN stands for no test, and stays.

    S. Holm, Scandinavian Journal of Statistics, 1979.
    """
    known = [index for index, one in enumerate(values) if not np.isnan(one)]
    found, most = list(values), 0.0
    for rank, index in enumerate(sorted(known, key=lambda one: values[one])):
        most = max(most, min(1.0, (len(known) - rank) * values[index]))
        found[index] = most
    return found
