"""An experiment opened for work: its method and its data; what all tasks have in common.

Nothing here knows torch or a model: a federation may exchange counts. `fedtools.federation.model`
adds models to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fedtools.federation.tasks import ALL, data_of, task_of
from fedtools.files.experiment import Experiment
from fedtools.files.messages import MOST_UTTERANCES, Payload, Report
from fedtools.files.options import Options
from fedtools.files.units import WORD, Unit
from fedtools.methods import make_method
from fedtools.methods.base import Method, Phase

if TYPE_CHECKING:
    from fedtools.client.place import Place
    from fedtools.server.server import Release

State = Mapping[str, Any]
Work = TypeVar("Work", bound=Callable[..., Any])


@dataclass(frozen=True)
class Sent:
    """What some clients send: a row of each tensor for each client; features of a single one.

    `untimed` keeps how long it took to itself: that depends on data which nobody is to know of.
    """

    reports: Sequence[Report]
    tensors: State | None = None
    features: Any = None
    untimed: bool = False


@dataclass(frozen=True)
class Beginning:
    """What `Federation.begin` is given: an experiment that is to be made.

    Attributes:
        options: those that will be frozen.
        method: made from them.
        data, assets: folders by split, and by name.
        start: a full state to begin with, or None.
        where: what the options were read from.
    """

    options: Options
    method: Method
    data: Mapping[str, Path]
    assets: Mapping[str, Path]
    start: Path | None
    where: str | Path


class Federation(ABC):
    """An experiment opened for work.

    Args:
        path: its folder.
        device: "cpu", "cuda" or "cuda:1".
    """

    # Whether the first state is drawn by torch.
    needs_torch: ClassVar[bool] = False

    def __init__(self, path: str | Path, device: str = "cpu"):
        self.experiment = Experiment(path)
        self.experiment.check_frozen()
        options = self.experiment.options
        self.where = self.experiment.path / "config.yaml"
        self.task = task_of(options.task, self.where)
        self.method = make_method(options.method, options.method_conf, self.where)
        self.device_name = device
        self._groups: dict[str, list[str]] = {}
        self._data_paths: dict[str, Path] = {}
        # Whether work can be done without the data of some clients, see `Phase.may_lack`.
        self.may_lack = False

    @staticmethod
    @abstractmethod
    def begin(beginning: Beginning) -> tuple[State, State]:
        """Check the options of an experiment that is to be made.

        Returns:
            the full state that everybody begins with, and of it what the server sends in round 1.
        """

    @staticmethod
    def keep_own(path: Path, method: Method) -> list[str]:
        """Write what else an experiment begins with, for this task alone; the files' names."""
        return []

    @abstractmethod
    def payload(self, phase: Phase) -> Payload:
        """What each client of a phase sends."""

    @abstractmethod
    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        """Cut the clients of a round into those that train together; jobs take whole units."""

    @abstractmethod
    def work(self, clients: Sequence[str], number: int, phase: Phase) -> Iterator[Sent]:
        """Do the clients' part of a round for one unit; `finish` is called when it is on disk."""

    def unit(self, split: str) -> Unit:
        """What error rates on a split count."""
        return WORD

    @abstractmethod
    def measure(self, split: str, client: str) -> dict[str, object]:
        """Measure the state, as it is loaded, on the data of a client: `Task.columns`."""

    @abstractmethod
    def load_result(self, client: str | None, number: int) -> None:
        """Load what `client` uses after round `number` (0: the beginning).

        Args:
            client: whose personal state; None takes the initial one, as a newcomer has it.
        """

    def settings(self) -> AbstractContextManager[None]:
        """What of the process' state the experiment's results depend on, while it works."""
        return nullcontext()

    def finish(self, client: str, number: int) -> None:
        """A client's result is on disk: what was kept in case of a kill is no longer needed."""
        self.experiment.own(client, number).finish()

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """A round is complete: what clients kept in case of its repetition is no longer needed."""
        for client in clients:
            self.experiment.own(client, number).drop_old(keep=1)

    def at_server(self, number: int, phase: Phase) -> Place | None:
        """The server as a place that trains, with the shared state of the round."""
        raise NotImplementedError(f"task {self.experiment.options.task} trains at no server")

    def release(self, number: int) -> Release | None:
        """What the server makes known of the sum of a round's counts; None: the sum itself."""
        return None

    def epochs(self, client: str, steps: int) -> float:
        """How many times a client has gone through its data in so many steps."""
        return float(self.method.local_epochs) if steps else 0.0

    def most_utterances(self, client: str) -> int:
        """More utterances than this a client cannot say that it has."""
        return MOST_UTTERANCES

    def most_steps(self, client: str, utterances: int, phase: Phase) -> int:
        """More steps than this a client with so many utterances cannot take in a round."""
        return self.method.most_steps(utterances) if phase.trains else 0

    @property
    def parameters(self) -> set[str]:
        """The names of the shared tensors that a server's optimiser may change."""
        return set()

    @property
    def shares(self) -> bool:
        """Whether the server sends anything."""
        return True

    @cached_property
    def personal(self) -> bool:
        """Whether each client has a state of its own."""
        return False

    def groups(self, split: str) -> list[str]:
        """The clients by which the data of a split are measured, or `ALL`."""
        if split not in self._groups:
            path = self.data_path(split)
            by_client = self.task.by_client or self.personal
            self._groups[split] = (self.task.clients(path) if by_client else []) or [ALL]
        return self._groups[split]

    def data_path(self, split: str) -> Path:
        """Where the data of a split are, see `data_of`; they are looked at once."""
        if split not in self._data_paths:
            may_lack = self.may_lack and split == "train"
            self._data_paths[split] = data_of(self.experiment, split, may_lack)
        return self._data_paths[split]

    def known(self, client: str, number: int) -> str | None:
        """The client if it has a state of its own in the experiment after a round; else None."""
        return client if self.experiment.knows(client) else None


def as_configured(work: Work) -> Work:
    """Let a function of an opened experiment, its first argument, work with its `settings`."""

    @wraps(work)
    def settled(federation: Federation, *arguments: Any, **options: Any) -> Any:
        with federation.settings():
            return work(federation, *arguments, **options)

    return settled


def open_federation(path: str | Path, device: str = "cpu") -> Federation:
    """Open the experiment in a folder; all that it began with must be as it was."""
    experiment = Experiment(path)
    experiment.check_frozen()
    task = task_of(experiment.options.task, experiment.path / "config.yaml")
    return task.federation_class(path, device)
