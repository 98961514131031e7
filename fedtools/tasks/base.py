"""Base classes of tasks: what a federation learns from, and how its models are measured."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import Limits, Payload
from fedtools.exchange.options import Options
from fedtools.exchange.states import Spec, spec_of
from fedtools.methods.base import Method, Phase
from fedtools.tasks import facts_of
from fedtools.tasks.client_facts import FILE, ClientFacts
from fedtools.tasks.facts import Facts, data_of
from fedtools.tasks.site_facts import SiteFacts

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from fedtools.client.unit import Models, Source
    from fedtools.server.server import Release

State = Mapping[str, Any]
Opened = TypeVar("Opened", bound="HasSettings")
Given = ParamSpec("Given")
Found = TypeVar("Found")
# The methods that can federate a task.
By = TypeVar("By", bound=Method)


@dataclass(frozen=True)
class NewExperiment(Generic[By]):
    """An experiment to be created, as `Task.begin` receives it.

    Attributes:
        options: the options that will be fixed.
        method: made from the options.
        data, assets: folders by split, and by asset name.
        start: the file of a full state to start from, or None.
        where: where the options were read from, for messages.
        known: what is known of the training data, of which `data` has no folder if sites told of
            them; None without sites.
    """

    options: Options
    method: By
    data: Mapping[str, Path]
    assets: Mapping[str, Path]
    start: Path | None
    where: str | Path
    known: SiteFacts | None = None


class MissingData(UserError):
    """Data that a client needs in a round is missing.

    Attributes:
        reason: for the client's row in the ledger if the round goes on without it, see
            `Phase.may_lack`.
    """

    def __init__(self, reason: str, **more: Any):
        super().__init__(more.pop("problem", reason), **more)
        self.reason = reason


class NoData(UserError):
    """A client has nothing that it could train on; the round goes on without it."""

    def __init__(self, problem: str, **more: Any):
        super().__init__(problem, **more)
        self.reason = problem


@dataclass(frozen=True)
class Items:
    """Single training and held-out items, for attacks that infer their owner or content.

    Attributes:
        owners: item -> its client; "" for a held-out item, on which no client trains.
        speakers: item -> its speaker.
        recordings: item -> an id that all speeds of a recording share.
        sizes: item -> its length, in frames or samples.
        losses: (model, items) -> the loss of each item, nats, (items,).
        audio: item -> the model's input, (frames, values).
        source: (items, client, round, seed) -> the items as training data of the named client in
            the round, with random numbers from the seed.
        labels: item -> its token ids, or its class alone.
        loss_at: (model, items, inputs, labels) -> the mean loss of the items with the given inputs,
            (frames, values) each, and labels in place of their own; its gradient can be
            differentiated again.
        errors: (model, item, input) -> the errors of the model's output for the given input in
            place of the item's own, and the number of reference words, 1 for a clip.
    """

    owners: Mapping[str, str]
    speakers: Mapping[str, str]
    recordings: Mapping[str, str]
    sizes: Mapping[str, int]
    losses: Callable[[nn.Module, Sequence[str]], Tensor]
    audio: Callable[[str], np.ndarray]
    source: Callable[[Sequence[str], str, int, int], Source]
    labels: Callable[[str], list[int]]
    loss_at: Callable[[nn.Module, Sequence[str], Sequence[Tensor], Sequence[list[int]]], Tensor]
    errors: Callable[[nn.Module, str, Tensor], tuple[int, int]]


@dataclass(frozen=True)
class Indicator:
    """Speech of arbitrary speakers, for attacks that compare models by their outputs on it.

    Attributes:
        inputs: iterates over all of it, in batches.
        forward: passes a batch through a model.
        speakers: the speakers of this speech.
        trained: the speakers of the training data.
    """

    inputs: Callable[[], Iterator[Any]]
    forward: Callable[[nn.Module, Any], Any]
    speakers: set[str]
    trained: set[str]


class Protection(Protocol):
    """Differential privacy of the sum of client counts."""

    def release(self, number: int) -> Release:
        """Return the function from the sum of a round's counts to what the server releases."""

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """Discard what was kept in case a round is repeated, since the round is complete."""


class HasSettings(Protocol):
    """An object that works with the settings of an experiment."""

    def settings(self) -> AbstractContextManager[None]:
        """Return a context with the process-wide settings that results depend on."""


@dataclass(frozen=True)
class Part(Generic[Found]):
    """An optional part of a task: see `fedtools.tasks.parts`, and `Task.need`.

    Attributes:
        name: of the task's attribute.
    """

    name: str

    def of(self, task: Task[Any]) -> Found | None:
        """Return this part of a task, or None if the task lacks it."""
        found: Found | None = getattr(task, self.name, None)
        return found


class Task(ABC, Generic[By]):
    """A task opened for an experiment; `need` gives access to its optional parts.

    Args:
        experiment: the opened experiment.
        method: of the experiment.
        device: "cpu", "cuda" or "cuda:1", for tasks with models.
    """

    # Whether torch draws the initial state.
    needs_torch: ClassVar[bool] = False

    def __init__(self, experiment: Experiment, method: By, device: str = "cpu"):
        self.experiment, self.method = experiment, method
        self.where = experiment.path / "config.yaml"
        self.facts = facts_of(experiment.options.task, self.where)
        self._data_paths: dict[tuple[str, bool], Path] = {}

    @staticmethod
    @abstractmethod
    def begin(new: NewExperiment[By]) -> tuple[State, State]:
        """Check the options of a new experiment, and make its initial state.

        Returns:
            the full initial state, and the part of it that the server sends in round 1.
        """

    @staticmethod
    def kinds(options: Options) -> dict[str, type]:
        """Return the classes whose fields or arguments are options of the task.

        Returns:
            the name of a section, such as "training" or "model.network_conf" -> its class.
        """
        return {}

    @staticmethod
    def keep_own(path: Path, method: By) -> list[str]:
        """Write the initial files that this task alone needs, and return their names."""
        return []

    @staticmethod
    def client_facts_of(new: NewExperiment[By]) -> ClientFacts | None:
        """Return what a federation with sites knows of its clients; None if it needs nothing."""
        return new.known.clients if new.known else None

    @cached_property
    def models(self) -> Models | None:
        """Return the models that clients train, or None if they train none."""
        return None

    @cached_property
    def protection(self) -> Protection | None:
        """Return the protection of client counts; None without differential privacy."""
        return None

    @cached_property
    def frozen_facts(self) -> ClientFacts | None:
        """Return what was known of the clients when an experiment with sites began, or None."""
        if FILE not in self.experiment.sums:
            return None
        self.experiment.check_fixed(FILE)
        return ClientFacts.read(self.experiment.path / FILE)

    def check_site_data(self) -> None:
        """Check a site's training data as `begin` checks those at hand."""

    @property
    def spec(self) -> Spec:
        """Return the names and shapes of the full initial state, by default a model's."""
        if self.models is None:
            raise not_supported(self, "models")
        return spec_of(self.models.tensors(self.models.build()))

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        """Split the clients of a round into units that train together; jobs take whole units.

        By default each client trains alone.
        """
        return [[client] for client in clients]

    @abstractmethod
    def source(self, clients: Sequence[str], number: int, phase: Phase) -> Any:
        """Return a unit's data in a round, in the form that the method's client half takes.

        Args:
            clients: the unit's clients; empty for the server's own training.

        Raises:
            MissingData: if a client's data is missing in a phase that goes on without it.
            NoData: if a client has nothing to train on.
        """

    @abstractmethod
    def load(self, state: State, number: int) -> None:
        """Load the state after round `number` (0: the initial state) for measurements."""

    @abstractmethod
    def measure(self, split: str, client: str) -> dict[str, object]:
        """Measure the loaded state on a client's data, and return the `Facts.columns`."""

    def settings(self) -> AbstractContextManager[None]:
        """Return a context with the process-wide settings that results depend on."""
        return nullcontext()

    def payload(self, phase: Phase) -> Payload:
        """Return what each client sends in a phase that does not send shared tensors."""
        if isinstance(phase.sends, Payload):
            return phase.sends
        raise not_supported(self, str(phase.sends))

    def epochs(self, client: str, steps: int) -> float:
        """Return how many times a client goes through its data in the given number of steps."""
        return float(self.method.local_epochs) if steps else 0.0

    def limits(self, phase: Phase, seconds: float) -> Limits:
        """Return bounds on a client's work in a round that began `seconds` ago."""
        most, facts = self.method.most_steps, self.frozen_facts
        limits = Limits(steps=lambda _, size: most(size) if phase.trains else 0, seconds=seconds)
        if facts is None:
            return limits
        return replace(limits, utterances=lambda client: facts.value("size", client))

    def data_path(self, split: str, may_lack: bool = False) -> Path:
        """Return the folder of a split's data, see `data_of`; the data is checked only once."""
        # Data found complete also serves callers that can do without a part of it.
        asked = split, may_lack and (split, False) not in self._data_paths
        if asked not in self._data_paths:
            self._data_paths[asked] = data_of(self.experiment, split, may_lack)
        return self._data_paths[asked]

    def need(self, part: Part[Found]) -> Found:
        """Return an optional part; raise a `UserError` that names the part if it is missing."""
        if (found := part.of(self)) is None:
            raise not_supported(self, part.name)
        return found


def not_supported(task: Task[Any], part: str) -> UserError:
    """Return the error for a part that a task lacks."""
    name = task.experiment.options.task
    return UserError(f"experiments of task {name} have no {part}", path=task.where)


def task_of(facts: Facts) -> type[Task[Method]]:
    """Return the class that implements a task, imported on demand."""
    module, _, name = facts.opens.partition(":")
    found: type[Task[Method]] = getattr(importlib.import_module(module), name)
    return found


def as_configured(
    work: Callable[Concatenate[Opened, Given], Found],
) -> Callable[Concatenate[Opened, Given], Found]:
    """Make a function run within the `settings` of its first argument, a task or federation."""

    @wraps(work)
    def settled(opened: Opened, /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        with opened.settings():
            return work(opened, *arguments, **options)

    return settled
