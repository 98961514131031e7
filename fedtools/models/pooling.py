"""Pooling of frame features to vectors of whole utterances."""

from __future__ import annotations

import torch
from torch import Tensor


def inside(values: Tensor, lengths: Tensor) -> Tensor:
    """Return whether each frame is within its utterance: (B, T, D) and (B,) to (B, T)."""
    frames = torch.arange(values.shape[1], device=values.device)
    return frames < lengths[:, None].to(values.device)


def pooled(features: Tensor, lengths: Tensor) -> Tensor:
    """Return mean and standard deviation over valid frames: (B, T, D) and (B,) to (B, 2 D)."""
    own = inside(features, lengths)[..., None]
    count = own.sum(1)
    mean = (features * own).sum(1) / count
    square = ((features - mean[:, None]).square() * own).sum(1) / count
    return torch.cat([mean, (square + 1e-8).sqrt()], 1)
