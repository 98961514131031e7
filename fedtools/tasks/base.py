"""A task opened for work: what a federation learns from, and how well it does."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.messages import Limits, Payload
from fedtools.files.options import Options
from fedtools.files.states import Spec, spec_of
from fedtools.methods.base import Method, Phase
from fedtools.tasks import facts_of
from fedtools.tasks.facts import Facts, data_of

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from fedtools.client.unit import Models, Source
    from fedtools.server.server import Release

State = Mapping[str, Any]
Opened = TypeVar("Opened", bound="HasSettings")
Given = ParamSpec("Given")
Found = TypeVar("Found")
# The methods that a task can be federated by.
By = TypeVar("By", bound=Method)


@dataclass(frozen=True)
class NewExperiment(Generic[By]):
    """What `Task.begin` is given: an experiment that is to be made.

    Attributes:
        options: those that will be frozen.
        method: made from them.
        data, assets: folders by split, and by name.
        start: a full state to begin with, or None.
        where: what the options were read from.
    """

    options: Options
    method: By
    data: Mapping[str, Path]
    assets: Mapping[str, Path]
    start: Path | None
    where: str | Path


class Gone(UserError):
    """What a client needs in a round is not there any more.

    Attributes:
        reason: what its row says where the round goes on without it, see `Phase.may_lack`.
    """

    def __init__(self, reason: str, **more: Any):
        super().__init__(more.pop("problem", reason), **more)
        self.reason = reason


@dataclass(frozen=True)
class Items:
    """Training data one by one, and held-out data, for attacks that ask whose they are.

    Attributes:
        owners: item -> its client; "" of what is held out, on which nobody trains.
        speakers: item -> who speaks.
        recordings: item -> what is the same of a recording at several speeds.
        sizes: item -> its length, in frames or samples.
        loss: a model's loss of one item, nats.
        audio: what a model is given of one item, (frames, values).
        source: some items as the data of a client that trains as the one who is named does, in a
            round, with random numbers of a seed.
        labels: the numbers of an item's tokens, or of its class alone.
        loss_at: a model's mean loss of some items, were other inputs, (frames, values) each, and
            other labels theirs; its gradient can be differentiated again.
        errors: the errors, and the words they are of, in what a model hears in an item, were other
            input its own; of a clip the word is one.
    """

    owners: Mapping[str, str]
    speakers: Mapping[str, str]
    recordings: Mapping[str, str]
    sizes: Mapping[str, int]
    loss: Callable[[nn.Module, str], Tensor]
    audio: Callable[[str], np.ndarray]
    source: Callable[[Sequence[str], str, int, int], Source]
    labels: Callable[[str], list[int]]
    loss_at: Callable[[nn.Module, Sequence[str], Sequence[Tensor], Sequence[list[int]]], Tensor]
    errors: Callable[[nn.Module, str, Tensor], tuple[int, int]]


@dataclass(frozen=True)
class Indicator:
    """Speech of nobody in particular, for attacks that look at what models make of it.

    Attributes:
        inputs: goes through all of it, in parts.
        forward: gives a part to a model.
        speakers: of this speech.
        trained: the speakers of the training data.
    """

    inputs: Callable[[], Iterator[Any]]
    forward: Callable[[nn.Module, Any], Any]
    speakers: set[str]
    trained: set[str]


class Protection(Protocol):
    """What stands between the sum of what clients send and what is known of it."""

    def release(self, number: int) -> Release:
        """What the server makes known of the sum of a round's counts."""

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """A round is complete: what was kept in case of its repetition is no longer needed."""


class HasSettings(Protocol):
    """What works with the settings of an experiment."""

    def settings(self) -> AbstractContextManager[None]:
        """What of the process' state the experiment's results depend on, while it works."""


@dataclass(frozen=True)
class Part(Generic[Found]):
    """What some tasks have: see `fedtools.tasks.parts`, and `Task.need`.

    Attributes:
        name: of the task's attribute.
    """

    name: str

    def of(self, task: Task[Any]) -> Found | None:
        """What a task has; None if it has not."""
        found: Found | None = getattr(task, self.name, None)
        return found


class Task(ABC, Generic[By]):
    """What a federation asks of its task; what else it has is asked for by `need`.

    Args:
        experiment: opened.
        method: of the experiment.
        device: "cpu", "cuda" or "cuda:1", of tasks with models.
    """

    # Whether the first state is drawn by torch.
    needs_torch: ClassVar[bool] = False

    def __init__(self, experiment: Experiment, method: By, device: str = "cpu"):
        self.experiment, self.method = experiment, method
        self.where = experiment.path / "config.yaml"
        self.facts = facts_of(experiment.options.task, self.where)
        self._data_paths: dict[tuple[str, bool], Path] = {}

    @staticmethod
    @abstractmethod
    def begin(new: NewExperiment[By]) -> tuple[State, State]:
        """Check the options of an experiment that is to be made.

        Returns:
            the full state that everybody begins with, and of it what the server sends in round 1.
        """

    @staticmethod
    def keep_own(path: Path, method: By) -> list[str]:
        """Write what else an experiment begins with, for this task alone; the files' names."""
        return []

    @cached_property
    def models(self) -> Models | None:
        """What clients train, where they train models."""
        return None

    @cached_property
    def protection(self) -> Protection | None:
        """Of counts that clients send; None without differential privacy."""
        return None

    @property
    def spec(self) -> Spec:
        """The full state that everybody begins with; by default a model's."""
        if self.models is None:
            raise lacking(self, "models")
        return spec_of(self.models.tensors(self.models.build()))

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        """Cut the clients of a round into those that train together; jobs take whole units.

        By default they train one by one.
        """
        return [[client] for client in clients]

    @abstractmethod
    def source(self, clients: Sequence[str], number: int, phase: Phase) -> Any:
        """The data of a unit in a round, as the method's client half is given them.

        Args:
            clients: those of a unit; none for the server's own training.

        Raises:
            Gone: if the data of a client are, in a phase that goes on without it.
        """

    @abstractmethod
    def load(self, state: State, number: int) -> None:
        """Take the state after round `number` (0: the beginning) for what is to be measured."""

    @abstractmethod
    def measure(self, split: str, client: str) -> dict[str, object]:
        """Measure what was loaded on the data of a client: `Facts.columns`."""

    def settings(self) -> AbstractContextManager[None]:
        """What of the process' state the experiment's results depend on, while it works."""
        return nullcontext()

    def payload(self, phase: Phase) -> Payload:
        """What each client of a phase sends that sends no shared tensors."""
        if isinstance(phase.sends, Payload):
            return phase.sends
        raise lacking(self, str(phase.sends))

    def epochs(self, client: str, steps: int) -> float:
        """How many times a client has gone through its data in so many steps."""
        return float(self.method.local_epochs) if steps else 0.0

    def limits(self, phase: Phase, seconds: float) -> Limits:
        """What a client can have done in a round that began so many seconds ago."""
        most = self.method.most_steps
        return Limits(steps=lambda _, size: most(size) if phase.trains else 0, seconds=seconds)

    def data_path(self, split: str, may_lack: bool = False) -> Path:
        """Where the data of a split are, see `data_of`; they are looked at once."""
        # Data of which nothing is gone serve those who can do without a part, too.
        asked = split, may_lack and (split, False) not in self._data_paths
        if asked not in self._data_paths:
            self._data_paths[asked] = data_of(self.experiment, split, may_lack)
        return self._data_paths[asked]

    def need(self, part: Part[Found]) -> Found:
        """What not every task has; a `UserError` names task and part."""
        if (found := part.of(self)) is None:
            raise lacking(self, part.name)
        return found


def lacking(task: Task[Any], part: str) -> UserError:
    """What is told of a part that a task has not."""
    name = task.experiment.options.task
    return UserError(f"experiments of task {name} have no {part}", path=task.where)


def task_of(facts: Facts) -> type[Task[Method]]:
    """The class that does the work of a task, imported when it is asked for."""
    module, _, name = facts.opens.partition(":")
    found: type[Task[Method]] = getattr(importlib.import_module(module), name)
    return found


def as_configured(
    work: Callable[Concatenate[Opened, Given], Found],
) -> Callable[Concatenate[Opened, Given], Found]:
    """Let a function of a task or a federation, its first argument, work with its `settings`."""

    @wraps(work)
    def settled(opened: Opened, /, *arguments: Given.args, **options: Given.kwargs) -> Found:
        with opened.settings():
            return work(opened, *arguments, **options)

    return settled
