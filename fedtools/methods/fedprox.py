"""FedProx: FedAvg with a proximal term that keeps clients close to the server's model.

T. Li et al.: Federated optimization in heterogeneous networks, MLSys 2020, equation 2; a baseline
in X.-C. Li et al.: Avoid overfitting user specific information in federated keyword spotting,
Interspeech 2022, whose public code uses a mean of smooth L1 distances instead.
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


@METHODS.register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with client objective: loss + proximal / 2 x |client model - server model|^2.

    Attributes:
        proximal: mu, the weight of the proximal term.
    """

    title: ClassVar[str] = "FedProx"
    rank: ClassVar[int] = 4

    proximal: NonNegative = 0.001

    def objective(self, client: Client) -> Objective:
        """Return equation 2: h_k(w; w^t) = F_k(w) + mu / 2 |w - w^t|^2."""
        from fedtools.client.objective import squared_distance

        start = client.start

        def penalty(model: nn.Module, batch: Batch) -> Tensor:
            return self.proximal / 2 * squared_distance(model, start, batch.active)

        return client.objective + penalty
