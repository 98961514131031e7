"""FedAvg: clients train the shared model, the server takes the mean.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas: Communication-efficient learning of
deep networks from decentralized data, AISTATS 2017, algorithm 1; as equation 2 of H. Zhu et al.:
Decoupled federated learning for ASR with non-IID data, Interspeech 2022, has it: a plain mean over
clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from fedtools.methods import METHODS
from fedtools.methods.base import OPTIMIZER, Method, TaskPart
from fedtools.models.adaptation import Combine, combine_of

if TYPE_CHECKING:
    from fedtools.client.client import Client
    from fedtools.client.objective import Objective
    from fedtools.client.unit import Trained
    from fedtools.server.server import Server


@METHODS.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Every tensor that is not `personal` is shared.

    Attributes:
        weighting: "uniform" (equation 2) or "utterances" (McMahan et al.: by amount of data).
        keep_optimizer: whether a client's private optimiser state lives on between rounds.
    """

    title: ClassVar[str] = "FedAvg"
    rank: ClassVar[int] = 3
    combines: ClassVar[tuple[str, ...]] = get_args(Combine)

    weighting: Literal["uniform", "utterances"] = "uniform"
    keep_optimizer: bool = False

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        super().check(task, parts, model)
        if self.keep_optimizer and OPTIMIZER not in parts:
            raise ValueError(f"keep_optimizer: clients of task {task} train together")
        if self.keep_optimizer and combine_of(model) == "svd":
            raise ValueError("keep_optimizer: with combine svd each round has other factors")

    def client(self, client: Client) -> list[Trained]:
        """ClientUpdate: some epochs of gradient descent on the client's own data."""
        return client.train(self.objective(client), keep_optimizer=self.keep_optimizer)

    def objective(self, client: Client) -> Objective:
        """What a client minimises: by default the task's loss."""
        return client.objective

    def weight(self, utterances: int) -> float:
        """n_k, or 1."""
        return float(utterances) if self.weighting == "utterances" else 1.0

    def server(self, server: Server) -> None:
        """w <- sum over k of n_k / n w_k."""
        server.mean()
