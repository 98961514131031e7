"""Vectors of whole utterances from features of their frames."""

from __future__ import annotations

import torch
from torch import Tensor


def inside(values: Tensor, lengths: Tensor) -> Tensor:
    """Whether a frame is one of an utterance's own: (B, T, D) and (B,) to (B, T)."""
    frames = torch.arange(values.shape[1], device=values.device)
    return frames < lengths[:, None].to(values.device)


def pooled(features: Tensor, lengths: Tensor) -> Tensor:
    """Mean and standard deviation over the valid frames: (B, T, D) and (B,) to (B, 2 D)."""
    own = inside(features, lengths)[..., None]
    count = own.sum(1)
    mean = (features * own).sum(1) / count
    square = ((features - mean[:, None]).square() * own).sum(1) / count
    return torch.cat([mean, (square + 1e-8).sqrt()], 1)
