"""The four keyword networks for one client, of torch's own layers.

A straightforward implementation: the oracle of `fedtools.models.keywords` and the baseline of its
speed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mean(nn.Module):
    """The mean over all places: (B, C, H, W) -> (B, C)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))


class Unsqueeze(nn.Module):
    """(B, frames, bins) -> (B, 1, frames, bins)."""

    def forward(self, mfcc: Tensor) -> Tensor:
        return mfcc[:, None]


def group_norm(channels: int, affine: bool = True) -> nn.Module:
    """Return a group normalisation of up to 8 groups, each of at least two channels."""
    groups = next((n for n in range(8, 1, -1) if channels % n == 0 and n < channels), 1)
    return nn.GroupNorm(groups, channels, 1e-5, affine)


NORMS: Mapping[str, Callable[..., nn.Module]] = {"batch": nn.BatchNorm2d, "group": group_norm}


def bare_dscnn(classes: int, channels: int, blocks: int, norm: str = "batch") -> nn.Module:
    """Return DSCNN as one sequence of torch's layers."""
    make = NORMS[norm]
    layers = {
        "unsqueeze": Unsqueeze(),
        "first": nn.Conv2d(1, channels, (10, 4), 2, (5, 1)),
        "first_norm": make(channels),
        "first_relu": nn.ReLU(),
    }
    for block in range(blocks):
        layers |= {
            f"depthwise{block}": nn.Conv2d(
                channels, channels, 3, padding=1, groups=channels, bias=False
            ),
            f"norms{2 * block}": make(channels),
            f"relu{2 * block}": nn.ReLU(),
            f"pointwise{block}": nn.Conv2d(channels, channels, 1, bias=False),
            f"norms{2 * block + 1}": make(channels),
            f"relu{2 * block + 1}": nn.ReLU(),
        }
    return nn.Sequential(OrderedDict(layers, mean=Mean(), head=nn.Linear(channels, classes)))


class BareResNet(nn.Module):
    """ResNet of torch's layers."""

    def __init__(
        self,
        classes: int,
        channels: int,
        layers: int,
        pool_frames: int = 1,
        pool_bins: int = 1,
        norm: str = "batch",
    ):
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.pool = nn.AvgPool2d((pool_frames, pool_bins))
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for layer in range(layers - 2):
            wide = 2 ** (layer // 3)
            options = {"padding": wide, "dilation": wide, "bias": False}
            self.convolutions.append(nn.Conv2d(channels, channels, 3, **options))
            self.norms.append(NORMS[norm](channels, affine=False))
        self.head = nn.Linear(channels, classes)

    def forward(self, mfcc: Tensor) -> Tensor:
        images = before = self.pool(F.relu(self.first(mfcc[:, None])))
        for number, (layer, norm) in enumerate(zip(self.convolutions, self.norms, strict=True), 1):
            images = F.relu(layer(images))
            if number % 2 == 0:
                images = before = images + before
            images = norm(images)
        return self.head(images.mean((2, 3)))


class BareMhAttRnn(nn.Module):
    """MHAttRNN of torch's layers."""

    def __init__(
        self, classes: int, heads: int, units: int, filters: int = 10, norm: str = "batch"
    ):
        super().__init__()
        self.heads = heads
        self.first = nn.Conv2d(1, filters, (5, 1), padding=(2, 0))
        self.first_norm = NORMS[norm](filters)
        self.second = nn.Conv2d(filters, 1, (5, 1), padding=(2, 0))
        self.second_norm = NORMS[norm](1)
        self.recurrent = nn.GRU(40, units, 2, batch_first=True, bidirectional=True)
        self.query = nn.Linear(2 * units, 2 * units, bias=False)
        self.key = nn.Linear(2 * units, 2 * units, bias=False)
        self.head = nn.Linear(2 * units, classes)

    def forward(self, mfcc: Tensor) -> Tensor:
        images = F.relu(self.first_norm(self.first(mfcc[:, None])))
        images = F.relu(self.second_norm(self.second(images)))
        values, _ = self.recurrent(images[:, 0])
        query = self.query(values[:, values.shape[1] // 2])
        shape = (len(mfcc), -1, self.heads, values.shape[2] // self.heads)
        keys = self.key(values).view(shape).transpose(1, 2)
        query = query.view(shape).transpose(1, 2)
        found = F.scaled_dot_product_attention(query, keys, keys, scale=1.0)
        return self.head(found.transpose(1, 2).flatten(1))


class BareTransformer(nn.Module):
    """The Transformer of torch's layers."""

    def __init__(
        self, classes: int, layers: int, width: int, heads: int = 2, feedforward: int = 88
    ):
        super().__init__()
        self.embed = nn.Linear(40, width)
        self.token = nn.Parameter(torch.zeros(1, width))
        self.places = nn.Parameter(0.02 * torch.randn(99, width))
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, feedforward, 0.0, "gelu", batch_first=True)
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, classes)

    def forward(self, mfcc: Tensor) -> Tensor:
        values = torch.cat([self.token.expand(len(mfcc), 1, -1), self.embed(mfcc)], 1)
        return self.head(self.blocks(values + self.places)[:, 0])


# Called with the number of classes and a network's `network_conf`.
BARE: Mapping[str, Callable[..., nn.Module]] = {
    "dscnn": bare_dscnn,
    "mhattrnn": BareMhAttRnn,
    "resnet": BareResNet,
    "transformer": BareTransformer,
}

# Names that differ: a pattern of our names -> torch's.
_NAMES: Mapping[str, Mapping[str, str]] = {
    "dscnn": {r"\.(\d+)\.": r"\1."},
    "mhattrnn": {r"recurrent\.(\d+)\.(\w+)": r"recurrent.\2_l\1"},
    "resnet": {},
    "transformer": {
        r"projections\.": "self_attn.in_proj_",
        r"output\.": "self_attn.out_proj.",
        r"\.norm\.": ".norm1.",
        r"\.last_norm\.": ".norm2.",
        r"wide\.": "linear1.",
        r"narrow\.": "linear2.",
    },
}


def as_bare(network: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one client's tensors of one of our networks under the bare network's names."""
    found = {}
    for name, value in values.items():
        for ours, theirs in _NAMES[network].items():
            name = re.sub(ours, theirs, name)
        if name.startswith("recurrent."):
            found[name], found[f"{name}_reverse"] = value
        else:
            found[name] = value
    return found
