"""Frozen normalisations of the input of a keyword head on a pretrained encoder.

A projection is PCA whitening, fitted on public data: z = W (x - mu), where the rows of W are
v_i / sqrt(lambda_i) for the largest eigenvalues lambda_i, with eigenvectors v_i, of the covariance
of x (A. Kessy, A. Lewin, K. Strimmer: Optimal whitening and decorrelation, The American
Statistician 72, 2018, section 3.2). A layer normalisation has no parameters, and needs no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.core.errors import UserError
from fedtools.exchange.states import check_finite, load_state, read_layout

# Rows that are in double precision at a time. Sums depend on it to the last bit.
_AT_ONCE = 4096
# A variance of this share of the mean square is rounding: encoders compute in single precision,
# with relative errors of some 1e-7, which are squared here.
_ZERO = 1e-12


@dataclass(frozen=True)
class Whitening:
    """PCA whitening of vectors of D values, in double precision.

    Attributes:
        mean: mu, (D,).
        map: W, (R, D), largest eigenvalue first; the largest component of each row is positive.
        share: the part of the variance that lies in these R dimensions, 0 to 1.
    """

    mean: np.ndarray
    map: np.ndarray
    share: float


def fit(values: np.ndarray, dimension: int) -> Whitening:
    """Fit mean and PCA whitening; the same values give the same bytes for any number of threads.

    Args:
        values: (N, D); the covariance is their sum of squares divided by N - 1.
        dimension: R.

    Raises:
        FloatingPointError: if a value is not finite.
        ValueError: if the values vary in fewer than R dimensions.
    """
    from threadpoolctl import threadpool_limits

    count = len(values)

    def blocks() -> Iterator[np.ndarray]:
        for begin in range(0, count, _AT_ONCE):
            yield values[begin : begin + _AT_ONCE].astype(np.float64)

    mean = np.asarray(sum(block.sum(0) for block in blocks())) / count
    if not np.isfinite(mean).all():
        raise FloatingPointError("NaN or infinity in an output")
    with threadpool_limits(1, "blas"):
        centred = (block - mean for block in blocks())
        covariance = np.asarray(sum(block.T @ block for block in centred)) / (count - 1)
        rising, vectors = np.linalg.eigh(covariance)
    eigenvalues, rows = rising[::-1][:dimension], vectors.T[::-1][:dimension]
    if len(rows) < dimension or eigenvalues[-1] <= _ZERO * (eigenvalues[0] + mean @ mean):
        raise ValueError(f"the outputs vary in fewer than {dimension} dimensions")
    largest = np.take_along_axis(rows, abs(rows).argmax(1)[:, None], 1)
    rows = rows * np.sign(largest) / np.sqrt(eigenvalues)[:, None]
    return Whitening(mean, rows, float(eigenvalues.sum() / rising.sum()))


def read_projection(path: Path, size: int) -> dict[str, np.ndarray]:
    """Read a projection: "mean" (D,) and "map" (R, D), float32, with R from 1 to D.

    Args:
        path: the file of `fedtools fit-projection`, or an experiment's copy.
        size: D.

    Raises:
        UserError: if the file is missing, damaged or not finite, or its tensors are others.
    """
    shape = read_layout(path).spec.get("map", ((), ""))[0]
    # Bounded by the model's own size, before any value is read.
    rows = min(max(shape[0], 1), size) if shape else 1
    state = load_state(path, {"map": ((rows, size), "float32"), "mean": ((size,), "float32")})
    check_finite(state, path)
    return state


class Projection(nn.Module):
    """A projection of (K, B, D) to (K, B, R); its tensors are those of a file.

    Args:
        path, size: see `read_projection`.

    Attributes:
        outputs: R.
        mean, map: (1, D) and (1, R, D), which all clients of a stack share.
    """

    held_once = ("mean", "map")
    mean: Tensor
    map: Tensor

    def __init__(self, path: Path, size: int):
        super().__init__()
        for name, value in read_projection(path, size).items():
            self.register_buffer(name, torch.tensor(value)[None])
        self.outputs = self.map.shape[1]

    def forward(self, values: Tensor) -> Tensor:
        # In full precision: small differences from the mean are multiplied by large numbers.
        with torch.autocast(values.device.type, enabled=False):
            return F.linear(values.to(self.mean) - self.mean[0], self.map[0])


def make_normalisation(
    kind: str, size: int, path: Path | None, where: str | Path
) -> tuple[nn.Module, int]:
    """Return a normalisation, and the number of its outputs.

    Args:
        kind: see `Pretrained.normalise`.
        size: the number of values that it takes.
        path: the file of the projection, for this kind.
        where: source of the options, for messages.

    Raises:
        UserError: if there is no projection, or it does not fit.
    """
    if kind == "layer":
        return nn.LayerNorm(size, elementwise_affine=False), size
    if kind == "none":
        return nn.Identity(), size
    if path is None:
        remedy = "give --asset projection=FOLDER"
        raise UserError("normalise: projection without a projection", path=where, remedy=remedy)
    found = Projection(path, size)
    return found, found.outputs
