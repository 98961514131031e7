"""The four keyword networks of table 2 in X.-C. Li et al., each for K clients at once.

Avoid overfitting user specific information in federated keyword spotting, Interspeech 2022. All
take MFCC (K, B, frames, coefficients). Where the paper leaves a size open, the one that meets its
number of parameters was taken; the defaults are the paper's networks:

                        12 classes          35 classes       (table 2)
    DSCNN               168.6 k             172.6 k          169 k, 173 k
    MHAttRNN            228.0 k             231.7 k          228 k, 232 k
    ResNet              237.9 k             238.9 k          238 k, 239 k
    Transformer         233.5 k             235.8 k          232 k, 234 k
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.files.config import from_mapping, unknown
from fedtools.files.errors import UserError
from fedtools.models.keywords.layers import (
    NORMS,
    BiGru,
    Conv2d,
    FramesToOne,
    LayerNorm,
    Linear,
    ManyToMany,
    OneToMany,
    Pointwise,
    constant,
)


class Network(nn.Module):
    """A network for K clients: an encoder, whose features a linear head classifies."""

    head: nn.Module

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """(K, B, frames, coefficients) -> (K, B, D); `valid` (K, B) is 0 for padding clips."""
        raise NotImplementedError

    def forward(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """(K, B, frames, coefficients) -> logits (K, B, classes)."""
        return self.head(self.features(mfcc, valid))

    def private(self, features: Tensor) -> Tensor:
        """The private head's logits (K, B, classes) of features (K, B, D)."""
        if "private_head" not in self._modules:
            raise UserError("the network has no private head", remedy="set network_conf.head_share")
        return self.private_head(features)

    def split_head(self, clients: int, share: float) -> None:
        """Give it two heads, each with a projection without bias: `head` and `private_head`.

        Of 2 D projected features `share` go to `head`: what the paper's authors' public code adds
        to a network for FedKWS-UI.
        """
        classes, width = self.head.weight.shape[1:]
        sizes = int(2 * width * share), int(2 * width * (1 - share))
        if not all(sizes):
            raise ValueError(f"head_share {share} leaves a head without any of {width} features")
        self.head, self.private_head = (
            nn.Sequential(
                Linear(clients, width, size, bias=False), nn.ReLU(), Linear(clients, size, classes)
            )
            for size in sizes
        )


@dataclass(frozen=True)
class Sizes:
    """What all networks have in common.

    Attributes:
        norm: "batch" or "group", for the networks that have such layers.
        head_share: 0, or the share of the features that the head has beside a private head.
    """

    norm: str = "batch"
    head_share: float = 0.0

    network: ClassVar[type[Network]]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{field.name} must be at least 1")
        if self.norm not in NORMS:
            raise ValueError(f"norm {unknown(self.norm, NORMS)}")
        if not 0 <= self.head_share < 1:
            raise ValueError(f"head_share {self.head_share} is not in [0, 1)")


class DsCnn(Network):
    """Depth-separable convolutions (Y. Zhang et al.: Hello edge, arXiv 1711.07128, DS-CNN)."""

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


@dataclass(frozen=True)
class DsCnnSizes(Sizes):
    """The paper's DSCNN; five blocks meet its number of parameters."""

    channels: int = 172
    blocks: int = 5

    network = DsCnn


class ResNet(Network):
    """Residual blocks of dilated convolutions (R. Tang, J. Lin: Deep residual learning for
    small-footprint keyword spotting, ICASSP 2018, res15)."""

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


@dataclass(frozen=True)
class ResNetSizes(Sizes):
    """The paper's ResNet; it may first average over frames and bins, as Tang and Lin's
    res8 does."""

    channels: int = 45
    layers: int = 15
    pool_frames: int = 1
    pool_bins: int = 1

    network = ResNet


class MhAttRnn(Network):
    """Convolutions, two bidirectional GRU layers, multi-head attention from the middle frame.

    O. Rybakov et al.: Streaming keyword spotting on mobile devices, Interspeech 2020. Queries and
    keys have projections without bias, and values are the projected keys: that meets the paper's
    number of parameters, and is what its authors' public code does.
    """

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


@dataclass(frozen=True)
class MhAttRnnSizes(Sizes):
    """The paper's MHAttRNN: 4 heads, 80 units; filters and layers are those of Rybakov et al."""

    heads: int = 4
    units: int = 80
    layers: int = 2
    filters: int = 10

    network = MhAttRnn


class Transformer(Network):
    """Every frame is a token (A. Berg et al.: Keyword transformer, arXiv 2104.00769), post-norm."""

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
        token = self.token[:clients, None].expand(-1, batch, -1, -1)
        values = torch.cat([token, self.embed(mfcc)], 2) + self.places[:clients, None]
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


@dataclass(frozen=True)
class TransformerSizes(Sizes):
    """The paper's Transformer: 4 layers of 96; its feed-forward width is not given.

    With the authors' public code (patches of 8 x 8, feed-forward layers of twice the width) the
    number of parameters in table 2 is that of a width of 80.
    """

    layers: int = 4
    width: int = 96
    heads: int = 2
    feedforward: int = 88

    network = Transformer


NETWORKS: dict[str, type[Sizes]] = {
    "dscnn": DsCnnSizes,
    "mhattrnn": MhAttRnnSizes,
    "resnet": ResNetSizes,
    "transformer": TransformerSizes,
}


def pooled(images: Tensor, clients: int) -> Tensor:
    """The mean over all places of (B, K x C, H, W), as (K, B, C)."""
    return images.mean((2, 3)).view(len(images), clients, -1).transpose(0, 1)


def build_network(
    config: Mapping[str, Any],
    classes: int,
    where: str | Path,
    *,
    clients: int = 1,
    bins: int = 40,
    frames: int = 98,
) -> Network:
    """Make a network from its section of a configuration.

    Args:
        config: `network`, one of `NETWORKS`, and `network_conf`, fields of its `...Sizes`.
        classes: the number of labels.
        where: what `config` was read from, for messages.
        clients: how many clients it trains at once.
        bins, frames: coefficients and frames of its input.

    Raises:
        UserError: for options that are unknown or do not fit each other.
    """
    for key in config:
        if key not in ("network", "network_conf"):
            raise UserError(unknown(key, ("network", "network_conf")), path=where)
    name = config.get("network")
    if not isinstance(name, str) or name not in NETWORKS:
        raise UserError(f"network: {unknown(str(name), NETWORKS)}", path=where)
    sizes = from_mapping(NETWORKS[name], config.get("network_conf"), where)
    try:
        network = sizes.network(sizes, clients, bins, frames, classes)
        if sizes.head_share:
            network.split_head(clients, sizes.head_share)
    except ValueError as error:
        raise UserError(f"network_conf: {error}", path=where) from None
    return network
