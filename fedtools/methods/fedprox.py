"""FedProx: FedAvg whose clients are drawn back to the server's model.

T. Li et al.: Federated optimization in heterogeneous networks, MLSys 2020, equation 2; a peer in
X.-C. Li et al.: Avoid overfitting user specific information in federated keyword spotting,
Interspeech 2022. (The public code of the latter has a mean of smooth L1 distances in its place.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedtools.files.config import NonNegative
from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor

    from fedtools.client.clips import ClipBatch
    from fedtools.client.fit import Fitted
    from fedtools.client.place import Place
    from fedtools.models.keywords.base import Network


@METHODS.register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """A client minimises its loss + proximal / 2 x |model - server's model|^2.

    Attributes:
        proximal: the weight of the distance.
    """

    title: ClassVar[str] = "FedProx"
    rank: ClassVar[int] = 4
    tasks: ClassVar[tuple[str, ...]] = ("kws",)

    proximal: NonNegative = 0.001

    def train_client(self, client: Place) -> list[Fitted]:
        from fedtools.client.stacks import cross_entropy

        start = client.start

        def loss(network: Network, batch: ClipBatch) -> Tensor:
            return cross_entropy(network, batch) + self.proximal / 2 * distance(network, batch)

        def distance(network: Network, batch: ClipBatch) -> Tensor:
            clients = len(batch.labels)
            return sum(
                (value[:clients] - start[name][:clients]).square().flatten(1).sum(1)
                for name, value in network.named_parameters()
            )

        return client.fit(loss)
