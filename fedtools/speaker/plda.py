"""Comparison of speaker vectors: LDA, length normalisation, and two-covariance PLDA.

N. Brümmer and E. de Villiers, "The speaker partitioning problem", Odyssey 2010: a speaker is a
point y ~ N(mean, between), a vector of the speaker is x ~ N(y, within). Length normalisation:
D. Garcia-Romero and C. Espy-Wilson, Interspeech 2011. The usual order is LDA, length
normalisation, PLDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from scipy.linalg import eigh

from fedtools.core.errors import UserError
from fedtools.exchange.states import save_state
from fedtools.speaker.gmm import load_model

# Variances below this share of the mean variance are rounding errors.
_RANK = 1e-10


def length_normalise(vectors: np.ndarray) -> np.ndarray:
    """Scale (..., D) vectors to the length sqrt(D), so that entries are of order 1; 0 stays 0."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors * (np.sqrt(vectors.shape[-1]) / np.where(lengths > 0, lengths, 1))


@dataclass(frozen=True)
class Lda:
    """A linear map to the directions that separate speakers best.

    Attributes:
        mean: (D,), subtracted first.
        directions: (D, R); mapped vectors have the unit matrix as covariance within speakers and a
            diagonal one between them, largest in the first direction.
    """

    mean: np.ndarray
    directions: np.ndarray

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Map (N, D) vectors to (N, R)."""
        return (vectors - self.mean) @ self.directions

    def save(self, path: str | Path) -> None:
        """Write the map as a safetensors file."""
        save_state(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: str | Path) -> Lda:
        """Read what `save` wrote; a `UserError` names the file if it is anything else."""
        return cls(**load_model(path, {"mean": "D", "directions": "DR"}))


def train_lda(
    vectors: np.ndarray, speakers: np.ndarray, dimension: int, *, shrinkage: float = 1e-3
) -> Lda:
    """Fit the map.

    Args:
        vectors: (N, D).
        speakers: (N,), labels of any kind.
        dimension: R, at most D and less than the number of speakers.
        shrinkage: the share of a multiple of the unit matrix that is mixed into the covariance
            within speakers, because with few vectors some directions seem not to vary at all.

    Raises:
        UserError: if `dimension` is too large, or no speaker has vectors that differ.
    """
    numbers = _numbers(speakers)
    many = min(vectors.shape[1], numbers.max())
    if not 1 <= dimension <= many:
        problem = f"LDA to {dimension} dimensions, for {numbers.max() + 1} speakers"
        raise UserError(problem, remedy=f"take 1 to {many}")
    within, between, _ = _scatter(vectors, numbers)
    level = np.trace(within) / len(within)
    if not level > 0:
        raise UserError("no speaker has two vectors that differ", remedy="give several of each")
    within = (1 - shrinkage) * within + shrinkage * level * np.eye(len(within))
    _, directions = eigh(between, within)
    directions = directions[:, ::-1][:, :dimension]
    return Lda(vectors.mean(0).astype(np.float64), np.ascontiguousarray(directions))


@dataclass(frozen=True)
class Plda:
    """A two-covariance model, as in the module's docstring.

    Attributes:
        mean: (D,).
        between: (D, D), the covariance of speakers.
        within: (D, D), the covariance of a speaker's vectors.
    """

    mean: np.ndarray
    between: np.ndarray
    within: np.ndarray

    def scores(
        self, enrolled: np.ndarray, test: np.ndarray, counts: np.ndarray | None = None
    ) -> np.ndarray:
        """Compute log-likelihood ratios of all pairs: one speaker against two.

        Args:
            enrolled: (E, D), the mean of each model's vectors, which with `counts` is sufficient.
            test: (T, D), single vectors.
            counts: (E,), the numbers of vectors that were averaged; by default 1.

        Returns:
            (E, T), natural log.
        """
        variances, basis = self._diagonal()
        enrolled, test = ((some - self.mean) @ basis for some in (enrolled, test))
        counts = np.ones(len(enrolled)) if counts is None else np.asarray(counts, np.float64)
        # Dimensions are independent; the enrolled speaker's posterior mean is gain * enrolled.
        gain = counts[:, None] * variances / (counts[:, None] * variances + 1)
        centre = gain * enrolled
        spread = 1 + gain / counts[:, None]
        total = 1 + variances
        same = np.log(spread) + np.square(centre) / spread
        other = np.square(test) / total
        ratio = (
            -0.5 * same.sum(1)[:, None]
            + (centre / spread) @ test.T
            - 0.5 * (1 / spread) @ np.square(test).T
        )
        return ratio + 0.5 * (other.sum(1) + np.log(total).sum())

    def save(self, path: str | Path) -> None:
        """Write the model as a safetensors file."""
        save_state(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path: str | Path) -> Plda:
        """Read what `save` wrote; a `UserError` names the file if it is anything else."""
        model = cls(**load_model(path, {"mean": "D", "between": "DD", "within": "DD"}))
        if np.linalg.eigvalsh(model.within)[0] <= 0:
            remedy = "give a file of such a model"
            raise UserError("within is not a covariance", path=path, remedy=remedy)
        return model

    def _diagonal(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a basis (D, D) that makes `within` the unit matrix, and `between`'s variances."""
        variances, basis = eigh(self.between, self.within)
        return np.maximum(variances, 0), basis


def train_plda(
    vectors: np.ndarray, speakers: np.ndarray, *, iterations: int = 20
) -> tuple[Plda, list[float]]:
    """Fit the model by EM.

    Args:
        vectors: (N, D).
        speakers: (N,), labels of any kind.
        iterations: of EM, from the covariances of the samples.

    Returns:
        the model, and the log-likelihood of all vectors before each iteration and after the last,
        in nats; it never falls.

    Raises:
        UserError: if there are too few speakers, or vectors per speaker, for the dimensions.
    """
    vectors, numbers = np.asarray(vectors, np.float64), _numbers(speakers)
    within, between, mean = _scatter(vectors, numbers)
    count, speaker_count = len(vectors), numbers.max() + 1
    free = count - speaker_count
    if speaker_count < 2 or _is_singular(within):
        problem = f"PLDA of {count} vectors of {speaker_count} speakers in {len(mean)} dimensions"
        remedy = f"use LDA first, to at most {free} dimensions" if free else "give several of each"
        raise UserError(problem, remedy=remedy)
    # The samples' means also vary within speakers, and the covariance of few speakers is singular.
    between = between + 1e-3 * within
    model = Plda(mean, between, within * (count / free))
    groups = list(_groups(vectors, numbers))
    history = [_log_likelihood(model, groups, within * count)]
    for _ in range(iterations):
        model = _em_step(model, groups, within * count)
        history.append(_log_likelihood(model, groups, within * count))
    return model, history


def _em_step(model: Plda, groups: list[tuple[int, np.ndarray]], deviations: np.ndarray) -> Plda:
    """Run one iteration of EM.

    Args:
        model: the model so far.
        groups: a number of vectors, and the means of the speakers with that number.
        deviations: (D, D), the scatter of the vectors around the means of their speakers.
    """
    size, speakers = len(model.mean), sum(len(means) for _, means in groups)
    first, second, within = np.zeros(size), np.zeros((size, size)), deviations.copy()
    for count, means in groups:
        # The posterior of y: its covariance, and its means relative to the model's mean, which are
        # shrunk from the speakers' sample means.
        total = model.between + model.within / count
        gain = np.linalg.solve(total, model.between).T
        covariance = model.between - gain @ model.between
        offsets = (means - model.mean) @ gain.T
        first += offsets.sum(0)
        second += offsets.T @ offsets + len(means) * covariance
        apart = means - model.mean - offsets
        within += count * (apart.T @ apart + len(means) * covariance)
    shift = first / speakers
    between = second / speakers - np.outer(shift, shift)
    frames = sum(count * len(means) for count, means in groups)
    return Plda(model.mean + shift, _symmetric(between), _symmetric(within / frames))


def _log_likelihood(
    model: Plda, groups: list[tuple[int, np.ndarray]], deviations: np.ndarray
) -> float:
    """Compute the log-likelihood of all vectors.

    The speakers' sample means, and the deviations from them, are independent.
    """
    size = len(model.mean)
    total = -0.5 * float(np.trace(np.linalg.solve(model.within, deviations)))
    within = np.linalg.slogdet(2 * np.pi * model.within)[1]
    for count, means in groups:
        covariance = model.between + model.within / count
        apart = means - model.mean
        distances = (apart * np.linalg.solve(covariance, apart.T).T).sum()
        each = np.linalg.slogdet(2 * np.pi * covariance)[1] + size * np.log(count)
        total -= 0.5 * float(distances + len(means) * (each + (count - 1) * within))
    return total


def _numbers(speakers: np.ndarray) -> np.ndarray:
    return np.unique(np.asarray(speakers), return_inverse=True)[1]


def _scatter(vectors: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return covariances within and between speakers, vectors weighted equally, and the mean."""
    vectors = np.asarray(vectors, np.float64)
    counts = np.bincount(numbers)
    means = _sums(vectors, numbers) / counts[:, None]
    mean = vectors.mean(0)
    inside, outside = vectors - means[numbers], means - mean
    count = len(vectors)
    return inside.T @ inside / count, (outside.T * counts) @ outside / count, mean


def _groups(vectors: np.ndarray, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield speakers by their number of vectors: the number, and their means (speakers, D)."""
    counts = np.bincount(numbers)
    means = _sums(vectors, numbers) / counts[:, None]
    for count in np.unique(counts):
        yield int(count), means[counts == count]


def _sums(vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    sums = np.zeros((numbers.max() + 1, vectors.shape[1]))
    np.add.at(sums, numbers, vectors)
    return sums


def _is_singular(covariance: np.ndarray) -> bool:
    values = np.linalg.eigvalsh(covariance)
    return not values[0] > _RANK * values.mean()


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return (matrix + matrix.T) / 2
