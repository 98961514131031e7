"""Training units, and the interfaces of the data and models that tasks provide for them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedtools.core.seeds import seed64
from fedtools.exchange.private import Private

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedtools.client.objective import Objective
    from fedtools.models.acoustic.extractor import Cut
    from fedtools.models.training import Training

SERVER = "server"
# Key of random numbers: (seed, round, name), and the purpose of a second training in a round.
Key = tuple[int, int, str] | tuple[int, int, str, str]
_NO_FEATURES = "needs a task with the part features, which a method lists in `needs`"


@dataclass(frozen=True)
class Unit:
    """A training unit of a round: a client, a stack of clients, or the server.

    Attributes:
        names: the clients, in order of decreasing steps; or "server".
        number: the round.
        seed: the experiment's seed.
        home: private files for checkpoints and optimiser; None for a stack of clients.
        own: each client's private files, also where the server trains a model per client.
        personal: names of the tensors that stay at each client.
        experiment: the experiment's title in progress lines; may be empty.
        variant: what the data are, if they are not the clients' own: an attacker's poisoned clips.
    """

    names: Sequence[str]
    number: int
    seed: int
    home: Private | None
    own: Sequence[Private]
    personal: frozenset[str] = field(default_factory=frozenset)
    experiment: str = ""
    variant: str = ""

    @property
    def title(self) -> str:
        """Return the title of this training in progress lines."""
        first, *others = self.names
        more = f" and {len(others)} more" if others else ""
        where = f"{self.experiment}: " if self.experiment else ""
        return f"{where}round {self.number}, {first}{more}"

    def key(self, purpose: str) -> np.ndarray:
        """Return a key that identifies a checkpoint's round and purpose."""
        # A checkpoint on some data is none of a training on other data.
        return np.array([self.number, zlib.crc32(f"{self.variant}{purpose}".encode())])

    def random(self, purpose: str) -> int:
        """Return the random seed of a training, to which the number of a step is added."""
        first = self.names[0]
        key = first if purpose == "train" else f"{purpose}/{first}"
        return seed64(self.seed, "step", self.number, key)


@dataclass(frozen=True)
class Trained:
    """Result of a round at a client: optimiser steps, mean loss, data size.

    Attributes:
        reason: why the result is unusable, such as a diverged loss; "" if it is usable.
        tensors, features: what the phase sends instead of the model's shared tensors, if anything.
        empty_labels: each client's share of utterances with an empty label; the server trains on
            utterances of many clients.
    """

    steps: int
    loss: float
    utterances: int
    reason: str = ""
    tensors: Mapping[str, Tensor | np.ndarray] = field(default_factory=dict)
    features: Any = None
    empty_labels: Mapping[str, float] = field(default_factory=dict)


class Batch(Protocol):
    """A batch: `amount` is its weight in the mean loss, `frames` its size in progress lines.

    `active` is the number of models of a stack that it has data for; None without a stack.
    """

    @property
    def amount(self) -> int: ...

    @property
    def frames(self) -> int: ...

    @property
    def active(self) -> int | None: ...


class Batches(Protocol):
    """The batches of a training; `steps` is the number of steps per model, in decreasing order."""

    steps: list[int]

    def stream(self, first: int) -> Iterator[Sequence[Batch]]:
        """Yield the batches of each step from `first`; a step uses their mean gradient."""


class Source(Protocol):
    """A unit's data.

    Attributes:
        sizes: the data size of each client.
        facts: the values of the method's `prepare` for each client, arrays of shape (K,); for
            utterances, the number of "speakers" and the "clients" that batches refer to by index.
    """

    sizes: Sequence[int]
    facts: Mapping[str, np.ndarray]

    def batches(
        self, epochs: int | None, steps: int | Sequence[int] | None, purpose: str
    ) -> Batches:
        """Return the batches of a training, by default those of one round."""

    @property
    def secret(self) -> bytes:
        """Return the client's secret for `sent_names`, for tasks with the part "features"."""
        raise TypeError(_NO_FEATURES)

    def items(self, order: Sequence[int]) -> Iterator[tuple[list[int], Any]]:
        """Yield one item at a time, with its index in a list, for tasks with "features"."""
        raise TypeError(_NO_FEATURES)


class Models(Protocol):
    """A task's models: construction, computation and objective.

    The types of networks, sources and batches are the task's own.

    Attributes:
        training: the training options.
        stacked: whether models have a client dimension, even for one client.
    """

    training: Training
    stacked: bool

    def build(self, clients: int = 1, use: str = "") -> nn.Module:
        """Return a model or stack, created once per use; the caller loads its tensors."""

    def tensors(self, model: nn.Module, client: int = 0) -> dict[str, Tensor]:
        """Return one client's parameters and buffers, not copied."""

    def objective(self, model: nn.Module, source: Any) -> Objective:
        """Return the training objective, unless the method defines another one."""

    def represent(self, model: Any, batch: Any) -> Any:
        """Return the input features of the last layer."""

    def classify(self, model: Any, features: Any) -> Any:
        """Return the output of the last layer for `features`."""

    def loss_of(self, found: Any, batch: Any) -> Tensor:
        """Compute each client's loss, (K,), from the output of `classify`."""

    def vectors(self, features: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return vectors (K, B, D) of clips, utterances or sentences, and their weights (K, B).

        Each client's weights sum to 1.
        """

    def cut(self) -> Cut:
        """Return where the personal extractor ends, for tasks with the part "features"."""
        raise TypeError(_NO_FEATURES)

    def joint(self, clients: int, use: str = "") -> nn.Module:
        """Return all clients' models with common shared parameters, for tasks with "features"."""
        raise TypeError(_NO_FEATURES)
