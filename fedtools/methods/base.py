"""What a federated method is: which tensors travel, what a client does, what the server does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, NewType

import numpy as np

from fedtools.files.config import Natural, NonNegative, Positive
from fedtools.files.messages import Payload
from fedtools.files.states import Spec
from fedtools.files.values import STATISTICS
from fedtools.models.adaptation import DELTA, combine_of

if TYPE_CHECKING:
    from fedtools.client.unit import Trained
    from fedtools.server.server import Server

SHARED = "shared"  # sent by the server, trained at the clients, aggregated
PERSONAL = "personal"  # kept at the client from round to round, never sent
GIVEN = "given"  # sent by the server, which makes it; clients neither train nor return it
RESET = "reset"  # put back to the initial value at the start of every round, never sent

# What a task may have, and a method may need.
TaskPart = NewType("TaskPart", str)
MODEL = TaskPart("model")  # that clients train
OPTIMIZER = TaskPart("optimizer")  # may live on, since one model is trained at a time
FEATURES = TaskPart("features")  # can be sent: models are cut into an extractor and a classifier
LABELS = TaskPart("labels")  # and sizes of all clients' data are known before training
COUNTS = TaskPart("counts")  # of words, in one tensor, sent; nothing is trained


@dataclass(frozen=True)
class Extracted:
    """What a phase sends: what the personal bottom of the model makes of a client's audio.

    Attributes:
        bits: of a value.
        hours: of speech, at most; of a client that sends more nothing is taken.
    """

    bits: int = 32
    hours: float = 1000.0


@dataclass(frozen=True)
class Phase:
    """What one round is.

    Attributes:
        client: what a client of the round does with its `Client`, or with its data where the task
            has no models; None if no client takes part.
        server: what the server makes of the messages.
        sends: what each client sends: SHARED, the shared tensors of its model; COUNTS; features;
            or a payload.
        everybody: all clients take part, not a sample of them.
        server_trains: `Server.client` is needed: the server with the experiment's data, or ...
        on_features: ... with the features that clients sent in this earlier round, if it is not 0.
        jointly: the server trains a personal part for each client too, on that client's data.
        trains: whether clients take gradient steps.
        keep: what clients send stays, whatever `keep_updates` says: a later round needs it.
        may_lack: a client whose data are gone, or the personal parameters that it trained, is left
            out and the rest goes on (speech recognition, of phases that send no tensors); otherwise
            a round wants everybody's data.
        untimed: clients keep how long it took to themselves, since that depends on data which
            nobody is to know of.
    """

    client: Callable[[Any], list[Trained]] | None
    server: Callable[[Server], None]
    sends: str | Extracted | Payload = SHARED
    everybody: bool = False
    server_trains: bool = False
    on_features: int = 0
    jointly: bool = False
    keep: bool = False
    trains: bool = True
    may_lack: bool = False
    untimed: bool = False


@dataclass(frozen=True)
class Method:
    """A method of personalised or federated learning; its fields are its options.

    Attributes:
        title: its name in tables.
        rank: its place among the rows of tables, the lowest first.
        needs: the parts that a task must have.
        federated: whether clients train; otherwise it is a row apart in some tables.
        combines: what its server can make of clients' adapters, see `Adapt.combine`.
        local_epochs: epochs that a client trains in a round; of keyword spotting, where every batch
            is full, an epoch is as many batches as hold all clips, and the ledger has its length.
        local_steps: gradient steps instead, where this is not 0 (of clips).
        personal: patterns, such as "encoder.embed.*", of the parameters that stay at a client.
        min_clients: with fewer usable messages a round is an error.
        max_norm_ratio: an update is refused whose norm is over so many times the median norm of
            the round's updates, BatchNorm's statistics apart; 0 refuses none. In the recipes the
            most of honest ones is 3.5 times, and 6.1 of statistics, both in FedKWS-UI, some of
            whose clients take many more steps than others.
        max_weight_ratio: a client's weight counts as at most so many times the median weight, and
            of the features that it sends no more are taken than so many times the median client's
            utterances and frames; 0 sets no bound.
    """

    # What methods of earlier versions have, and what it is called now.
    _RENAMED: ClassVar[dict[str, str]] = {
        "train_client": "client",
        "update_server": "server",
        "tasks": "needs",
    }

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in cls._RENAMED.items():
            if old in vars(cls):
                raise TypeError(f"{cls.__name__}.{old} is called {new} now: see CHANGELOG.md")

    title: ClassVar[str]
    rank: ClassVar[int] = 100
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL,)
    federated: ClassVar[bool] = True
    combines: ClassVar[tuple[str, ...]] = ("mean", "fixed_a")

    local_epochs: Positive = 1
    local_steps: Natural = 0
    personal: tuple[str, ...] = ()
    min_clients: Positive = 1
    max_norm_ratio: NonNegative = 20.0
    max_weight_ratio: NonNegative = 20.0

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        """Raise a ValueError if it cannot have this task, or a model of this configuration.

        Args:
            task: its name.
            parts: what the task has.
            model: its options.
        """
        for part in self.needs:
            if part not in parts:
                raise ValueError(f"{self.title} needs {part}, which task {task} has not")
        if self.personal and not self.federated:
            raise ValueError(f"{self.title} has no clients, and so no personal layers")
        if self.local_steps and LABELS not in parts:
            raise ValueError(f"local_steps is of clips; task {task} has local_epochs")
        if (combine := combine_of(model)) not in self.combines:
            known = ", ".join(self.combines)
            raise ValueError(f"combine: {self.title} cannot have {combine}; it has {known}")

    def phase(self, number: int) -> Phase:
        """What round `number`, counted from 1, is; by default every round is the same."""
        return Phase(client=self.client, server=self.server)

    def stage(self, number: int) -> int:
        """The stage that round `number` is of; models of one stage alone are averaged."""
        return 1

    def client(self, client: Any) -> list[Trained]:
        """Train the model that lies in `client`, whose SHARED tensors the client then sends.

        It is a `Client`, or a client's data where the task has no models; see `Phase.client`.

        It may be many clients at once, each with a model, a loss and a result of its own.
        """
        raise NotImplementedError

    def server(self, server: Server) -> None:
        """Make the next round's SHARED tensors from the messages that `server` holds."""
        raise NotImplementedError

    def parameter_kind(self, name: str) -> str:
        """Whether a parameter is SHARED or PERSONAL."""
        return PERSONAL if any(fnmatchcase(name, one) for one in self.personal) else SHARED

    def buffer_kind(self, name: str, is_float: bool) -> str:
        """What happens to a buffer; by default BatchNorm's statistics go with the parameters.

        Integer buffers (BatchNorm's count of batches) and constants are RESET: a mean of counts
        means nothing, and a constant need not travel. What adapters are given is GIVEN.
        """
        if name.endswith(DELTA):
            return GIVEN
        if is_float and name.endswith(STATISTICS):
            return self.parameter_kind(name)
        return RESET

    def kinds(self, parameters: set[str], spec: Spec) -> dict[str, str]:
        """tensor name -> SHARED, PERSONAL, GIVEN or RESET, for a model's parameters and buffers.

        Args:
            parameters: the names of those of `spec` that training changes.
            spec: of the full state.

        Raises:
            ValueError: if a pattern of `personal` matches no parameter.
        """
        for pattern in self.personal:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                names = sorted(parameters)
                raise ValueError(
                    f"personal: no parameter matches {pattern!r}; there are {names[0]}, "
                    f"... {names[-1]}"
                )
        return {
            name: self.parameter_kind(name)
            if name in parameters
            else self.buffer_kind(name, "float" in kind)
            for name, (_, kind) in spec.items()
        }

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

    @property
    def rounds(self) -> int | None:
        """How many rounds it has, where its own options say that."""
        return None

    def most_steps(self, utterances: int) -> int:
        """The most gradient steps that so many utterances make in a round, one of each utterance.

        The server refuses who says that it took more. Keyword clients take those of `prepare`.
        """
        return self.local_epochs * utterances

    def private_training(self, steps: int) -> int:
        """Gradient steps in a round of what stays at a client, beside its `steps` on the model."""
        return 0

    def weight(self, utterances: int) -> float:
        """A client's weight in the mean; by default all are equal."""
        return 1.0
