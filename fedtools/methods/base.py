"""Interface of a federated method: exchanged tensors, client update and server update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NewType

import numpy as np

from fedtools.core.config import Natural, NonNegative, Positive, Section
from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import Payload
from fedtools.exchange.states import Spec
from fedtools.exchange.values import STATISTICS
from fedtools.models.adapt.adaptation import DELTA, FACTORS, combine_of
from fedtools.privacy.clipping import Grid
from fedtools.privacy.options import UserPrivacy
from fedtools.privacy.secagg.plan import Options as SecureSums

if TYPE_CHECKING:
    from fedtools.client.unit import Trained
    from fedtools.server.robust.base import Rule
    from fedtools.server.server import Server

SHARED = "shared"  # sent by the server, trained by the clients, aggregated
PERSONAL = "personal"  # kept at the client between rounds, never sent
GIVEN = "given"  # computed and sent by the server; clients neither train nor return it
RESET = "reset"  # set to the initial value at the start of every round, never sent

# Parts that a task may have and a method may need.
TaskPart = NewType("TaskPart", str)
MODEL = TaskPart("model")  # a model that clients train
OPTIMIZER = TaskPart("optimizer")  # its state can be kept, since one model is trained at a time
FEATURES = TaskPart("features")  # can be sent: the model is cut into extractor and classifier
LABELS = TaskPart("labels")  # labels and data sizes of all clients are known before training
COUNTS = TaskPart("counts")  # word counts are sent, as one tensor; nothing is trained
ROOT_DATA = TaskPart("root data")  # the server can train on labelled data of its own

# The split of the server's own data, on which it trains as a client does for some robust rules.
ROOT = "root"


@dataclass(frozen=True)
class Extracted:
    """Features that clients send: their audio after the personal bottom layers of the model.

    Attributes:
        bits: bits per value.
        hours: the most hours of speech a client may send; a client that sends more is refused.
    """

    bits: int = 32
    hours: float = 1000.0


@dataclass(frozen=True)
class Changes:
    """Changes of the shared tensors that clients send, clipped, in whole steps of a grid.

    Attributes:
        grid: the norm to which they are clipped, and the length of a step.
    """

    grid: Grid


@dataclass(frozen=True)
class Phase:
    """Description of one round.

    Attributes:
        client_update: the client's half; it takes the `Client`, or the client's data where the
            task has no models. None if no client takes part.
        server_update: the server's half, computed from the client messages.
        sends: what each client sends: SHARED, the shared tensors of its model; their changes;
            COUNTS; features; or a payload.
        everybody: whether all clients take part rather than a sample.
        server_trains: whether the server trains (`Server.learner`), on the experiment's data or ...
        server_data: ... on those of another split, or ...
        on_features: ... on the features that clients sent in this earlier round, if not 0.
        jointly: whether the server also trains a personal part for each client, on its data.
        trains: whether clients take gradient steps.
        keep: whether client messages are kept for a later round, regardless of `keep_updates`.
        sample: (experiment, round) -> the clients that take part, if seed and round do not decide.
        may_lack: whether the round goes on without a client whose data or trained personal
            parameters are missing (speech recognition, in phases that send no tensors); otherwise
            the round needs the data of all its clients.
        untimed: whether clients withhold their training time, which depends on private data.
    """

    client_update: Callable[[Any], list[Trained]] | None
    server_update: Callable[[Server], None]
    sends: str | Extracted | Changes | Payload = SHARED
    everybody: bool = False
    server_trains: bool = False
    server_data: str = "train"
    on_features: int = 0
    jointly: bool = False
    keep: bool = False
    trains: bool = True
    sample: Callable[[Experiment, int], list[str]] | None = None
    may_lack: bool = False
    untimed: bool = False


@dataclass(frozen=True)
class Method:
    """A method of personalised or federated learning; its fields are its options.

    Attributes:
        title: the name in tables.
        rank: the position among the rows of tables, lowest first.
        needs: the parts that a task must have.
        federated: whether clients train; some tables show other methods separately.
        combines: the supported ways to combine client adapters, see `Adapt.combine`.
        no_rule: why `robust` has no effect; "" if the server takes `Server.mean` of models.
        sections: option -> the class of its own options, where it is a section of them.
        local_epochs: epochs per client and round. In keyword spotting, where every batch is full,
            an epoch has as many batches as hold all clips, and the ledger reports its length.
        local_steps: gradient steps per client and round, instead of epochs, if not 0 (clips only).
        personal: patterns, such as "encoder.embed.*", of the parameters that stay at a client.
        min_clients: the fewest usable messages; a round with fewer is an error.
        max_norm_ratio: the largest ratio of an update's norm to the median norm of the round's
            updates, BatchNorm statistics and products of adapters counted separately; larger
            updates are refused, and 0 refuses none. The median counts as at least a twentieth of
            the norm of the state that clients started from. The largest
            ratios of honest updates in the recipes are 3.5, and 6.1 for statistics, both in
            FedKWS-UI, where some clients take many more steps than others.
        max_weight_ratio: the largest ratio of a client's weight to the median weight; larger
            weights are lowered to it. It also bounds the utterances and frames of the features
            used from each client, relative to the median client. 0 sets no bound.
        robust: how the server combines models, so that a few dishonest clients cannot lead it far:
            `rule`, a name, and the rule's options; by default the rule mean. Refused by methods
            whose server takes no mean of models.
    """

    title: ClassVar[str]
    rank: ClassVar[int] = 100
    needs: ClassVar[tuple[TaskPart, ...]] = (MODEL,)
    federated: ClassVar[bool] = True
    combines: ClassVar[tuple[str, ...]] = ("mean", "fixed_a")
    no_rule: ClassVar[str] = "the server takes no mean of models"
    sections: ClassVar[Mapping[str, type]] = {}

    local_epochs: Positive = 1
    local_steps: Natural = 0
    personal: tuple[str, ...] = ()
    min_clients: Positive = 1
    max_norm_ratio: NonNegative = 20.0
    max_weight_ratio: NonNegative = 20.0
    robust: Section = field(default_factory=dict)

    @cached_property
    def rule(self) -> Rule:
        """Return the robust rule; raise a `UserError` if the section `robust` is wrong."""
        from fedtools.server.robust import make_rule

        return make_rule(self.robust, "robust")

    @property
    def user_privacy(self) -> UserPrivacy | None:
        """Return the options of user-level differential privacy of the model; None without it.

        With it, no client's message may depend on the data of another client, not even by the
        rounding of computations that they share.
        """
        return None

    @property
    def secure_sums(self) -> SecureSums | None:
        """Return what secure sums of clients' changes tolerate; None where the server sees each."""
        return None

    @property
    def bounds_sums(self) -> bool:
        """Return whether the median client's amount bounds the others'; see `max_weight_ratio`."""
        return True

    def check(self, task: str, parts: Sequence[TaskPart], model: Mapping[str, Any]) -> None:
        """Raise a ValueError if the method does not support this task or model configuration.

        Args:
            task: the name of the task.
            parts: the parts of the task.
            model: the options of the model.
        """
        for part in self.needs:
            if part not in parts:
                raise ValueError(f"{self.title} needs {part}, which task {task} does not have")
        if self.personal and not self.federated:
            raise ValueError(f"{self.title} has no clients, and so no personal layers")
        if self.local_steps and LABELS not in parts:
            raise ValueError(f"local_steps applies to clips; task {task} uses local_epochs")
        if (combine := combine_of(model)) not in self.combines:
            known = ", ".join(self.combines)
            raise ValueError(f"combine: {self.title} does not support {combine}, only {known}")
        self._check_rule(parts)

    def _check_rule(self, parts: Sequence[TaskPart]) -> None:
        """Raise a ValueError if the section `robust` is wrong, or has no use or no data."""
        try:
            rule = self.rule
        except UserError as error:
            raise ValueError(str(error)) from None
        if self.robust and self.no_rule:
            raise ValueError(f"robust: {self.title} has no use for a rule: {self.no_rule}")
        if not rule.root_in(1):
            return
        name = self.robust["rule"]
        if ROOT_DATA not in parts:
            raise ValueError(f"robust: {name} needs data of the server's own, unlike this task")
        if self.personal:
            problem = "trains on data of the server's own, which has no personal parameters"
            raise ValueError(f"robust: {name} {problem}")
        if self.phase(1).server_data != ROOT:
            raise ValueError(f"robust: {name} needs phases in which the server trains, see Phase")

    def phase(self, number: int) -> Phase:
        """Return the phase of round `number`, from 1; by default all rounds are the same.

        For some robust rules the server trains, too, on data of its own.
        """
        trains = self.rule.root_in(number)
        own = ROOT if trains else "train"
        return Phase(self.client, self.server, server_trains=trains, server_data=own)

    def stage(self, number: int) -> int:
        """Return the stage of round `number`; only models of the same stage are averaged."""
        return 1

    def client(self, client: Any) -> list[Trained]:
        """Train the model in `client`, whose SHARED tensors are then sent.

        `client` is a `Client`, or a client's data where the task has no models; see
        `Phase.client_update`. It may stand for a stack of clients, each with its own model, loss
        and result.
        """
        raise NotImplementedError

    def server(self, server: Server) -> None:
        """Compute the next round's SHARED tensors from the messages in `server`."""
        raise NotImplementedError

    def parameter_kind(self, name: str) -> str:
        """Return whether a parameter is SHARED or PERSONAL."""
        return PERSONAL if any(fnmatchcase(name, one) for one in self.personal) else SHARED

    def buffer_kind(self, name: str, is_float: bool) -> str:
        """Return the kind of a buffer; by default BatchNorm statistics follow the parameters.

        Integer buffers (BatchNorm's batch count) and constants are RESET: a mean of counts is
        meaningless, and constants need not be sent. The server's residuals of adapters are GIVEN.
        """
        if name.endswith(DELTA):
            return GIVEN
        if is_float and name.endswith(STATISTICS):
            return self.parameter_kind(name)
        return RESET

    def kinds(self, parameters: set[str], spec: Spec) -> dict[str, str]:
        """Map each parameter and buffer name to SHARED, PERSONAL, GIVEN or RESET.

        Args:
            parameters: the names of the tensors in `spec` that training changes.
            spec: the spec of the full state.

        Raises:
            ValueError: if a pattern of `personal` matches no parameter, or a robust rule takes
                values by themselves that are factors of adapters.
        """
        for pattern in self.personal:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                names = sorted(parameters)
                raise ValueError(
                    f"personal: no parameter matches {pattern!r}; there are {names[0]}, "
                    f"... {names[-1]}"
                )
        found = {
            name: self.parameter_kind(name)
            if name in parameters
            else self.buffer_kind(name, "float" in kind)
            for name, (_, kind) in spec.items()
        }
        if self.rule.needs == "values":
            for name, kind in found.items():
                if kind == SHARED and name.endswith(FACTORS):
                    problem = f"{name} is a factor of an adapter, whose coordinates mean nothing"
                    remedy = "take a rule of distances, such as geometric_median"
                    raise ValueError(f"robust: {problem} by themselves: {remedy}")
        return found

    def prepare(
        self, sizes: np.ndarray, entropies: np.ndarray, batch_size: int
    ) -> dict[str, np.ndarray]:
        """Compute the method's values for each client before the federation begins.

        Args:
            sizes: the number of clips of each client, (clients,).
            entropies: the entropy of each client's labels, divided by log(classes), (clients,).
            batch_size: clips per step.

        Returns:
            name -> one value per client; "steps" is the number of gradient steps per round.
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
        """Return the number of rounds if the method's options determine it, else None."""
        return None

    def most_steps(self, utterances: int) -> int:
        """Return the most gradient steps per round on this many utterances: one step for each.

        The server refuses a client that reports more. Keyword clients use the steps of `prepare`.
        """
        return self.local_epochs * utterances

    def private_training(self, steps: int) -> int:
        """Return the gradient steps per round on private models, on top of `steps` on the model."""
        return 0

    def weight(self, utterances: int) -> float:
        """Return a client's weight in the mean; by default all weights are equal."""
        return 1.0
