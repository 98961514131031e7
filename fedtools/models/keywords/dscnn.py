"""Depth-separable convolutions (Y. Zhang et al.: Hello edge, arXiv 1711.07128, DS-CNN)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Network, Sizes, pooled
from fedtools.models.stacked import NORMS, Conv2d, Linear, Pointwise


class DsCnn(Network):
    """Convolution, then blocks of depthwise and pointwise convolutions (DSCNN)."""

    def __init__(self, sizes: DsCnnSizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        channels, norm = sizes.channels, NORMS[sizes.norm]
        self.first = Conv2d(clients, 1, channels, (10, 4), stride=(2, 2), padding=(5, 1))
        self.first_norm = norm(clients, channels)
        self.depthwise, self.pointwise = nn.ModuleList(), nn.ModuleList()
        self.norms = nn.ModuleList(norm(clients, channels) for _ in range(2 * sizes.blocks))
        same = {"padding": (1, 1), "bias": False}
        for _ in range(sizes.blocks):
            self.depthwise.append(
                Conv2d(clients, channels, channels, (3, 3), groups=channels, **same)
            )
            self.pointwise.append(Pointwise(clients, channels, channels))
        self.head = Linear(clients, channels, classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        images = F.relu(self.first_norm(self.first(mfcc.transpose(0, 1)), valid))
        layers = [
            layer for pair in zip(self.depthwise, self.pointwise, strict=True) for layer in pair
        ]
        for layer, norm in zip(layers, self.norms, strict=True):
            images = F.relu(norm(layer(images), valid))
        return pooled(images, mfcc.shape[0])


@NETWORKS.register("dscnn")
@dataclass(frozen=True)
class DsCnnSizes(Sizes):
    """Options of the paper's DSCNN; five blocks match its number of parameters.

    Attributes:
        channels: channels of all convolutions.
        blocks: blocks of a depthwise and a pointwise convolution.
    """

    channels: int = 172
    blocks: int = 5

    network = DsCnn
    title = "DSCNN"
