"""FedNorm: FedAvg, but for the normalisation layers, which stay at the clients.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, section
2.1, equations 1 and 2: what differs between clients' data shall be taken away before each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg


@METHODS.register("fednorm")
@dataclass(frozen=True)
class FedNorm(FedAvg):
    """Scale, offset and running statistics of every normalisation are personal."""

    title: ClassVar[str] = "FedNorm"
    rank: ClassVar[int] = 4

    personal: tuple[str, ...] = ("*norm*",)
