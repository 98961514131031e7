"""FedMMD: clients keep the distribution of their features close to that of the server's model.

X. Yao, C. Huang, L. Sun: Two-stream federated learning: reduce the communication costs, VCIP 2018;
a baseline in X.-C. Li et al.: Avoid overfitting user specific information in federated keyword
spotting, Interspeech 2022. The maximum mean discrepancy is that of M. Long et al.: Learning
transferable features with deep adaptation networks, ICML 2015, with Gaussian kernels.

As in the public code of Li et al., the client's model is in training mode and the server's in
evaluation mode. With BatchNorm the features of equal models then differ, since batch statistics
differ from the running ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedtools.core.config import NonNegative
from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedtools.client.client import Client
    from fedtools.client.objective import Objective
    from fedtools.client.unit import Batch

# Kernel widths, as multiples of the mean squared distance of the batch's features.
_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Added to that distance, as a multiple of the mean squared length of the features. For a client of
# one clip without BatchNorm the first distance is only rounding error, which would otherwise scale
# the gradient arbitrarily.
_LEAST = 1e-3


@METHODS.register("fedmmd")
@dataclass(frozen=True)
class FedMmd(FedAvg):
    """FedAvg with client objective: loss + discrepancy x MMD^2(client features, server features).

    Attributes:
        discrepancy: weight of the squared MMD.
    """

    title: ClassVar[str] = "FedMMD"
    rank: ClassVar[int] = 5

    discrepancy: NonNegative = 0.001

    def objective(self, client: Client) -> Objective:
        """Return the loss plus the MMD term.

        One forward pass serves both, so that BatchNorm statistics are updated once per step.
        """
        models, plain = client.models, client.objective
        server = client.copy().eval().requires_grad_(False)

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            batch = plain.labelled(batch)
            features = models.represent(model, batch)
            own = models.loss_of(models.classify(model, features), batch)
            ours, weights = models.vectors(features, batch)
            theirs, _ = models.vectors(models.represent(server, batch), batch)
            return own + self.discrepancy * squared_mmd(ours, theirs, weights)

        return plain.replaced(loss)


def squared_mmd(ours: Tensor, theirs: Tensor, weights: Tensor) -> Tensor:
    """Compute the squared maximum mean discrepancy of two sets of features, for each client.

    Args:
        ours, theirs: features of the client's and the server's model, (K, B, D).
        weights: clip weights, (K, B), which sum to 1 for each client.

    Returns:
        (K,), at least 0 up to rounding.
    """
    import torch

    both = torch.cat([ours, theirs], 1)
    signed = torch.cat([weights, -weights], 1)
    # Not cdist: the gradient of its root is infinite at distance 0, as of a clip from itself.
    apart = (both[:, :, None] - both[:, None]).square().sum(3)
    share = signed.abs() / 2
    with torch.no_grad():
        scale = (share[:, :, None] * share[:, None] * apart).sum((1, 2))
        scale += _LEAST * (share * both.square().sum(2)).sum(1) + 1e-12
    kernel = sum(torch.exp(-apart / (width * scale)[:, None, None]) for width in _WIDTHS)
    return (signed[:, :, None] * signed[:, None] * kernel).sum((1, 2))
