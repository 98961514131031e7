"""FedExtract: FedAvg, but for the bottom of the model, which stays at the clients.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, section
2.1, equations 1 and 2: what differs between clients' data shall be taken away before the classifier
that all have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg


@METHODS.register("fedextract")
@dataclass(frozen=True)
class FedExtract(FedAvg):
    """The extractor is personal: by default the convolutions and seven bottom blocks."""

    title: ClassVar[str] = "FedExtract"
    rank: ClassVar[int] = 5

    personal: tuple[str, ...] = ("encoder.embed.*", "encoder.encoders.[0-6].*")
