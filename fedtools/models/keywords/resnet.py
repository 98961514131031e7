"""Residual blocks of dilated convolutions.

R. Tang, J. Lin: Deep residual learning for small-footprint keyword spotting, ICASSP 2018, res15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Network, Sizes, pooled
from fedtools.models.stacked import NORMS, Linear, ManyToMany, OneToMany


class ResNet(Network):
    """Residual blocks of dilated convolutions (res15)."""

    def __init__(self, sizes: ResNetSizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        channels, norm = sizes.channels, NORMS[sizes.norm]
        self.pool = sizes.pool_frames, sizes.pool_bins
        self.first = OneToMany(clients, channels, 3)
        self.convolutions = nn.ModuleList()
        for layer in range(sizes.layers - 2):
            wide = 2 ** (layer // 3)
            self.convolutions.append(ManyToMany(clients, channels, 3, dilation=wide))
        self.norms = nn.ModuleList(norm(clients, channels, affine=False) for _ in self.convolutions)
        self.head = Linear(clients, channels, classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        images = F.relu(self.first(mfcc.transpose(0, 1)))
        if self.pool != (1, 1):
            images = F.avg_pool2d(images, self.pool)
        before = images
        for number, (layer, norm) in enumerate(zip(self.convolutions, self.norms, strict=True), 1):
            images = F.relu(layer(images))
            if number % 2 == 0:
                images = before = images + before
            images = norm(images, valid)
        return pooled(images, mfcc.shape[0])


@NETWORKS.register("resnet")
@dataclass(frozen=True)
class ResNetSizes(Sizes):
    """Options of the paper's ResNet; pooling over frames and bins is as in Tang and Lin's res8.

    Attributes:
        channels: channels of all convolutions.
        layers: convolutions after the first one.
        pool_frames, pool_bins: frames and coefficients that are averaged after the first one.
    """

    channels: int = 45
    layers: int = 15
    pool_frames: int = 1
    pool_bins: int = 1

    network = ResNet
    title = "ResNet"
