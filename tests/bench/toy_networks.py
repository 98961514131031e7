"""The toy's two networks, as our networks for K clients at once and as torch's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedtools.models import keywords
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.stacked import Conv1d, Linear

FIRST, WIDTHS = 16, (24, 32, 48)
HIDDEN = 64
# The number of classes of each network.
CLASSES = {"tcn": 35, "tiny": 12}


class Block(nn.Module):
    """Two convolutions 9 wide and a shortcut."""

    def __init__(self, clients: int, inputs: int, outputs: int):
        super().__init__()
        self.down = Conv1d(clients, inputs, outputs, 9, stride=2, padding=4)
        self.same = Conv1d(clients, outputs, outputs, 9, padding=4)
        self.shortcut = Conv1d(clients, inputs, outputs, 1, stride=2)

    def forward(self, values: Tensor) -> Tensor:
        return F.relu(self.same(F.relu(self.down(values))) + self.shortcut(values))


class Tcn(Network):
    """Residual convolutions over time."""

    def __init__(self, sizes: Sizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        self.first = Conv1d(clients, bins, FIRST, 3, padding=1)
        pairs = zip((FIRST, *WIDTHS), WIDTHS, strict=False)
        self.blocks = nn.Sequential(*(Block(clients, *pair) for pair in pairs))
        self.head = Linear(clients, WIDTHS[-1], classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        clients, batch, frames, _ = mfcc.shape
        values = mfcc.permute(1, 2, 0, 3).reshape(batch, frames, -1).transpose(1, 2)
        values = self.blocks(F.relu(self.first(values)))
        return values.mean(2).view(batch, clients, -1).transpose(0, 1)


class Tiny(Network):
    """The mean over time and one hidden layer."""

    def __init__(self, sizes: Sizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        self.hidden = Linear(clients, bins, HIDDEN)
        self.head = Linear(clients, HIDDEN, classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        return F.relu(self.hidden(mfcc.mean(2)))


@dataclass(frozen=True)
class TcnSizes(Sizes):
    """Options of the network, of which there are none."""

    network = Tcn
    title = "TCN"


@dataclass(frozen=True)
class TinySizes(Sizes):
    """Options of the network, of which there are none."""

    network = Tiny
    title = "Tiny"


def register() -> None:
    """Register both with fedtools, in this version or in one before there was a registry."""
    for name, sizes in {"tcn": TcnSizes, "tiny": TinySizes}.items():
        if hasattr(keywords.NETWORKS, "register"):
            keywords.NETWORKS.register(name)(sizes)
        else:
            keywords.NETWORKS[name] = sizes


class BareBlock(nn.Module):
    """The same block of torch's layers."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.down = nn.Conv1d(inputs, outputs, 9, stride=2, padding=4)
        self.same = nn.Conv1d(outputs, outputs, 9, padding=4)
        self.shortcut = nn.Conv1d(inputs, outputs, 1, stride=2)

    def forward(self, values: Tensor) -> Tensor:
        return F.relu(self.same(F.relu(self.down(values))) + self.shortcut(values))


class BareTcn(nn.Module):
    """The same network of torch's layers, for one client."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(40, FIRST, 3, padding=1)
        pairs = zip((FIRST, *WIDTHS), WIDTHS, strict=False)
        self.blocks = nn.Sequential(*(BareBlock(*pair) for pair in pairs))
        self.head = nn.Linear(WIDTHS[-1], CLASSES["tcn"])

    def forward(self, mfcc: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.first(mfcc.transpose(1, 2)))).mean(2))


class BareTiny(nn.Module):
    """The same network of torch's layers, for one client."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(40, HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES["tiny"])

    def forward(self, mfcc: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden(mfcc.mean(1))))


BARE = {"tcn": BareTcn, "tiny": BareTiny}
