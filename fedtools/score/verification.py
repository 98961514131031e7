"""Speaker verification and identification from scores of pairs: error rates, ranks, intervals.

A trial is a pair of a query and an item of a gallery; a target trial has one speaker on both sides.
A trial is accepted if its score is at least the threshold, so that trials of equal score are
accepted together. All equal error rates here, resampled ones included, have one definition: the
points at the thresholds are joined by straight lines, and the rate is where the two errors are
equal on these. The convex hull of the same points (BOSARIS' ROCCH) would give at most that, and
less if few trials make the curve ragged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.special import betaincinv

from fedtools.core.errors import UserError
from fedtools.core.recipe_sections import Bootstrap
from fedtools.score.bootstrap import interval, speaker_draws

# The most scores at which trials are counted for resampled error rates; with fewer they are exact.
_SCORES = 1000
# With fewer target trials an error rate alone would mislead.
MIN_TARGETS = 20
# The most weights of drawn trials at a time, which bounds the memory.
_MOST_VALUES = 4_000_000


class DetCurve(NamedTuple):
    """Error rates at thresholds, (n,) each, as shares; the last threshold, infinity, accepts none.

    A DET plot has `scipy.stats.norm.ppf` of both rates on its axes (Martin et al., Eurospeech
    1997).
    """

    thresholds: np.ndarray
    false_rejects: np.ndarray
    false_accepts: np.ndarray


def det_curve(scores: np.ndarray, targets: np.ndarray) -> DetCurve:
    """Return the error rates at every threshold at which they change, ascending.

    Args:
        scores: (trials,), large where the speakers seem the same.
        targets: (trials,), whether they are.

    Returns:
        The curve, with NaN for the rate of a kind of trials that is missing.
    """
    values, same, other = count_scores(scores, targets)
    with np.errstate(invalid="ignore"):
        rejects = np.concatenate([[0], np.cumsum(same)]) / same.sum()
        # Summed from above, so that the last is 0 exactly.
        accepts = np.concatenate([np.cumsum(other[::-1])[::-1], [0]]) / other.sum()
    return DetCurve(np.concatenate([values, [np.inf]]), rejects, accepts)


def equal_error_rate(scores: np.ndarray, targets: np.ndarray) -> float:
    """Compute the equal error rate of some trials.

    Args:
        scores: (trials,), large where the speakers seem the same.
        targets: (trials,), whether they are.

    Returns:
        in %: where the rates of false accepts and false rejects meet, on straight lines between
        the thresholds; trials of equal score are accepted together. NaN if one kind is missing.
    """
    _, *counts = count_scores(scores, targets)
    return float(100 * _meeting_points(*(count[None] for count in counts))[0])


def true_positive_rate(
    scores: np.ndarray, targets: np.ndarray, false_positive_rate: float
) -> float:
    """Return the accepted target trials at the lowest threshold with few enough false accepts.

    Between two thresholds the stricter one counts, and with fewer than 1 / `false_positive_rate`
    other trials, none of these is accepted.

    Args:
        scores, targets: see `det_curve`.
        false_positive_rate: the most that is allowed, a share such as 0.001.

    Returns:
        in % of the target trials; NaN if a kind of trials is missing.
    """
    curve = det_curve(scores, targets)
    if np.isnan(curve.false_accepts).any():
        return float("nan")
    # A share such as 3 / 300 need not be exactly 0.01 in floating point.
    first = (curve.false_accepts <= false_positive_rate * (1 + 1e-12)).argmax()
    return float(100 * (1 - curve.false_rejects[first]))


def count_scores(
    scores: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the target and other trials at each distinct score, ascending: scores and counts, (n,).

    Raises:
        UserError: if a score is NaN.
    """
    if np.isnan(scores).any():
        raise UserError("a trial's score is NaN")
    values, place = np.unique(scores, return_inverse=True)
    counts = (np.bincount(place[kind], minlength=len(values)) for kind in (targets, ~targets))
    return (values, *(count.astype(np.float64) for count in counts))


@dataclass(frozen=True)
class ErrorRate:
    """An equal error rate with a 95 % interval, all in %, and its numbers of trials.

    Its text is the rate with its interval, or with too few target trials the interval alone.
    """

    value: float
    low: float
    high: float
    targets: int
    others: int

    def __str__(self) -> str:
        if not self.targets or not self.others:
            return f"unknown ({self.targets} target and {self.others} other trials)"
        bounds = f"{self.low:.2f}-{self.high:.2f} %"
        if self.targets < MIN_TARGETS:
            few = f"only {self.targets} target trials, fewer than {MIN_TARGETS}"
            return f"{bounds} (95 % interval; warning: {few})"
        return f"{self.value:.2f} % (95 % interval {bounds}, {self.targets} target trials)"


def estimate_error_rate(
    scores: np.ndarray,
    targets: np.ndarray,
    speakers: np.ndarray,
    *,
    resamples: int = Bootstrap.resamples,
    seed: int = 0,
) -> ErrorRate:
    """Estimate the equal error rate and its interval, from trials of known speakers.

    The interval covers two others. One is a bootstrap that draws speakers with replacement: a
    speaker drawn m times is m speakers, each with its target trials, and a trial of two speakers
    that are drawn m and n times counts m x n times. The other is the exact binomial interval
    (Clopper and Pearson, Biometrika 1934) for as many errors in as many independent trials of the
    rarer kind: draws without any error, or of fewer than ten speakers, have no interval of their
    own. For example, four errors in 463 trials are 0.24 to 2.20 %. In simulations of 20 to 40
    speakers, with rates of 0.7 to 17 %, the bootstrap alone covered the true rate in 76 to 97 % of
    the cases, both together in 97 to 100 %, at up to nine times the width.

    Args:
        scores, targets: see `det_curve`.
        speakers: (trials, 2), labels of any kind: the speakers of both sides. Or (trials,), if
            both sides of every trial are of one speaker, whether it is a target trial or not.
        resamples: the number of draws.
        seed: random seed of the draws.

    Raises:
        UserError: if a target trial has two speakers, or another trial one.
    """
    scores, targets = np.asarray(scores), np.asarray(targets, bool)
    speakers = np.asarray(speakers)
    names, sides = np.unique(speakers.reshape(-1), return_inverse=True)
    sides = sides.reshape(len(speakers), -1)
    if speakers.ndim == 2 and ((sides[:, 0] == sides[:, 1]) != targets).any():
        raise UserError("a target trial has two speakers, or another trial has one")
    value = equal_error_rate(scores, targets)
    counts = int(targets.sum()), int((~targets).sum())
    if not min(counts):
        return ErrorRate(value, 0.0, 100.0, *counts)
    draws = speaker_draws(len(names), resamples, seed, "equal error rate")
    drawn = None
    if not np.isnan(draws).any():
        drawn = drawn_error_rates(scores, targets, sides, draws)
    return ErrorRate(value, *rate_bounds(value, min(counts), drawn), *counts)


def rate_bounds(value: float, independent: int, drawn: np.ndarray | None) -> tuple[float, float]:
    """Return an interval of a rate in % that covers the binomial one and that of draws.

    Args:
        value: the rate.
        independent: number of independent trials.
        drawn: (draws,), rates of draws of speakers, which have no width if the rate is perfect.
    """
    bounds = [binomial_bounds(value / 100, independent)]
    if drawn is not None:
        bounds.append(interval(drawn))
    lows, highs = np.array(bounds).T
    return float(np.nanmin(lows)), float(np.nanmax(highs))


def binomial_bounds(share: float, trials: int) -> tuple[float, float]:
    """Return Clopper and Pearson's 95 % interval, in %, of a share of errors among trials."""
    errors = share * trials
    low = betaincinv(errors, trials - errors + 1, 0.025) if errors > 0 else 0.0
    high = betaincinv(errors + 1, trials - errors, 0.975) if errors < trials else 1.0
    return float(100 * low), float(100 * high)


def drawn_error_rates(
    scores: np.ndarray, targets: np.ndarray, sides: np.ndarray, draws: np.ndarray
) -> np.ndarray:
    """Compute the equal error rate in % of each draw of speakers, (draws,).

    Args:
        scores, targets: see `det_curve`.
        sides: the trials' speakers by number from 0, (trials, 2 or 1).
        draws: (draws, speakers), how often each is drawn.
    """
    # Only the order matters, and quantiles cannot be taken of infinite scores.
    _, ranks = np.unique(scores, return_inverse=True)
    edges = _edges(ranks[targets], ranks[~targets])
    place = np.searchsorted(edges, ranks)
    rates = []
    for some in np.array_split(draws, -(-len(draws) * len(scores) // _MOST_VALUES)):
        often = np.ascontiguousarray(some.T, np.float64)
        # Both sides of a target trial are of one speaker.
        same = _at_edges(place[targets], often[sides[targets, 0]], len(edges))
        others = often[sides[~targets, 0]]
        for side in sides[~targets, 1:].T:
            others *= often[side]
        rates.append(_meeting_points(same, _at_edges(place[~targets], others, len(edges))))
    return 100 * np.concatenate(rates)


def _at_edges(place: np.ndarray, weights: np.ndarray, edges: int) -> np.ndarray:
    """Sum weights (trials, draws) at each edge: (draws, edges)."""
    trials = len(place)
    which = csr_array((np.ones(trials), (place, np.arange(trials))), shape=(edges, trials))
    return np.ascontiguousarray((which @ weights).T)


def resampled_error_rates(
    scores: np.ndarray,
    used: np.ndarray,
    queries: np.ndarray,
    gallery: np.ndarray,
    draws: np.ndarray,
) -> np.ndarray:
    """Compute the equal error rate of each draw of speakers, from a matrix of scores.

    A speaker that is drawn twice is two speakers, each with all of its target trials; trials
    between the two are left out, since they are not of different speakers.

    Args:
        scores: (queries, items).
        used: (queries, items), which pairs are trials.
        queries, gallery: (queries,) and (items,), speakers by number from 0.
        draws: (draws, speakers), how often each is drawn.

    Returns:
        (draws,), in %; NaN if a draw has no trial of one kind.
    """
    same = queries[:, None] == gallery
    edges = _edges(scores[same & used], scores[~same & used])
    place = np.searchsorted(edges, scores)
    targets, impostors = (np.zeros((len(draws), len(edges))) for _ in range(2))
    speakers = draws.shape[1]
    for speaker in np.unique(queries):
        rows = queries == speaker
        cells = (gallery * len(edges) + place[rows])[used[rows]]
        counts = np.bincount(cells, minlength=speakers * len(edges)).astype(np.float64)
        counts = counts.reshape(speakers, len(edges))
        often = draws[:, speaker, None]
        targets += often * counts[speaker]
        counts[speaker] = 0
        impostors += often * (draws @ counts)
    return 100 * _meeting_points(targets, impostors)


def first_ranks(scores: np.ndarray, wanted: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the rank, from 1, of the best wanted item of each query, behind tied other items.

    Args:
        scores: (queries, items).
        wanted: (queries, items), at least one of them used for each query.
        used: (queries, items), which items a query is compared with.
    """
    best = np.where(wanted & used, scores, -np.inf).max(1)
    return 1 + ((scores >= best[:, None]) & used & ~wanted).sum(1)


def chance_of_first(wanted: int, items: int) -> float:
    """Return the probability that a random order begins with a wanted item."""
    return wanted / items


def chance_reciprocal_rank(wanted: int, items: int) -> float:
    """Return the expected reciprocal rank of the first wanted item in a random order."""
    expected, none_yet = 0.0, 1.0
    for rank in range(1, items - wanted + 2):
        now = wanted / (items - rank + 1)
        expected += none_yet * now / rank
        none_yet *= 1 - now
    return expected


def _edges(targets: np.ndarray, impostors: np.ndarray) -> np.ndarray:
    """Return the scores to count at, ascending: all, or as many quantiles of either kind."""
    values = np.unique(np.concatenate([targets, impostors]))
    if len(values) <= _SCORES:
        return values
    shares = np.linspace(0, 1, _SCORES // 2)
    parts = [np.quantile(kind, shares, method="higher") for kind in (targets, impostors)]
    return np.unique(np.concatenate([*parts, values[-1:]]))


def _meeting_points(targets: np.ndarray, impostors: np.ndarray) -> np.ndarray:
    """Return equal error rates, (draws,), from trials (draws, scores) at ascending scores."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rejects = np.cumsum(targets, 1) / targets.sum(1, keepdims=True)
        accepts = 1 - np.cumsum(impostors, 1) / impostors.sum(1, keepdims=True)
    # The lowest threshold accepts everything.
    rejects = np.pad(rejects, ((0, 0), (1, 0)))
    accepts = np.pad(accepts, ((0, 0), (1, 0)), constant_values=1.0)
    apart = accepts - rejects
    after = np.maximum((apart <= 0).argmax(1), 1)[:, None]
    at, before = (np.take_along_axis(apart, index, 1) for index in (after, after - 1))
    low, high = (np.take_along_axis(rejects, index, 1) for index in (after - 1, after))
    return (low + (high - low) * before / (before - at))[:, 0]
