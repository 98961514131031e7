"""FedOpt: the server takes an optimiser step towards the mean of the clients' models.

S. Reddi et al.: Adaptive federated optimization, ICLR 2021, algorithm 2 (no bias correction, and
the second moments start at tau^2). With "sgd", learning rate 1 and no momentum it is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from fedtools.core.config import AboveZero, Share
from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from fedtools.server.server import Server


@METHODS.register("fedopt")
@dataclass(frozen=True)
class FedOpt(FedAvg):
    """FedAvg with a server optimiser, whose pseudo-gradient is the clients' mean minus the model.

    Attributes:
        optimizer: "sgd" (with momentum), "adam" or "yogi".
        learning_rate: eta.
        momentum: beta 1.
        decay: beta 2, for the second moments.
        adaptivity: tau, which bounds the step where second moments are small.
    """

    title: ClassVar[str] = "FedOpt"
    rank: ClassVar[int] = 6
    # The optimiser steps along differences of tensors; products of adapters have none.
    combines: ClassVar[tuple[str, ...]] = ("mean", "fixed_a")

    optimizer: Literal["sgd", "adam", "yogi"] = "sgd"
    learning_rate: AboveZero = 1.0
    momentum: Share = 0.9
    decay: Share = 0.99
    adaptivity: AboveZero = 0.001

    @property
    def slots(self) -> dict[str, float]:
        """Return the name and initial value of each optimiser state that `step` updates."""
        squares = {} if self.optimizer == "sgd" else {"square": self.adaptivity**2}
        return {"mean": 0.0, **squares}

    def server(self, server: Server) -> None:
        server.mean()
        server.step(self.step, self.slots)

    def step(self, delta: np.ndarray, kept: dict[str, np.ndarray]) -> np.ndarray:
        """Return the update of a parameter; `delta` is the clients' mean minus the model."""
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
        step: np.ndarray = self.learning_rate * mean / (np.sqrt(square) + self.adaptivity)
        return step
