"""How well speakers are told apart by scores of pairs: equal error rate, ranks, intervals.

A trial is a pair of a query and an item of a gallery; a target trial has one speaker on both sides.
"""

from __future__ import annotations

import numpy as np

# Resampled error rates are read off counts at so many scores at most; with fewer they are exact.
_SCORES = 1000


def equal_error_rate(scores: np.ndarray, targets: np.ndarray) -> float:
    """The equal error rate of some trials.

    Args:
        scores: (trials,), large where the speakers seem the same.
        targets: (trials,), whether they are.

    Returns:
        in %: where the rates of false accepts and false rejects meet, on straight lines between
        the thresholds; trials of equal score are accepted together. NaN if one kind is missing.
    """
    values, place = np.unique(scores, return_inverse=True)
    counts = (np.bincount(place[kind], minlength=len(values)) for kind in (targets, ~targets))
    return float(100 * _meeting_points(*(count.astype(np.float64)[None] for count in counts))[0])


def resampled_error_rates(
    scores: np.ndarray,
    used: np.ndarray,
    queries: np.ndarray,
    gallery: np.ndarray,
    draws: np.ndarray,
) -> np.ndarray:
    """Equal error rates of draws of speakers.

    A speaker that is drawn twice is two speakers, each with all of its target trials; trials
    between the two are left out, since they are not of different speakers.

    Args:
        scores: (queries, items).
        used: (queries, items), which pairs are trials.
        queries, gallery: (queries,) and (items,), numbers of speakers from 0.
        draws: (draws, speakers), how often each is drawn.

    Returns:
        (draws,), in %; NaN where a draw has no trial of one kind.
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
    """The rank, from 1, of the best wanted item of each query; ties go to the others.

    Args:
        scores: (queries, items).
        wanted: (queries, items), at least one of them used for each query.
        used: (queries, items), which items a query is compared with.
    """
    best = np.where(wanted & used, scores, -np.inf).max(1)
    return 1 + ((scores >= best[:, None]) & used & ~wanted).sum(1)


def chance_of_first(wanted: int, items: int) -> float:
    """The probability that a random order begins with a wanted item."""
    return wanted / items


def chance_reciprocal_rank(wanted: int, items: int) -> float:
    """The expected reciprocal rank of the first wanted item in a random order."""
    expected, none_yet = 0.0, 1.0
    for rank in range(1, items - wanted + 2):
        now = wanted / (items - rank + 1)
        expected += none_yet * now / rank
        none_yet *= 1 - now
    return expected


def _edges(targets: np.ndarray, impostors: np.ndarray) -> np.ndarray:
    """Scores to count at, ascending: all of them, or as many quantiles of either kind."""
    values = np.unique(np.concatenate([targets, impostors]))
    if len(values) <= _SCORES:
        return values
    shares = np.linspace(0, 1, _SCORES // 2)
    parts = [np.quantile(kind, shares, method="higher") for kind in (targets, impostors)]
    return np.unique(np.concatenate([*parts, values[-1:]]))


def _meeting_points(targets: np.ndarray, impostors: np.ndarray) -> np.ndarray:
    """Equal error rates, (draws,), from trials (draws, scores) counted at ascending scores."""
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
