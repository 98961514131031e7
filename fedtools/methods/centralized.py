"""Centralized: the server trains on the data of all clients, pooled; the non-private upper mark.

The row "Centralized" of table 3 in H. Zhu et al.: Decoupled federated learning for ASR with
non-IID data, Interspeech 2022; with the server's own data it also trains the baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtools.client.learner import Learner
from fedtools.client.train import Fitted
from fedtools.methods.base import SHARED, Method
from fedtools.server.server import Server


@dataclass(frozen=True)
class Centralized(Method):
    """No client trains; a round is one epoch of one uninterrupted training at the server."""

    title: ClassVar[str] = "Centralized"
    server_epochs: ClassVar[int] = 1

    def parameter_kind(self, name: str) -> str:
        return SHARED

    def train_client(self, client: Learner) -> list[Fitted]:
        raise NotImplementedError("no client takes part in centralized training")

    def update_server(self, server: Server) -> None:
        server.fit()
