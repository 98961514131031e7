"""What all keyword networks have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from torch import Tensor, nn

from fedtools.files.config import Share
from fedtools.files.errors import UserError
from fedtools.models.stacked import Linear

# The parts of a network that are no encoder.
HEADS = ("head", "private_head")


class Network(nn.Module):
    """A network for K clients: an encoder, whose features a linear head classifies.

    Attributes:
        is_adapted: a part is trained; then it works as in testing, as what is frozen does.
        has_fixed_head: its heads are not trained.
    """

    head: nn.Module
    is_adapted = has_fixed_head = False

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """(K, B, frames, coefficients) -> (K, B, D); `valid` (K, B) is 0 for padding clips."""
        raise NotImplementedError

    def forward(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        """(K, B, frames, coefficients) -> logits (K, B, classes)."""
        # A loss is taken in full precision, whatever the layers before it were computed in.
        return self.head(self.features(mfcc, valid)).to(mfcc.dtype)

    def train(self, mode: bool = True) -> Network:
        """As of any module."""
        super().train(mode and not self.is_adapted)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Network:
        """As of any module; heads that are not trained stay so."""
        super().requires_grad_(requires_grad)
        for name in HEADS if self.has_fixed_head else ():
            if name in self._modules:
                self._modules[name].requires_grad_(False)
        return self

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
    """A network's options; a subclass has more, and says what they are of.

    Attributes:
        network: the class, made of (sizes, clients, bins, frames, classes).
        title: the network's name in tables.
        norm: "batch" or "group", for the networks that have such layers.
        head_share: 0, or the share of the features that the head has beside a private head.
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
    """The mean over all places of (B, K x C, H, W), as (K, B, C)."""
    return images.mean((2, 3)).view(len(images), clients, -1).transpose(0, 1)
