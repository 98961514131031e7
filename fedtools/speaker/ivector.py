"""I-vectors: speakers as points in a low-dimensional space of shifts of a mixture's means.

N. Dehak, P. Kenny, R. Dehak, P. Dumouchel and P. Ouellet, "Front-end factor analysis for speaker
verification", IEEE TASLP 19 (2011). A frame x of Gaussian c is drawn from

    x = m_c + T_c w + noise of the diagonal covariance Sigma_c,   w ~ N(0, I),

with one w, the i-vector, for all frames of a set: of an utterance or of a speaker. The background
model gives each frame's posteriors of Gaussians, which are not trained further. Training is by EM
with minimum divergence (P. Kenny, "A small footprint i-vector extractor", Odyssey 2012). For online
i-vectors as features of acoustic models see G. Saon et al., ASRU 2013, and Kaldi's
`ivector-extract-online2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.seeds import generator
from fedtools.exchange.states import save_state
from fedtools.speaker.gmm import Gmm, Moments, check_again, load_model

# Sets at a time, each of which needs a matrix of (R, R).
_BATCH = 64
# A Gaussian with fewer frames keeps its loadings and variances.
_MIN_FRAMES = 10.0
# Training starts from loadings of this many standard deviations, times N(0, 1).
_START = 0.1


class _Batch(NamedTuple):
    """Moments of n sets: (n, C), (n, C, D), and (C, D) of all together."""

    counts: np.ndarray
    first: np.ndarray
    second: np.ndarray


@dataclass(frozen=True)
class IvectorExtractor:
    """The module's model, with C Gaussians, D dimensions of frames, and R of i-vectors.

    Attributes:
        ubm: gives the posteriors of the Gaussians.
        means: m, (C, D).
        loadings: T, (C, D, R).
        variances: Sigma, (C, D).
    """

    ubm: Gmm
    means: np.ndarray
    loadings: np.ndarray
    variances: np.ndarray

    def extract(
        self, sets: Iterable[Moments], *, posterior_scale: float = 1.0, max_count: float = 0.0
    ) -> np.ndarray:
        """Extract the i-vectors of sets of frames: the posterior means of w.

        Args:
            sets: moments under `ubm`, such as those of all frames of each speaker.
            posterior_scale: the weight of a frame. Less than 1 allows for neighbouring frames being
                alike; Kaldi's recipes use 0.1 for features.
            max_count: with more frames than this (after scaling), the prior's weight grows as if
                there were no more than this; 0 for no limit. Kaldi's `max-count`.

        Returns:
            (sets, R); zeros for a set without frames.
        """
        rows = [np.zeros((0, self.loadings.shape[2]))]
        for some in _batches(sets):
            counts, first = posterior_scale * some.counts, posterior_scale * some.first
            rows.append(self._solve(counts, first, max_count))
        return np.concatenate(rows)

    def online(
        self,
        frames: np.ndarray,
        *,
        every: int = 10,
        before: Moments | None = None,
        posterior_scale: float = 0.1,
        max_count: float = 0.0,
    ) -> np.ndarray:
        """Extract the i-vectors of all frames so far, as an utterance goes on.

        Kaldi prunes the posteriors for speed, and solves by a few steps from the row before; this
        function does neither.

        Args:
            frames: (T, D).
            every: frames from one i-vector to the next; Kaldi's `ivector-period`.
            before: moments of earlier frames of the same speaker.
            posterior_scale, max_count: see `extract`.

        Returns:
            (ceil(T / every), R); row i covers the frames 0 to i * every, the last one included.
        """
        options = {"posterior_scale": posterior_scale, "max_count": max_count}
        sums = [self.ubm.moments(frames[:0])[0] if before is None else before]
        rows = [np.zeros((0, self.loadings.shape[2]))]
        begin = 0
        for end in range(1, len(frames) + 1, every):
            sums.append(sums[-1].plus(self.ubm.moments(frames[begin:end])[0]))
            begin = end
            if len(sums) > _BATCH or end + every > len(frames):
                rows.append(self.extract(sums[1:], **options))
                sums = sums[-1:]
        return np.concatenate(rows)

    def save(self, path: str | Path) -> None:
        """Write the extractor, its background model included, as a safetensors file."""
        ubm = {name: getattr(self.ubm, name) for name in ("weights", "means", "variances")}
        own = {name: getattr(self, name) for name in ("means", "loadings", "variances")}
        save_state(path, {**{f"ubm_{name}": array for name, array in ubm.items()}, **own})

    @classmethod
    def load(cls, path: str | Path) -> IvectorExtractor:
        """Read what `save` wrote; a `UserError` names the file if it is anything else."""
        axes = {"means": "CD", "loadings": "CDR", "variances": "CD"}
        ubm = {"ubm_weights": "C", "ubm_means": "CD", "ubm_variances": "CD"}
        arrays = load_model(path, axes | ubm)
        return cls(Gmm(*(arrays[name] for name in ubm)), *(arrays[name] for name in axes))

    def systems(self, counts: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the posteriors of w as systems of equations: precision x mean = right side.

        Args:
            counts: (sets, C).
            first: (sets, C, D).

        Returns:
            right sides (sets, R), and precisions without the prior (sets, R, R).
        """
        projection, products = self._terms
        centred = first - counts[..., None] * self.means
        size = self.loadings.shape[2]
        return (
            centred.reshape(len(counts), -1) @ projection,
            (counts @ products).reshape(-1, size, size),
        )

    def _solve(self, counts: np.ndarray, first: np.ndarray, max_count: float) -> np.ndarray:
        right, precisions = self.systems(counts, first)
        prior = np.maximum(1.0, counts.sum(1) / max_count) if max_count else np.ones(len(counts))
        precisions += prior[:, None, None] * np.eye(right.shape[1])
        return np.linalg.solve(precisions, right[..., None])[..., 0]

    @cached_property
    def _terms(self) -> tuple[np.ndarray, np.ndarray]:
        """Return T' / Sigma as (C * D, R), and T_c' / Sigma_c T_c per Gaussian as (C, R * R)."""
        scaled = self.loadings / self.variances[..., None]
        products = scaled.transpose(0, 2, 1) @ self.loadings
        return scaled.reshape(-1, scaled.shape[2]), products.reshape(len(products), -1)


class _Sums:
    """Sums of the expectation step over sets of frames, where v is w with a 1 appended."""

    def __init__(self, model: IvectorExtractor):
        gaussians, dimensions, size = model.loadings.shape
        # Moments of all frames, and what w adds to their log-likelihood (see
        # _log_likelihood_at_zero).
        self.moments = Moments(np.zeros(gaussians), *np.zeros((2, gaussians, dimensions)))
        self.gain = 0.0
        # Sums of E[v v'], of counts x E[v v'], and of centred frames x E[v]'.
        self.squares = np.zeros((size + 1, size + 1))
        self.weighted = np.zeros((gaussians, size + 1, size + 1))
        self.crossed = np.zeros((gaussians, dimensions, size + 1))

    def add(self, model: IvectorExtractor, some: _Batch) -> None:
        """Add a batch of sets."""
        right, precisions = model.systems(some.counts, some.first)
        count, size = right.shape
        precisions += np.eye(size)
        covariances = np.linalg.inv(precisions)
        means = np.ones((count, size + 1))
        means[:, :size] = (covariances @ right[..., None])[..., 0]
        squares = means[:, :, None] * means[:, None, :]
        squares[:, :size, :size] += covariances
        centred = (some.first - some.counts[..., None] * model.means).reshape(count, -1)
        self.moments = self.moments.plus(
            Moments(some.counts.sum(0), some.first.sum(0), some.second)
        )
        logs = np.linalg.slogdet(precisions)[1]
        self.gain += 0.5 * float((right * means[:, :size]).sum() - logs.sum())
        self.squares += squares.sum(0)
        self.weighted += (some.counts.T @ squares.reshape(count, -1)).reshape(self.weighted.shape)
        self.crossed += (centred.T @ means).reshape(self.crossed.shape)


def train_extractor(
    ubm: Gmm,
    sets: Iterable[Moments],
    dimension: int,
    *,
    seed: int,
    iterations: int = 10,
    variance_floor: float = 0.01,
) -> tuple[IvectorExtractor, list[float]]:
    """Fit means, loadings and variances to sets of frames.

    Args:
        ubm: the background model; its means and variances are the start.
        sets: moments under `ubm` of every utterance, or speaker; an iterable that can be iterated
            over many times.
        dimension: R.
        seed: random seed of the initial loadings.
        iterations: of EM.
        variance_floor: variances are no smaller than this share of the background model's.

    Returns:
        the extractor, and the mean log-likelihood of a frame, given the frames' Gaussians, before
        each iteration and after the last, in nats; it never falls.

    Raises:
        UserError: if there is no set with frames.
        TypeError: if `sets` can be iterated over only once.
    """
    check_again(sets)
    random = generator(seed, "loadings")
    loadings = random.normal(size=(*ubm.means.shape, dimension)) * _START
    loadings *= np.sqrt(ubm.variances)[..., None]
    model = IvectorExtractor(ubm, ubm.means, loadings, ubm.variances)
    history = []
    for iteration in range(iterations + 1):
        sums = _Sums(model)
        for some in _batches(sets):
            sums.add(model, some)
        frames = float(sums.moments.counts.sum())
        if not frames:
            raise UserError("no frames to train an i-vector extractor on")
        history.append((_log_likelihood_at_zero(model, sums.moments) + sums.gain) / frames)
        if iteration < iterations:
            model = _maximise(model, sums, variance_floor * ubm.variances)
    return model, history


def _maximise(model: IvectorExtractor, sums: _Sums, floor: np.ndarray) -> IvectorExtractor:
    """Return the best parameters given w, transformed so that w has zero mean, unit covariance."""
    counts = sums.moments.counts[:, None]
    known = counts >= _MIN_FRAMES
    # A regression on w and 1 for each dimension, which does not depend on the variances.
    weighted = np.where(known[..., None], sums.weighted, np.eye(len(sums.squares)))
    slopes = np.linalg.solve(weighted, sums.crossed.transpose(0, 2, 1)).transpose(0, 2, 1)
    left = _squares(model, sums.moments) - (slopes * sums.crossed).sum(2)
    variances = np.maximum(left / np.where(known, counts, 1.0), floor)
    variances = np.where(known, variances, model.variances)
    loadings = np.where(known[..., None], slopes[..., :-1], model.loadings)
    means = np.where(known, model.means + slopes[..., -1], model.means)
    # Minimum divergence: w, as estimated, is mean + root x w of the prior.
    squares = sums.squares / sums.squares[-1, -1]
    mean = squares[-1, :-1]
    root = np.linalg.cholesky(squares[:-1, :-1] - np.outer(mean, mean))
    return IvectorExtractor(model.ubm, means + loadings @ mean, loadings @ root, variances)


def _log_likelihood_at_zero(model: IvectorExtractor, moments: Moments) -> float:
    """Return the log-density of all frames if every w were 0.

    For a set with the right side b and the precision P, the density with w integrated out is
    this one times exp(b' P^-1 b / 2) / sqrt(|P|).
    """
    logs = moments.counts[:, None] * np.log(2 * np.pi * model.variances)
    return -0.5 * float((logs + _squares(model, moments) / model.variances).sum())


def _squares(model: IvectorExtractor, moments: Moments) -> np.ndarray:
    """Return the sums of squared distances to the means, (C, D)."""
    counts, first, second = moments
    return second - 2 * model.means * first + counts[:, None] * np.square(model.means)


def _batches(sets: Iterable[Moments]) -> Iterator[_Batch]:
    sets = iter(sets)
    while some := list(islice(sets, _BATCH)):
        counts, first, second = zip(*some, strict=True)
        yield _Batch(np.stack(counts), np.stack(first), sum(second))
