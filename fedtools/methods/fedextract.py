"""FedExtract: FedAvg with personal feature extractors, the bottom layers of the model.

H. Zhu et al.: Decoupled federated learning for ASR with non-IID data, Interspeech 2022, section
2.1, equations 1 and 2: each extractor removes the differences between clients' data before the
shared classifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg


@METHODS.register("fedextract")
@dataclass(frozen=True)
class FedExtract(FedAvg):
    """FedAvg with a personal extractor: by default the convolutions and seven bottom blocks."""

    title: ClassVar[str] = "FedExtract"
    rank: ClassVar[int] = 5

    personal: tuple[str, ...] = ("encoder.embed.*", "encoder.encoders.[0-6].*")
