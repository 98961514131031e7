"""A post-norm transformer with a token per frame (A. Berg et al., arXiv 2104.00769)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.stacked import LayerNorm, Linear, constant, first


class Transformer(Network):
    """The keyword transformer."""

    def __init__(self, sizes: TransformerSizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        width = sizes.width
        if width % sizes.heads:
            raise ValueError(f"{sizes.heads} heads do not divide the width {width}")
        self.heads = sizes.heads
        self.embed = Linear(clients, bins, width)
        self.token = nn.Parameter(constant(clients, 1, width, value=0.0))
        places = nn.init.trunc_normal_(torch.empty(1, frames + 1, width), std=0.02)
        self.places = nn.Parameter(places.repeat_interleave(clients, 0))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "projections": Linear(clients, width, 3 * width),
                    "output": Linear(clients, width, width),
                    "norm": LayerNorm(clients, width),
                    "wide": Linear(clients, width, sizes.feedforward),
                    "narrow": Linear(clients, sizes.feedforward, width),
                    "last_norm": LayerNorm(clients, width),
                }
            )
            for _ in range(sizes.layers)
        )
        self.head = Linear(clients, width, classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        clients, batch = mfcc.shape[:2]
        token = first(self.token, clients)[:, None].expand(-1, batch, -1, -1)
        values = torch.cat([token, self.embed(mfcc)], 2) + first(self.places, clients)[:, None]
        for block in self.blocks:
            values = block["norm"](values + self._attend(block, values))
            inner = block["narrow"](F.gelu(block["wide"](values)))
            values = block["last_norm"](values + inner)
        return values[:, :, 0]

    def _attend(self, block: nn.ModuleDict, values: Tensor) -> Tensor:
        clients, batch, length, width = values.shape
        split = block["projections"](values).view(
            clients * batch, length, 3, self.heads, width // self.heads
        )
        found = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4))
        return block["output"](found.transpose(1, 2).reshape(clients, batch, length, width))


@NETWORKS.register("transformer")
@dataclass(frozen=True)
class TransformerSizes(Sizes):
    """Options of the paper's Transformer, 4 layers of width 96; it has no feed-forward width.

    In the authors' public code (patches of 8 x 8, feed-forward layers of twice the width), a width
    of 80 has the number of parameters in table 2.

    Attributes:
        layers: Transformer layers.
        width: size of a layer's output, a multiple of `heads`.
        heads: heads of each layer's attention.
        feedforward: size of a layer's feed-forward part.
    """

    layers: int = 4
    width: int = 96
    heads: int = 2
    feedforward: int = 88

    network = Transformer
    title = "Transformer"
