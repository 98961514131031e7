"""FedAvg: clients train the shared model, the server takes the mean.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas: Communication-efficient learning of
deep networks from decentralized data, AISTATS 2017; as equation 2 of H. Zhu et al.: Decoupled
federated learning for ASR with non-IID data, Interspeech 2022, has it: a plain mean over clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedtools.methods import METHODS
from fedtools.methods.base import Method

if TYPE_CHECKING:
    from fedtools.client.fit import Fitted
    from fedtools.client.place import Place
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

    weighting: Literal["uniform", "utterances"] = "uniform"
    keep_optimizer: bool = False

    def check(self, task: str, model: Mapping[str, Any]) -> None:
        super().check(task, model)
        if task == "kws" and self.keep_optimizer:
            raise ValueError("keep_optimizer is for task asr")

    def train_client(self, client: Place) -> list[Fitted]:
        return client.fit(keep_optimizer=self.keep_optimizer)

    def weight(self, utterances: int) -> float:
        return float(utterances) if self.weighting == "utterances" else 1.0

    def update_server(self, server: Server) -> None:
        server.mean()
