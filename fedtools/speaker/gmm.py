"""A universal background model: a mixture of Gaussians with diagonal covariances.

D. A. Reynolds, T. F. Quatieri and R. B. Dunn, "Speaker verification using adapted Gaussian mixture
models", Digital Signal Processing 10 (2000). It is grown from one Gaussian by splitting, as Kaldi
grows its mixtures, so that no k-means is needed. Frames are read in passes, an utterance at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.exchange.states import check_finite, load_state, save_state

# The most frames at a time, which bounds the memory: (frames, Gaussians) of float64.
_BLOCK = 4096
# As in Kaldi, the halves of a split Gaussian move apart by this many standard deviations x N(0, 1).
_SPLIT = 0.2
# A Gaussian with fewer frames keeps its mean and variance: theirs would not be reliable.
_MIN_FRAMES = 10.0
_MIN_WEIGHT = 1e-10
# The smallest variance, and the largest value of anything in a model: features are far from both.
_LEAST, _LARGEST = 1e-30, 1e30


class Moments(NamedTuple):
    """Sums over frames, weighted by the posteriors of the Gaussians; they add up over utterances.

    Attributes:
        counts: (C,), frames.
        first: (C, D), sums of frames.
        second: (C, D), sums of squares.
    """

    counts: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def plus(self, other: Moments) -> Moments:
        """Return the moments of the frames of both."""
        return Moments(*(one + two for one, two in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Gmm:
    """A mixture of C Gaussians over D dimensions.

    Attributes:
        weights: (C,), positive, of sum 1.
        means: (C, D).
        variances: (C, D), positive.
    """

    weights: np.ndarray
    means: np.ndarray
    variances: np.ndarray

    def log_joint(self, frames: np.ndarray) -> np.ndarray:
        """Return log(weight x density) of (T, D) frames for each Gaussian, (T, C), natural log."""
        constants, slopes, curvatures = self._polynomial
        return constants + frames @ slopes + np.square(frames) @ curvatures

    def posteriors(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the Gaussians' posteriors, (T, C), and log-likelihoods, (T,), of (T, D) frames."""
        joint = self.log_joint(frames)
        top = joint.max(1, keepdims=True)
        np.exp(np.subtract(joint, top, out=joint), out=joint)
        total = joint.sum(1, keepdims=True)
        joint /= total
        return joint, (top + np.log(total))[:, 0]

    def moments(self, frames: np.ndarray) -> tuple[Moments, float]:
        """Return weighted sums over (T, D) frames, T >= 0, and the sum of their log-likelihoods."""
        sums, log_likelihood = _no_moments(*self.means.shape), 0.0
        for block in _blocks(frames):
            posteriors, each = self.posteriors(block)
            first, second = posteriors.T @ block, posteriors.T @ np.square(block)
            sums = sums.plus(Moments(posteriors.sum(0), first, second))
            log_likelihood += float(each.sum())
        return sums, log_likelihood

    def save(self, path: str | Path) -> None:
        """Write the mixture as a safetensors file."""
        save_state(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: str | Path) -> Gmm:
        """Read what `save` wrote; raise a `UserError` that names any other file."""
        return cls(**load_model(path, {"weights": "C", "means": "CD", "variances": "CD"}))

    @cached_property
    def _polynomial(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the log-densities as polynomials of a frame: constants (C,), then (D, C) twice."""
        precisions = 1 / self.variances
        constants = -0.5 * (
            np.log(2 * np.pi * self.variances) + np.square(self.means) * precisions
        ).sum(1)
        return constants + np.log(self.weights), (self.means * precisions).T, -0.5 * precisions.T


def train_ubm(
    utterances: Iterable[np.ndarray],
    gaussians: int,
    *,
    seed: int,
    iterations: int = 20,
    growing: int = 4,
    variance_floor: float = 0.01,
) -> tuple[Gmm, list[float]]:
    """Fit a mixture to frames by EM, doubling the Gaussians from one until there are enough.

    It reads all utterances once for the start, `growing` times for each doubling but the last, and
    `iterations` times at the full size.

    Args:
        utterances: (frames, D) each; an iterable that can be iterated over many times, such as a
            list, or an object whose `__iter__` reads files.
        gaussians: the number of Gaussians.
        seed: random seed of the directions in which Gaussians are split.
        iterations: of EM with all Gaussians.
        growing: iterations of EM after every doubling but the last.
        variance_floor: variances are no smaller than this share of the variance of all frames.

    Returns:
        the mixture, and the mean log-likelihood of a frame before each of the last `iterations`
        and after the last, in nats; it never falls.

    Raises:
        UserError: if there are no frames, fewer frames than Gaussians, or NaN or Inf in them.
        TypeError: if `utterances` can be iterated over only once.
    """
    check_again(utterances)
    model = _one_gaussian(utterances, gaussians)
    floor = variance_floor * model.variances[0]
    while len(model.weights) < gaussians:
        model = _split(model, gaussians, seed)
        for _ in range(growing if len(model.weights) < gaussians else 0):
            model = _update(model, accumulate(model, utterances)[0], floor)
    history = []
    for _ in range(iterations):
        sums, log_likelihood = accumulate(model, utterances)
        history.append(log_likelihood)
        model = _update(model, sums, floor)
    history.append(accumulate(model, utterances)[1])
    return model, history


def accumulate(model: Gmm, utterances: Iterable[np.ndarray]) -> tuple[Moments, float]:
    """Return moments of many utterances, and a frame's mean log-likelihood (NaN without frames)."""
    sums, total = _no_moments(*model.means.shape), 0.0
    for frames in utterances:
        more, log_likelihood = model.moments(frames)
        sums, total = sums.plus(more), total + log_likelihood
    frames = sums.counts.sum()
    return sums, float(total / frames) if frames else float("nan")


def check_again(items: Iterable) -> None:
    """Raise a `TypeError` for a generator, which would be empty the second time."""
    if iter(items) is items:
        raise TypeError("an iterator can be read only once: pass a list, or an object to iterate")


def load_model(path: str | Path, axes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Read float64 arrays whose dimensions are named by letters; equal letters mean equal sizes.

    Args:
        path: a safetensors file.
        axes: array -> letters of its dimensions, such as "CD"; names that contain `variances` or
            `weights` must be positive.

    Raises:
        UserError: naming the file, if it holds other arrays, or NaN or Inf, or sizes disagree.
    """
    arrays = load_state(path)
    remedy = "give a file of such a model"
    if arrays.keys() != axes.keys():
        problem = f"holds {', '.join(map(ascii, arrays))[:100]}, expected {', '.join(axes)}"
        raise UserError(problem, path=path, remedy=remedy)
    check_finite(arrays, path)
    sizes: dict[str, int] = {}
    for name, letters in axes.items():
        shape, kind = arrays[name].shape, arrays[name].dtype
        known = dict(zip(letters, shape, strict=False))
        same = all(sizes.setdefault(letter, size) == size for letter, size in known.items())
        if kind != np.float64 or len(shape) != len(letters) or not same or 0 in shape:
            raise UserError(f"{name} is {kind} of shape {shape}", path=path, remedy=remedy)
        if ("variances" in name or "weights" in name) and not (arrays[name] > 0).all():
            raise UserError(f"{name} are not all positive", path=path, remedy=remedy)
        # Beyond these, squares of differences over variances are infinite, and posteriors NaN.
        low = _LEAST if "variances" in name else 0.0
        if not ((low <= np.abs(arrays[name])) & (np.abs(arrays[name]) <= _LARGEST)).all():
            problem = f"{name} are not all within {low:g} and {_LARGEST:g}"
            raise UserError(problem, path=path, remedy=remedy)
    return arrays


def _no_moments(gaussians: int, dimensions: int) -> Moments:
    return Moments(np.zeros(gaussians), *np.zeros((2, gaussians, dimensions)))


def _blocks(frames: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(frames), _BLOCK):
        yield np.asarray(frames[start : start + _BLOCK], np.float64)


def _one_gaussian(utterances: Iterable[np.ndarray], gaussians: int) -> Gmm:
    """Fit one Gaussian to all frames; a dimension that never changes gets the variance 1."""
    count, first, second, shift = 0, 0.0, 0.0, None
    for frames in utterances:
        if not np.isfinite(frames).all():
            raise UserError("NaN or Inf in the frames of a background model")
        for block in _blocks(frames):
            # Relative to the first frame, because squares of large values would lose precision.
            shift = block[0].copy() if shift is None else shift
            count += len(block)
            first, second = first + (block - shift).sum(0), second + np.square(block - shift).sum(0)
    if count < max(gaussians, 1) or shift is None:
        raise UserError(
            f"{count} frames for a background model of {gaussians} Gaussians", remedy="give more"
        )
    mean = first / count
    variances = second / count - np.square(mean)
    variances = np.where(variances > 1e-10 * np.square(shift + mean), variances, 1.0)
    return Gmm(np.ones(1), (shift + mean)[None], variances[None])


def _split(model: Gmm, most: int, seed: int) -> Gmm:
    """Split the heaviest Gaussians in two, as many as possible without exceeding `most`."""
    size, dimensions = model.means.shape
    heaviest = np.argsort(-model.weights, kind="stable")[: most - size]
    random = generator(seed, "split", size)
    deviations = np.sqrt(model.variances[heaviest])
    apart = _SPLIT * deviations * random.normal(size=(len(heaviest), dimensions))
    weights, means = model.weights.copy(), model.means.copy()
    weights[heaviest] /= 2
    means[heaviest] += apart
    return Gmm(
        np.concatenate([weights, weights[heaviest]]),
        np.concatenate([means, model.means[heaviest] - apart]),
        np.concatenate([model.variances, model.variances[heaviest]]),
    )


def _update(model: Gmm, sums: Moments, floor: np.ndarray) -> Gmm:
    """Return the mixture of highest expected likelihood with variances above a (D,) floor."""
    weights = np.maximum(sums.counts / sums.counts.sum(), _MIN_WEIGHT)
    known = (sums.counts >= _MIN_FRAMES)[:, None]
    counts = np.where(known, sums.counts[:, None], 1.0)
    means = np.where(known, sums.first / counts, model.means)
    variances = np.where(known, sums.second / counts - np.square(means), model.variances)
    return Gmm(weights / weights.sum(), means, np.maximum(variances, floor))
