"""A batch of keyword clips, as networks and their losses take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class ClipBatch:
    """One step's clips of the first K clients of a stack.

    Attributes:
        mfcc: (K, B, frames, coefficients).
        labels: (K, B) class indices.
        weights: (K, B); each client's sum to 1, and those of padding clips are 0.
        valid: (K, B), 1 or 0 where smaller batches were padded, or None if none was.
    """

    mfcc: Tensor
    labels: Tensor
    weights: Tensor
    valid: Tensor | None

    # Every batch of a client has as many clips, so that each counts alike in its mean loss.
    amount: ClassVar[int] = 1

    @property
    def frames(self) -> int:
        """Of all clips."""
        return self.labels.numel() * self.mfcc.shape[2]

    @property
    def active(self) -> int:
        """Clients that still train."""
        return len(self.labels)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over each client's clips: (K, B) -> (K,)."""
        return (values * self.weights).sum(1)
