"""Client: every client adapts the baseline on its own data; nothing is communicated.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, table 3,
row "Client". The optimiser state is kept between rounds, so that R rounds of one epoch equal one
training of R epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedtools.methods import METHODS
from fedtools.methods.base import MODEL, OPTIMIZER, Method, TaskPart

if TYPE_CHECKING:
    from fedtools.client.client import Client
    from fedtools.client.unit import Trained
    from fedtools.server.server import Server


@METHODS.register("client")
@dataclass(frozen=True)
class ClientAlone(Method):
    """Local training: every tensor is personal."""

    title: ClassVar[str] = "Client"
    rank: ClassVar[int] = 1
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL, OPTIMIZER)
    no_rule: ClassVar[str] = "clients send nothing"

    personal: tuple[str, ...] = ("*",)

    def client(self, client: Client) -> list[Trained]:
        return client.train(keep_optimizer=True)

    def server(self, server: Server) -> None:
        server.keep()
