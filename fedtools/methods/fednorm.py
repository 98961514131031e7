"""FedNorm: FedAvg with personal normalisation layers.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, section
2.1, equations 1 and 2: normalisation removes the differences between clients' data before each
layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg


@METHODS.register("fednorm")
@dataclass(frozen=True)
class FedNorm(FedAvg):
    """FedAvg with personal scale, offset and running statistics of every normalisation."""

    title: ClassVar[str] = "FedNorm"
    rank: ClassVar[int] = 4

    personal: tuple[str, ...] = ("*norm*",)
