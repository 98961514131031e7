"""Base classes of all keyword networks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor, nn

from fedtools.core.config import Share
from fedtools.core.errors import UserError
from fedtools.models.stacked import Linear

# The parts of a network above its encoder.
HEADS = ("head", "private_head")


class Network(nn.Module):
    """A network for K clients: an encoder, whose features a linear head classifies.

    Attributes:
        is_adapted: only a part is trained; the whole network is then always in evaluation mode.
        has_fixed_head: the heads are not trained.
    """

    head: nn.Module
    is_adapted = has_fixed_head = False

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return features (K, B, D) of MFCC (K, B, frames, coefficients).

        `valid` (K, B) is 0 for padding clips.
        """
        raise NotImplementedError

    def forward(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return logits (K, B, classes) of MFCC (K, B, frames, coefficients)."""
        # Losses are computed in full precision, whatever the precision of the layers.
        return self.head(self.features(mfcc, valid)).to(mfcc.dtype)

    def train(self, mode: bool = True) -> Network:
        """Set training mode, unless the network is adapted."""
        super().train(mode and not self.is_adapted)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Network:
        """Set `requires_grad` of all parameters, except that fixed heads stay fixed."""
        super().requires_grad_(requires_grad)
        for name in HEADS if self.has_fixed_head else ():
            if name in self._modules:
                self._modules[name].requires_grad_(False)
        return self

    def private(self, features: Tensor) -> Tensor:
        """Return the private head's logits (K, B, classes) of features (K, B, D)."""
        if "private_head" not in self._modules:
            raise UserError("the network has no private head", remedy="set network_conf.head_share")
        return self.private_head(features)

    def split_head(self, clients: int, share: float) -> None:
        """Replace the head by `head` and `private_head`, each with a projection without bias.

        `head` gets the share `share` of 2 D projected features. The public code of the paper's
        authors adds this to a network for FedKWS-UI.
        """
        classes, width = self.head.weight.shape[1:]
        sizes = int(2 * width * share), int(2 * width * (1 - share))
        if not all(sizes):
            raise ValueError(f"head_share {share} of {width} features leaves a head without any")
        self.head, self.private_head = (
            nn.Sequential(
                Linear(clients, width, size, bias=False), nn.ReLU(), Linear(clients, size, classes)
            )
            for size in sizes
        )


@dataclass(frozen=True)
class Sizes:
    """Options of a network; subclasses add their own, and name the network.

    Attributes:
        network: class of the network, called with (sizes, clients, bins, frames, classes).
        title: name of the network in tables.
        norm: kind of normalisation, "batch" or "group", for networks with such layers.
        head_share: share of the features for `head` next to a private head; 0 for a single head.
    """

    norm: Literal["batch", "group"] = "batch"
    head_share: Share = 0.0

    network: ClassVar[type[Network]]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{field.name} must be at least 1")


def pooled(images: Tensor, clients: int) -> Tensor:
    """Return the mean over all places of (B, K x C, H, W), as (K, B, C)."""
    return images.mean((2, 3)).view(len(images), clients, -1).transpose(0, 1)
