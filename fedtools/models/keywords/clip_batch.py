"""A batch of keyword clips, the input of networks and losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class ClipBatch:
    """The clips of one step, for the first K clients of a stack.

    Attributes:
        mfcc: (K, B, frames, coefficients).
        labels: (K, B) class indices.
        weights: (K, B); the weights of each client sum to 1, and padding clips have 0.
        valid: (K, B), 0 for padding clips and 1 for others, or None if no batch was padded.
    """

    mfcc: Tensor
    labels: Tensor
    weights: Tensor
    valid: Tensor | None

    # All batches of a client have the same number of clips, so they count alike in its mean loss.
    amount: ClassVar[int] = 1

    @property
    def frames(self) -> int:
        """Return the number of frames in all clips."""
        return self.labels.numel() * self.mfcc.shape[2]

    @property
    def active(self) -> int:
        """Return the number of clients that are still training."""
        return len(self.labels)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each client's clips: (K, B) -> (K,)."""
        return (values * self.weights).sum(1)
