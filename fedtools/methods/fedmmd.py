"""FedMMD: a client's features stay distributed as the server's model would have them.

X. Yao, C. Huang, L. Sun: Two-stream federated learning: reduce the communication costs, VCIP 2018;
a peer in X.-C. Li et al.: Avoid overfitting user specific information in federated keyword
spotting, Interspeech 2022. The maximum mean discrepancy is that of M. Long et al.: Learning
transferable features with deep adaptation networks, ICML 2015, with Gaussian kernels.

As in the public code of the latter, the client's features are those of training and the server's
those of testing. With BatchNorm they differ even where the models are the same, since a batch's
statistics are not the running ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedtools.files.config import NonNegative
from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedtools.client.client import Client
    from fedtools.client.objective import Objective
    from fedtools.client.unit import Batch

# Kernel widths, in units of the mean squared distance of the batch's features.
_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Added to that, in units of their mean squared length: a client of one clip and no BatchNorm starts
# with a distance of rounding errors only, and without this with a gradient of any size.
_LEAST = 1e-3


@METHODS.register("fedmmd")
@dataclass(frozen=True)
class FedMmd(FedAvg):
    """A client minimises its loss + discrepancy x MMD^2(its features, the server's features).

    Attributes:
        discrepancy: the weight of the MMD.
    """

    title: ClassVar[str] = "FedMMD"
    rank: ClassVar[int] = 5

    discrepancy: NonNegative = 0.001

    def objective(self, client: Client) -> Objective:
        """One forward pass serves both terms: BatchNorm's statistics move once a step."""
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
    """The squared maximum mean discrepancy of two sets of features, for each client.

    Args:
        ours, theirs: (K, B, D).
        weights: of the clips, (K, B); each client's sum to 1.

    Returns:
        (K,), at least 0 up to rounding.
    """
    import torch

    both = torch.cat([ours, theirs], 1)
    signed = torch.cat([weights, -weights], 1)
    # Not cdist: the gradient of a root is infinite where a clip meets itself.
    apart = (both[:, :, None] - both[:, None]).square().sum(3)
    share = signed.abs() / 2
    with torch.no_grad():
        scale = (share[:, :, None] * share[:, None] * apart).sum((1, 2))
        scale += _LEAST * (share * both.square().sum(2)).sum(1) + 1e-12
    kernel = sum(torch.exp(-apart / (width * scale)[:, None, None]) for width in _WIDTHS)
    return (signed[:, :, None] * signed[:, None] * kernel).sum((1, 2))
