"""Convolutions, two bidirectional GRU layers, multi-head attention from the middle frame.

O. Rybakov et al.: Streaming keyword spotting on mobile devices, Interspeech 2020. Queries and
keys have projections without bias, and values are the projected keys: this matches the paper's
number of parameters and its authors' public code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.stacked import NORMS, BiGru, Conv2d, FramesToOne, Linear


class MhAttRnn(Network):
    """Convolutions, bidirectional GRU layers and multi-head attention (MHAttRNN)."""

    def __init__(self, sizes: MhAttRnnSizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        norm, width = NORMS[sizes.norm], 2 * sizes.units
        if width % sizes.heads:
            raise ValueError(f"{sizes.heads} heads do not divide {width}, twice the units")
        self.heads = sizes.heads
        self.first = Conv2d(clients, 1, sizes.filters, (5, 1), padding=(2, 0))
        self.first_norm = norm(clients, sizes.filters)
        self.second = FramesToOne(clients, sizes.filters, 5)
        self.second_norm = norm(clients, 1)
        inputs = [bins] + [width] * (sizes.layers - 1)
        self.recurrent = nn.ModuleList(BiGru(clients, size, sizes.units) for size in inputs)
        self.query = Linear(clients, width, width, bias=False)
        self.key = Linear(clients, width, width, bias=False)
        self.head = Linear(clients, width, classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        images = F.relu(self.first_norm(self.first(mfcc.transpose(0, 1)), valid))
        images = F.relu(self.second_norm(self.second(images), valid))
        values = images.transpose(0, 1)
        for layer in self.recurrent:
            values = layer(values)
        clients, batch, frames, width = values.shape
        query = self.query(values[:, :, frames // 2])
        shape = (clients * batch, -1, self.heads, width // self.heads)
        keys = self.key(values).view(shape).transpose(1, 2)
        query = query.view(shape).transpose(1, 2)
        found = F.scaled_dot_product_attention(query, keys, keys, scale=1.0)
        return found.transpose(1, 2).reshape(clients, batch, width)


@NETWORKS.register("mhattrnn")
@dataclass(frozen=True)
class MhAttRnnSizes(Sizes):
    """Options of the paper's MHAttRNN; filters and layers are those of Rybakov et al.

    Attributes:
        heads: heads of the attention.
        units: units of each direction of a GRU.
        layers: bidirectional GRUs.
        filters: channels of the convolution below them.
    """

    heads: int = 4
    units: int = 80
    layers: int = 2
    filters: int = 10

    network = MhAttRnn
    title = "MHAttRNN"
