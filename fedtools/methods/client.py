"""Client: every client adapts the baseline on its own data alone; nothing is communicated.

The row "Client" of table 3 in H. Zhu et al.: Decoupled federated learning for ASR with non-IID
data, Interspeech 2022. A round is some epochs of one uninterrupted training: the optimiser lives
on, so that R rounds of one epoch are the same as one training of R epochs.
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
    """Every tensor is personal."""

    title: ClassVar[str] = "Client"
    rank: ClassVar[int] = 1
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL, OPTIMIZER)

    personal: tuple[str, ...] = ("*",)

    def client(self, client: Client) -> list[Trained]:
        return client.train(keep_optimizer=True)

    def server(self, server: Server) -> None:
        server.keep()
