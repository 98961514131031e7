"""Base classes of all keyword networks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor, nn


class Network(nn.Module):
    """A network for K clients: an encoder, whose features a linear head classifies.

    Attributes:
        is_adapted: only a part is trained; the whole network is then always in evaluation mode.
        has_fixed_head: the head is not trained.
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
        """Set `requires_grad` of all parameters, except that a fixed head stays fixed."""
        super().requires_grad_(requires_grad)
        if self.has_fixed_head:
            self.head.requires_grad_(False)
        return self


@dataclass(frozen=True)
class Sizes:
    """Options of a network; subclasses add their own, and name the network.

    Attributes:
        network: class of the network, called with (sizes, clients, bins, frames, classes).
        title: name of the network in tables.
        norm: kind of normalisation, "batch" or "group", for networks with such layers.
    """

    norm: Literal["batch", "group"] = "batch"

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
