"""Client: every client adapts the baseline on its own data alone; nothing is communicated.

The row "Client" of table 3 in H. Zhu et al.: Decoupled federated learning for ASR with non-IID
data, Interspeech 2022. A round is some epochs of one uninterrupted training: the optimiser lives
on, so that R rounds of one epoch are the same as one training of R epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtools.client.learner import Learner
from fedtools.client.train import Fitted
from fedtools.methods.base import PERSONAL, Method
from fedtools.server.server import Server


@dataclass(frozen=True)
class Client(Method):
    """Every tensor is personal."""

    title: ClassVar[str] = "Client"
    tasks: ClassVar[tuple[str, ...]] = ("asr",)

    def parameter_kind(self, name: str) -> str:
        return PERSONAL

    def train_client(self, client: Learner) -> list[Fitted]:
        return client.fit(keep_optimizer=True)

    def update_server(self, server: Server) -> None:
        server.keep()
