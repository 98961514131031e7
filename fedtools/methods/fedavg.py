"""FedAvg: clients train the shared model, the server averages their models.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas: Communication-efficient learning of
deep networks from decentralized data, AISTATS 2017, algorithm 1. By default the mean over clients
is unweighted, as in equation 2 of H. Zhu et al.: Decoupled federated learning for ASR with non-IID
data, Interspeech 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from fedtools.methods import METHODS
from fedtools.methods.base import OPTIMIZER, Method, TaskPart
from fedtools.models.adapt.adaptation import Combine, combine_of

if TYPE_CHECKING:
    from fedtools.client.client import Client
    from fedtools.client.objective import Objective
    from fedtools.client.unit import Trained
    from fedtools.server.server import Server


@METHODS.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging of all tensors that are not `personal`.

    Attributes:
        weighting: "uniform" (equation 2 of Zhu et al.) or "utterances" (McMahan et al.: by amount
            of data).
        keep_optimizer: whether a client keeps its private optimiser state between rounds.
    """

    title: ClassVar[str] = "FedAvg"
    rank: ClassVar[int] = 3
    combines: ClassVar[tuple[str, ...]] = get_args(Combine)
    no_rule: ClassVar[str] = ""

    weighting: Literal["uniform", "utterances"] = "uniform"
    keep_optimizer: bool = False

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        super().check(task, parts, model)
        if self.keep_optimizer and OPTIMIZER not in parts:
            raise ValueError(f"keep_optimizer: clients of task {task} train together")
        if self.keep_optimizer and combine_of(model) == "svd":
            raise ValueError("keep_optimizer: combine svd replaces the factors in each round")
        if self.keep_optimizer and self.rule.root_in(1):
            raise ValueError("keep_optimizer: the robust rule's server keeps no optimiser")

    def client(self, client: Client) -> list[Trained]:
        """Run ClientUpdate: `local_epochs` of gradient descent on the client's data."""
        return client.train(self.objective(client), keep_optimizer=self.keep_optimizer)

    def objective(self, client: Client) -> Objective:
        """Return what a client minimises: by default the task's loss."""
        return client.objective

    def weight(self, utterances: int) -> float:
        """Return n_k, or 1 for the unweighted mean."""
        return float(utterances) if self.weighting == "utterances" else 1.0

    def server(self, server: Server) -> None:
        """Update the model: w <- sum over k of (n_k / n) w_k."""
        server.mean()
