"""Centralized: the server trains on the pooled data of all clients; the non-private topline.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, table 3,
row "Centralized". With the server's own data it also trains the baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedtools.methods import METHODS
from fedtools.methods.base import Method, Phase

if TYPE_CHECKING:
    from fedtools.server.server import Server


@METHODS.register("centralized")
@dataclass(frozen=True)
class Centralized(Method):
    """Central training: a round is one epoch of continuous training at the server."""

    title: ClassVar[str] = "Centralized"
    rank: ClassVar[int] = 2
    federated: ClassVar[bool] = False
    no_rule: ClassVar[str] = "the server trains alone"

    def phase(self, number: int) -> Phase:
        return Phase(None, self.server, server_trains=True)

    def server(self, server: Server) -> None:
        server.train(epochs=1)
