"""FedOpt: the server takes a step of its own optimiser towards the clients' mean.

S. Reddi et al.: Adaptive federated optimization, ICLR 2021, algorithm 2 (no bias correction, and
the squares start at tau^2). With "sgd", a learning rate of 1 and no momentum it is FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from fedtools.server.server import Server


@METHODS.register("fedopt")
@dataclass(frozen=True)
class FedOpt(FedAvg):
    """FedAvg, with the difference of mean and model as a gradient.

    Attributes:
        optimizer: "sgd" (with momentum), "adam" or "yogi".
        learning_rate: eta.
        momentum: beta 1.
        decay: beta 2, of the squares.
        adaptivity: tau, which bounds the step where the squares are small.
    """

    title: ClassVar[str] = "FedOpt"
    rank: ClassVar[int] = 6

    optimizer: str = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.9
    decay: float = 0.99
    adaptivity: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in ("sgd", "adam", "yogi"):
            raise ValueError(f"optimizer {self.optimizer!r} is not sgd, adam or yogi")
        if not 0 <= self.momentum < 1 or not 0 <= self.decay < 1:
            raise ValueError("momentum and decay are in [0, 1)")
        if not 0 < self.adaptivity < math.inf or not 0 < self.learning_rate < math.inf:
            raise ValueError("learning_rate and adaptivity are greater than 0")

    @property
    def slots(self) -> dict[str, float]:
        """What `step` keeps of a parameter -> its value before the first round."""
        squares = {} if self.optimizer == "sgd" else {"square": self.adaptivity**2}
        return {"mean": 0.0, **squares}

    def update_server(self, server: Server) -> None:
        server.mean()
        server.step(self.step, self.slots)

    def step(self, delta: np.ndarray, kept: dict[str, np.ndarray]) -> np.ndarray:
        """What is added to a parameter; `delta` is the clients' mean minus the server's model."""
        mean = kept["mean"]
        if self.optimizer == "sgd":
            mean[...] = self.momentum * mean + delta
            return self.learning_rate * mean
        mean[...] = self.momentum * mean + (1 - self.momentum) * delta
        square, new = kept["square"], delta * delta
        if self.optimizer == "adam":
            square[...] = self.decay * square + (1 - self.decay) * new
        else:
            square -= (1 - self.decay) * new * np.sign(square - new)
        return self.learning_rate * mean / (np.sqrt(square) + self.adaptivity)
