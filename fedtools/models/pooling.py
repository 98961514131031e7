"""Vectors of whole utterances from features of their frames."""

from __future__ import annotations

import torch
from torch import Tensor


def pooled(features: Tensor, lengths: Tensor) -> Tensor:
    """Mean and standard deviation over the valid frames: (B, T, D) and (B,) to (B, 2 D)."""
    frames = torch.arange(features.shape[1], device=features.device)
    inside = (frames < lengths[:, None].to(features.device))[..., None]
    count = inside.sum(1)
    mean = (features * inside).sum(1) / count
    square = ((features - mean[:, None]).square() * inside).sum(1) / count
    return torch.cat([mean, (square + 1e-8).sqrt()], 1)
