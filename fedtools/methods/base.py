"""What a federated method is: which tensors travel, what a client minimises, what a server does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtools.client.learner import Learner
from fedtools.client.train import Fitted
from fedtools.server.server import Server

SHARED = "shared"  # sent by the server, trained at the clients, aggregated
PERSONAL = "personal"  # kept at the client from round to round, never sent
RESET = "reset"  # put back to the initial value at the start of every round, never sent


@dataclass(frozen=True)
class Method:
    """A method of personalised or federated learning; its fields are its options.

    Attributes:
        title: its name in tables.
        local_epochs: epochs that a client trains in a round.
        server_epochs: epochs that the server trains in a round.
        min_clients: with fewer usable updates a round is an error.
    """

    title: ClassVar[str]
    has_clients: ClassVar[bool] = True
    server_epochs: ClassVar[int] = 0

    local_epochs: int = 1
    min_clients: int = 1

    def __post_init__(self) -> None:
        for name in ("local_epochs", "min_clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")

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

    def train_client(self, client: Learner) -> Fitted:
        """Train the model that lies in `client`, whose SHARED tensors the client then sends."""
        raise NotImplementedError

    def update_server(self, server: Server) -> None:
        """Make the next round's SHARED tensors from the updates that `server` holds."""
        raise NotImplementedError
