"""Who trains together, on what, and how: what tasks tell the training of a client."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedtools.files.private import Private
from fedtools.files.seeds import seed64

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedtools.client.objective import Objective
    from fedtools.models.extractor import Cut
    from fedtools.models.training import Training

SERVER = "server"
# (seed, round, name) of everything random, and the purpose of a second training in a round.
Key = tuple[int, int, str] | tuple[int, int, str, str]
_NO_FEATURES = "only tasks with the part features have this: a method names it in `needs`"


@dataclass(frozen=True)
class Unit:
    """Who trains together in a round: a client, a stack of clients, or the server.

    Attributes:
        names: the clients, those with the most steps first; or "server".
        number: the round.
        seed: the experiment's.
        home: where checkpoints and an optimiser are kept; None where several clients train.
        own: each client's private files; of a server that trains models for all clients, theirs.
        personal: names of the tensors that stay at each client.
        experiment: what progress lines call it; nothing where one is trained beside it.
    """

    names: Sequence[str]
    number: int
    seed: int
    home: Private | None
    own: Sequence[Private]
    personal: frozenset[str] = field(default_factory=frozenset)
    experiment: str = ""

    @property
    def title(self) -> str:
        """What progress lines call its training."""
        first, *others = self.names
        more = f" and {len(others)} more" if others else ""
        where = f"{self.experiment}: " if self.experiment else ""
        return f"{where}round {self.number}, {first}{more}"

    def key(self, purpose: str) -> np.ndarray:
        """What tells a training's checkpoint from that of another round or purpose."""
        return np.array([self.number, zlib.crc32(purpose.encode())])

    def random(self, purpose: str) -> int:
        """What a training's random numbers are drawn from, beside the number of their step."""
        first = self.names[0]
        key = first if purpose == "train" else f"{purpose}/{first}"
        return seed64(self.seed, "step", self.number, key)


@dataclass(frozen=True)
class Trained:
    """What a round came to at a client: optimiser steps, mean loss, the size of the data.

    `reason` says why the result cannot be used: loss or parameters are not finite. It may carry
    what a phase sends in place of the shared tensors: tensors of no model, or features.
    `empty_labels` is each client's share of utterances that had an empty label; a server trains on
    those of many clients.
    """

    steps: int
    loss: float
    utterances: int
    reason: str = ""
    tensors: Mapping[str, Tensor | np.ndarray] = field(default_factory=dict)
    features: Any = None
    empty_labels: Mapping[str, float] = field(default_factory=dict)


class Batch(Protocol):
    """What a loss is given; `amount` is its weight in the mean loss, `frames` its size.

    `active` says how many models of a stack the batch has data for; None: there is no stack.
    """

    @property
    def amount(self) -> int: ...

    @property
    def frames(self) -> int: ...

    @property
    def active(self) -> int | None: ...


class Batches(Protocol):
    """The batches of a training; `steps` are those of each model, not growing along the stack."""

    steps: list[int]

    def stream(self, first: int) -> Iterator[Sequence[Batch]]:
        """The batches of each step from number `first`, of which the gradient is the mean."""


class Source(Protocol):
    """A unit's data.

    Attributes:
        sizes: of each client.
        facts: what the method's `prepare` said of each client, arrays of shape (K,); of utterances
            the number of their "speakers", and the "clients" that batches number.
    """

    sizes: Sequence[int]
    facts: Mapping[str, np.ndarray]

    def batches(
        self, epochs: int | None, steps: int | Sequence[int] | None, purpose: str
    ) -> Batches:
        """The batches of a training, by default as many as a round has."""

    @property
    def secret(self) -> bytes:
        """What nobody else has, see `sent_names`; where a task has the part "features"."""
        raise TypeError(_NO_FEATURES)

    def items(self, order: Sequence[int]) -> Iterator[tuple[list[int], Any]]:
        """One item at a time, with its number; where a task has the part "features"."""
        raise TypeError(_NO_FEATURES)


class Models(Protocol):
    """A task's models: how they are built, what they compute, what they minimise.

    Networks, sources and batches are the task's own.

    Attributes:
        training: the options.
        stacked: whether a model has a client dimension, always.
    """

    training: Training
    stacked: bool

    def build(self, clients: int = 1, use: str = "") -> nn.Module:
        """A model, or a stack; made once for each use, whose user loads tensors into it."""

    def tensors(self, model: nn.Module, client: int = 0) -> dict[str, Tensor]:
        """One client's parameters and buffers, not copied."""

    def objective(self, model: nn.Module, source: Any) -> Objective:
        """What training minimises, unless a method says otherwise."""

    def represent(self, model: Any, batch: Any) -> Any:
        """The features below the last layer."""

    def classify(self, model: Any, features: Any) -> Any:
        """What the last layer makes of features."""

    def loss_of(self, found: Any, batch: Any) -> Tensor:
        """Each client's loss, (K,), of what `classify` gave."""

    def vectors(self, features: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Features as vectors of clips, utterances or sentences, (K, B, D); their weights (K, B).

        Each client's weights sum to 1.
        """

    def cut(self) -> Cut:
        """Where the personal extractor ends; where a task has the part "features"."""
        raise TypeError(_NO_FEATURES)

    def joint(self, clients: int, use: str = "") -> nn.Module:
        """The models of all clients, with what is shared in common; as of `cut`."""
        raise TypeError(_NO_FEATURES)
