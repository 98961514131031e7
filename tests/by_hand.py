"""Formulas of papers, written out without any of the package's code."""

from __future__ import annotations

import torch
from torch import Tensor


def mmd_by_hand(ours: Tensor, theirs: Tensor) -> Tensor:
    """Compute the squared MMD of two sets (B, D): sums over all pairs, five Gaussian kernels."""
    both = [*ours, *theirs]
    signs = [1 / len(ours)] * len(ours) + [-1 / len(theirs)] * len(theirs)
    pairs = [(i, j) for i in range(len(both)) for j in range(len(both))]
    width = sum((both[i] - both[j]).square().sum().item() for i, j in pairs) / len(pairs)
    width += 1e-3 * sum(one.square().sum().item() for one in both) / len(both)
    total = torch.zeros(())
    for i, j in pairs:
        apart = (both[i] - both[j]).square().sum()
        for factor in (0.25, 0.5, 1, 2, 4):
            total = total + signs[i] * signs[j] * torch.exp(-apart / (factor * width))
    return total
