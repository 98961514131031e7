"""What a federated method is: which tensors travel, what a client minimises, what a server does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedtools.client.learner import Learner
from fedtools.client.train import Fitted
from fedtools.server.server import Server

if TYPE_CHECKING:
    from fedtools.client.parallel import Stack

SHARED = "shared"  # sent by the server, trained at the clients, aggregated
PERSONAL = "personal"  # kept at the client from round to round, never sent
RESET = "reset"  # put back to the initial value at the start of every round, never sent


@dataclass(frozen=True)
class Method:
    """A method of personalised or federated learning; its fields are its options.

    Attributes:
        title: its name in tables.
        tasks: those that it can have.
        local_epochs: epochs that a client trains in a round; of keyword spotting, where every batch
            is full, an epoch is as many batches as hold all clips, and the ledger has its length.
        local_steps: gradient steps instead, where this is not 0 (keyword spotting).
        server_epochs: epochs that the server trains in a round.
        min_clients: with fewer usable updates a round is an error.
    """

    title: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]] = ("asr", "kws")
    server_epochs: ClassVar[int] = 0

    local_epochs: int = 1
    local_steps: int = 0
    min_clients: int = 1

    def __post_init__(self) -> None:
        for name in ("local_epochs", "min_clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.local_steps < 0:
            raise ValueError("local_steps is negative")

    def check(self, task: str, model: Mapping[str, Any]) -> None:
        """Raise a ValueError if it cannot have this task, or a model of this configuration."""
        if task not in self.tasks:
            raise ValueError(f"{self.title} is for task {' or '.join(self.tasks)}, not {task}")
        if task == "asr" and self.local_steps:
            raise ValueError("local_steps is for task kws; task asr has local_epochs")

    def parameter_kind(self, name: str) -> str:
        """Whether a parameter is SHARED or PERSONAL."""
        raise NotImplementedError

    def buffer_kind(self, name: str, is_float: bool) -> str:
        """What happens to a buffer; by default BatchNorm's statistics go with the parameters.

        Integer buffers (BatchNorm's count of batches) and constants are RESET: a mean of counts
        means nothing, and a constant need not travel.
        """
        if is_float and name.endswith((".running_mean", ".running_var")):
            return self.parameter_kind(name)
        return RESET

    def prepare(
        self, sizes: np.ndarray, entropies: np.ndarray, batch_size: int
    ) -> dict[str, np.ndarray]:
        """What the method says of each client of the federation, before it begins.

        Args:
            sizes: clips of each client, (clients,).
            entropies: of its labels, over log(classes), (clients,).
            batch_size: clips of a step.

        Returns:
            name -> one value for each client; "steps" is its number of gradient steps in a round.
        """
        batches = -(-sizes // batch_size)
        steps = (
            np.full_like(sizes, self.local_steps)
            if self.local_steps
            else batches * self.local_epochs
        )
        return {"steps": steps}

    def private_training(self, steps: int) -> int:
        """Gradient steps in a round of what stays at a client, beside its `steps` on the model."""
        return 0

    def weight(self, utterances: int) -> float:
        """A client's weight in the mean; by default all are equal."""
        return 1.0

    def train_client(self, client: Learner | Stack) -> list[Fitted]:
        """Train the model that lies in `client`, whose SHARED tensors the client then sends.

        A `Stack` is many clients at once, each with a model, a loss and a result of its own.
        """
        raise NotImplementedError

    def update_server(self, server: Server) -> None:
        """Make the next round's SHARED tensors from the updates that `server` holds."""
        raise NotImplementedError
