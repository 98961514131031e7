"""Logistic regressions of many labellings of the same items, by scikit-learn or all together.

A permutation test fits thousands of classifiers, which differ in labels and in the items left out.
Of a few dozen items scikit-learn spends its time between the fits (8 ms each of 63 items and 400
values; here 1 ms, by Newton steps of all of them in products of stacked matrices); of many items
it is faster. The model is its `LogisticRegression` with `class_weight="balanced"`, one logit for
two classes and one each for more:

    minimise  C sum_i w_i loss(W x_i + b, y_i) + |W|^2 / 2,
    w_i = items / (classes x items of the class of i).

W is in the span of the items, so that the logits f of the items alone are solved for. With their
products K, gradients g and curvatures H of the losses, a step (C. E. Rasmussen and C. K. I.
Williams: Gaussian processes for machine learning, 2006, equation 3.18, with a mean b) solves

    (I + K H) f' = K r + b,    r = H f + g,    where the sum of r - H f' over items is 0.
"""

from __future__ import annotations

import warnings

import numpy as np
from threadpoolctl import threadpool_limits

_ITERATIONS, _TOLERANCE, _LARGEST_STEP = 100, 1e-6, 5.0
# Decimals of probabilities, so that rounding decides no order of models that are told alike.
_DECIMALS = 9
# The most items times logits that are solved together: with 360, both take 20 ms a fit.
_FEW = 300
# Values of the matrices that are solved at a time.
_AT_ONCE = 1_000_000


def probabilities(
    learnt: np.ndarray, tested: np.ndarray, labels: np.ndarray, kept: np.ndarray, strength: float
) -> np.ndarray:
    """Return the probabilities of classes by classifiers of many labellings.

    Each value is standardised over the items that a classifier is trained on.

    Args:
        learnt: (items, D), features to train on.
        tested: (items, D), features to test on.
        labels: (B, items), numbers of classes from 0; each class is among the items kept.
        kept: (B, items), whether an item is trained on.
        strength: C.

    Returns:
        (B, items, classes).

    Raises:
        ValueError: a class has no item to train on.
    """
    if any(len(np.unique(one[own])) <= labels.max() for one, own in zip(labels, kept, strict=True)):
        raise ValueError("a class has no item to train on")
    logits = 1 if labels.max() == 1 else int(labels.max()) + 1
    if labels.shape[1] * logits > _FEW:
        return _one_by_one(learnt, tested, labels, kept, strength)
    values = max((labels.shape[1] * logits) ** 2, learnt.size)
    size = max(1, _AT_ONCE // values)
    # Threads wait longer for one another than such matrices take.
    with threadpool_limits(1, "blas"):
        return np.concatenate(
            [
                _together(learnt, tested, labels[at : at + size], kept[at : at + size], strength)
                for at in range(0, len(labels), size)
            ]
        )


def _one_by_one(
    learnt: np.ndarray, tested: np.ndarray, labels: np.ndarray, kept: np.ndarray, strength: float
) -> np.ndarray:
    """Return the probabilities of classifiers by scikit-learn, (B, items, classes)."""
    each = zip(labels, kept, strict=True)
    return np.stack([_by_scikit_learn(learnt, tested, one, own, strength) for one, own in each])


def _by_scikit_learn(
    learnt: np.ndarray, tested: np.ndarray, labels: np.ndarray, kept: np.ndarray, strength: float
) -> np.ndarray:
    """Return the probabilities of one classifier, (items, classes)."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    mean, scale = learnt[kept].mean(0), learnt[kept].std(0)
    mean, scale = _spread(mean, scale, kept.sum(), np.finfo(learnt.dtype).eps)
    model = LogisticRegression(max_iter=1000, C=strength, class_weight="balanced")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit((learnt[kept] - mean) / scale, labels[kept])
    told: np.ndarray = model.predict_proba((tested - mean) / scale)
    return told


def _together(
    learnt: np.ndarray, tested: np.ndarray, labels: np.ndarray, kept: np.ndarray, strength: float
) -> np.ndarray:
    """Return the probabilities of some classifiers, (B, items, classes)."""
    hot = labels[..., None] == np.arange(labels.max() + 1)
    members = (hot & kept[..., None]).sum(1)
    balance = kept.sum(1, keepdims=True) / (hot.shape[2] * members)
    weights = strength * kept * np.take_along_axis(balance, labels, 1)
    products, across = _products(learnt, tested, kept)
    # Of two classes, only the second has a logit.
    target = hot[..., 1:] if hot.shape[2] == 2 else hot
    if (solved := _solved(products, target, weights)) is None:
        return _one_by_one(learnt, tested, labels, kept, strength)
    gradients, intercepts = solved
    return np.round(_predicted(across @ gradients + intercepts[:, None]), _DECIMALS)


def _spread(
    mean: np.ndarray, deviation: np.ndarray, count: np.ndarray, exact: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and deviation of values; 1 for a deviation that is rounding alone."""
    noise = count * exact * np.abs(mean)
    return mean, np.where(deviation > noise, deviation, 1)


def _products(
    learnt: np.ndarray, tested: np.ndarray, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return products of the items to train on, and of all to test on with them, (B, n, n)."""
    share = kept / kept.sum(1, keepdims=True)
    values = learnt.astype(np.float64)
    mean = share @ values
    apart = values - mean[:, None]
    deviation = np.sqrt(np.einsum("bn,bnd->bd", share, np.square(apart)))
    exact = np.finfo(learnt.dtype).eps
    scale = _spread(mean, deviation, kept.sum(1, keepdims=True), exact)[1][:, None]
    apart /= scale
    other = apart if tested is learnt else (tested - mean[:, None]) / scale
    # An item left out may be far from all others, and must not meet them as an infinity times 0.
    trained = np.where(kept[..., None], apart, 0)
    transposed = trained.swapaxes(1, 2)
    return trained @ transposed, other @ transposed


def _solved(
    products: np.ndarray, target: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the losses' gradients, (B, n, logits), and the intercepts, (B, logits).

    At the optimum; None if it was not reached.
    """
    count, items, logits = target.shape
    f = np.zeros(target.shape)
    same, wide = np.eye(logits), items * logits
    ones = np.broadcast_to(np.tile(same, (items, 1)), (count, wide, logits))
    # All intercepts may grow alike: let their sum be 0.
    alike = np.full((logits, logits), float(logits > 1)) * weights.sum(1)[:, None, None]
    for _ in range(_ITERATIONS):
        p = _predicted(f)[..., -logits:]
        gradient = weights[..., None] * (target - p)
        # (B, n, logits, logits), of each item.
        curvature = weights[..., None, None] * (p[..., None] * same - p[..., None] * p[:, :, None])
        right = np.einsum("bnkl,bnl->bnk", curvature, f) + gradient
        matrix = np.einsum("bnm,bmkl->bnkml", products, curvature).reshape(count, wide, wide)
        matrix[:, np.arange(wide), np.arange(wide)] += 1
        sides = np.concatenate([(products @ right).reshape(count, wide, 1), ones], 2)
        solved = np.linalg.solve(matrix, sides).reshape(count, items, logits, 1 + logits)
        curved = np.einsum("bnkl,bnlm->bkm", curvature, solved)
        rest = right.sum(1) - curved[..., 0]
        intercepts = np.linalg.solve(curved[..., 1:] + alike, rest[..., None])
        found = solved[..., 0] + np.squeeze(solved[..., 1:] @ intercepts[:, None], 3)
        # Those of items left out have no bound, and no effect.
        step = np.where(weights[..., None] > 0, found - f, 0)
        longest = np.abs(step).max((1, 2), keepdims=True)
        f += step * np.minimum(1, _LARGEST_STEP / np.maximum(longest, 1e-300))
        if longest.max() < _TOLERANCE:
            gradient = weights[..., None] * (target - _predicted(f)[..., -logits:])
            return gradient, intercepts[..., 0]
    return None


def _predicted(logits: np.ndarray) -> np.ndarray:
    """Return probabilities of the classes, (B, n, classes)."""
    if logits.shape[2] == 1:
        logits = np.concatenate([np.zeros_like(logits), logits], 2)
    powers = np.exp(logits - logits.max(2, keepdims=True))
    total: np.ndarray = powers / powers.sum(2, keepdims=True)
    return total
