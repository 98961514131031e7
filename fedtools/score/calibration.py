"""Detection costs of scores, costs of log-likelihood ratios, calibration, and linkability."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedtools.score.verification import count_scores, det_curve


def min_dcf(
    scores: np.ndarray,
    targets: np.ndarray,
    *,
    prior: float = 0.01,
    reject_cost: float = 1.0,
    accept_cost: float = 1.0,
) -> float:
    """Return the detection cost at the best threshold, relative to the best one without scores.

    NIST's speaker recognition evaluations: reject_cost x prior x P(false reject) + accept_cost x
    (1 - prior) x P(false accept).

    Args:
        scores: (trials,), large where the speakers seem the same.
        targets: (trials,), whether they are.
        prior: probability of a target trial.
        reject_cost, accept_cost: what a false decision of either kind costs.

    Returns:
        0 to 1; NaN if a kind of trials is missing.
    """
    curve = det_curve(scores, targets)
    reject, accept = reject_cost * prior, accept_cost * (1 - prior)
    costs = reject * curve.false_rejects + accept * curve.false_accepts
    return float(costs.min() / min(reject, accept))


def cllr(ratios: np.ndarray, targets: np.ndarray) -> float:
    """Return the cost of log-likelihood ratios, in bits.

    N. Brümmer and J. du Preez, "Application-independent evaluation of speaker detection", Computer
    Speech and Language 20 (2006): 0 for perfect ratios, 1 for ratios that are all 1, and no upper
    bound for misleading ones.

    Args:
        ratios: (trials,), natural logs.
        targets: (trials,), whether both sides are of one speaker.

    Returns:
        NaN if a kind of trials is missing.
    """
    values, same, other = count_scores(ratios, targets)
    return _mean_bits(np.logaddexp(0, -values), np.logaddexp(0, values), same, other)


class Ratios(NamedTuple):
    """Weights and offset that combine several scores into a log-likelihood ratio, natural log."""

    weights: np.ndarray
    offset: float


def fit_ratios(scores: np.ndarray, targets: np.ndarray) -> Ratios:
    """Fit log-likelihood ratios of several scores per trial by logistic regression.

    N. Brümmer et al., "Fusion of heterogeneous speaker recognition systems in the STBU submission
    for the NIST SRE 2006", IEEE TASLP 15 (2007), at a prior of one half: both kinds of trials have
    the same total weight, the number of trials of the rarer kind. The weights, for scores that are
    scaled by their spread, are regularised towards 0, so that ratios stay finite where scores
    separate the training trials completely.

    Args:
        scores: (trials, systems).
        targets: (trials,), whether both sides are of one speaker.
    """
    from sklearn.linear_model import LogisticRegression

    middle, spread = scores.mean(0), scores.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    counts = {kind: int((targets == kind).sum()) for kind in (True, False)}
    weight = np.where(targets, 1 / counts[True], 1 / counts[False]) * min(counts.values())
    model = LogisticRegression(C=1.0, max_iter=1000)
    model.fit((scores - middle) / spread, targets, sample_weight=weight)
    weights = model.coef_[0] / spread
    return Ratios(weights, float(model.intercept_[0] - weights @ middle))


def min_cllr(scores: np.ndarray, targets: np.ndarray) -> float:
    """Return the least `cllr` of any non-decreasing function of the scores, in bits: 0 to 1.

    Pool-adjacent-violators gives this function. Trials of equal score get one ratio; the tools of
    VoicePrivacy 2020 put the other trials before the target ones there, and get a smaller value.

    Args:
        scores: (trials,), large where the speakers seem the same.
        targets: (trials,), whether they are.

    Returns:
        NaN if a kind of trials is missing.
    """
    from sklearn.isotonic import isotonic_regression

    _, same, other = count_scores(scores, targets)
    if not same.sum() or not other.sum():
        return float("nan")
    total = same + other
    posterior = isotonic_regression(same / total, sample_weight=total)
    # Posteriors of 0 and 1 occur at scores with trials of one kind alone, whose cost is 0.
    odds = posterior.clip(0, 1), (1 - posterior).clip(0, 1)
    prior = same.sum() / other.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        miss = np.where(same > 0, np.log1p(prior * odds[1] / odds[0]), 0)
        accept = np.where(other > 0, np.log1p(odds[0] / (prior * odds[1])), 0)
    return _mean_bits(miss, accept, same, other)


def linkability(scores: np.ndarray, targets: np.ndarray, *, prior_ratio: float = 1.0) -> float:
    """Return the global linkability D_sys: 0 if scores reveal nothing, 1 if they reveal all.

    M. Gomez-Barrero et al., "General framework to evaluate unlinkability in biometric template
    protection systems", IEEE TIFS 13 (2018), equations 8 to 10, as VoicePrivacy 2020 computes it
    (M. Maouche et al., Interspeech 2020): densities are histograms with one bin for ten target
    trials, at most 100 bins, over the range of all scores, and the integral is a trapezoid over the
    bins' centres. It does not depend on scores being ordered. Two properties to know: noise in the
    histograms makes it positive if the true value is 0, and the trapezoid loses half of the first
    and the last bin, which is much if bins are few.

    Args:
        scores: (trials,).
        targets: (trials,), whether both sides are of one speaker.
        prior_ratio: omega, the prior odds of a target trial.

    Returns:
        NaN with fewer than 20 target trials, which give fewer than two bins, or without other
        trials.
    """
    count_scores(scores, targets)
    bins = min(int(targets.sum()) // 10, 100)
    if bins < 2 or targets.all():
        return float("nan")
    low, high = scores.min(), scores.max()
    if low == high:
        return 0.0
    edges = np.linspace(low, high, bins + 1)
    same, other = (
        np.histogram(scores[kind], edges, density=True)[0] for kind in (targets, ~targets)
    )
    # 2 p - 1 of the posterior p = omega same / (omega same + other), where that is positive.
    weighted = prior_ratio * same
    total = np.where(same > 0, weighted + other, 1.0)
    local = np.maximum((weighted - other) / total, 0) * same
    return float((local[1:] + local[:-1]).sum() / 2 * (edges[1] - edges[0]))


def _mean_bits(
    reject: np.ndarray, accept: np.ndarray, same: np.ndarray, other: np.ndarray
) -> float:
    """Return the mean of both kinds' mean costs, in bits; costs (scores,) in nats, with counts."""
    if not same.sum() or not other.sum():
        return float("nan")
    # Leave out infinite costs of scores without trials.
    sums = (
        costs[counts > 0] @ counts[counts > 0]
        for costs, counts in ((reject, same), (accept, other))
    )
    means = [total / counts.sum() for total, counts in zip(sums, (same, other), strict=True)]
    return float(sum(means) / 2 / np.log(2))
