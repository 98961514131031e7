"""Joint: DecoupleFL without decoupling, an ablation; the server trains all parts end to end.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, table 4,
row "- decouple": centralised training with one extractor per client. It gives no privacy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedtools.methods import METHODS
from fedtools.methods.base import FEATURES, MODEL, Method, Phase, TaskPart

if TYPE_CHECKING:
    from fedtools.server.server import Server


@METHODS.register("joint")
@dataclass(frozen=True)
class Joint(Method):
    """Joint training of one extractor per client (personal) and one classifier (shared)."""

    title: ClassVar[str] = "DecoupleFL - decouple"
    rank: ClassVar[int] = 7
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL, FEATURES)
    no_rule: ClassVar[str] = "the server trains alone"

    personal: tuple[str, ...] = ("encoder.embed.*", "encoder.encoders.[0-6].*")

    def phase(self, number: int) -> Phase:
        return Phase(None, self.server, server_trains=True, jointly=True)

    def server(self, server: Server) -> None:
        server.train(epochs=1)
