"""An experiment opened for work: its method, model and data; what all tasks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedtools.client.train import Fitted, load_model
from fedtools.federation.tasks import data_of, task_of
from fedtools.files.experiment import Experiment
from fedtools.files.states import Spec, load_state, spec_of
from fedtools.methods import make_method
from fedtools.methods.base import PERSONAL, SHARED

if TYPE_CHECKING:
    from fedtools.client.learner import Learner
    from fedtools.client.parallel import Stack


@dataclass(frozen=True)
class Trained:
    """What one client's training came to: the tensors it sends, or the reason why it sends none."""

    client: str
    fitted: Fitted
    shared: Mapping[str, torch.Tensor]
    reason: str = ""


class Federation(ABC):
    """An experiment opened for work: its method, model and data, made once when first needed."""

    def __init__(self, path: str | Path, device: str = "cpu"):
        self.experiment = Experiment(path)
        config = self.experiment.config
        self.where = self.experiment.path / "config.yaml"
        self.task = task_of(config["task"], self.where)
        self.method = make_method(config["method"], config["method_conf"], self.where)
        self.device = torch.device(device)
        self._groups: dict[str, list[str]] = {}
        self._data_paths: dict[str, Path] = {}

    @staticmethod
    @abstractmethod
    def begin(
        config: Mapping[str, Any], train: Path, tokens: Path | None, where: str | Path
    ) -> dict[str, torch.Tensor]:
        """Check the options of an experiment that is to be made; the tensors of a new model."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The one model object; every user loads its own tensors into it."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, not copied."""

    @abstractmethod
    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        """Cut the clients of a round into those that train together; jobs take whole units."""

    @abstractmethod
    def train(self, clients: Sequence[str], number: int) -> Iterator[Trained]:
        """Train one unit's clients; when the results are on disk, `finish` is to be called."""

    @abstractmethod
    def finish(self, client: str, number: int) -> None:
        """A client's result is on disk: what was kept in case of a kill is no longer needed."""

    @abstractmethod
    def closed(self, number: int) -> None:
        """A round is complete: what was kept in case of its repetition is no longer needed."""

    @abstractmethod
    def at_server(self, number: int) -> Learner | Stack:
        """A learner of the server, on all training data, with the shared tensors of the round."""

    @abstractmethod
    def measure(self, role: str, client: str) -> dict[str, object]:
        """Measure the model, as it is loaded, on the data of a client: `Task.columns`."""

    @abstractmethod
    def epochs(self, client: str, steps: int) -> float:
        """How many times a client has gone through its data in so many steps."""

    @cached_property
    def initial(self) -> dict[str, torch.Tensor]:
        """The full model that everybody begins with."""
        state = load_state(self.experiment.init, spec_of(self.tensors()))
        return {name: torch.as_tensor(value) for name, value in state.items()}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """tensor name -> SHARED, PERSONAL or RESET."""
        parameters = {name for name, _ in self.model.named_parameters()}
        return {
            name: self.method.parameter_kind(name)
            if name in parameters
            else self.method.buffer_kind(name, value.is_floating_point())
            for name, value in self.tensors().items()
        }

    @cached_property
    def shared_spec(self) -> Spec:
        """Names, shapes and types of the tensors that travel."""
        return spec_of(self.of_kind(SHARED, self.tensors()))

    @property
    def keep_updates(self) -> bool:
        """Whether every client's update is a row of a file, or only each unit's weighted mean."""
        return self.experiment.config["keep_updates"]

    def of_kind(self, kind: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of `state` that are of one kind."""
        return {name: value for name, value in state.items() if self.kinds[name] == kind}

    def groups(self, role: str) -> list[str]:
        """The clients by which the data of a role are measured, or `ALL`."""
        if role not in self._groups:
            self._groups[role] = self.task.groups(self.data_path(role))
        return self._groups[role]

    def data_path(self, role: str) -> Path:
        """Where the data of a role are, see `data_of`; they are looked at once."""
        if role not in self._data_paths:
            self._data_paths[role] = data_of(self.experiment, role)
        return self._data_paths[role]

    def load(self, state: Mapping[str, Any]) -> None:
        """Put tensors into the model; those that `state` lacks stay as they are."""
        load_model(self.tensors(), state)

    def load_shared(self, number: int) -> None:
        """Put into the model what the server sends in round `number`; all else is initial."""
        self.load(self.initial)
        self.load(load_state(self.experiment.global_state(number), self.shared_spec))

    def load_result(self, client: str | None, number: int) -> None:
        """Put into the model what `client` uses after round `number` (0: the beginning).

        Args:
            client: whose personal tensors; None takes the initial ones, as a newcomer has them.
        """
        self.load_shared(number + 1)
        if client is not None:
            self.load(self.personal(client, number + 1))

    def personal(self, client: str, before: int) -> dict[str, Any]:
        """The newest personal tensors of a client from rounds before `before`, if there are any."""
        if PERSONAL not in self.kinds.values():
            return {}
        own = self.experiment.client_dir(client)
        path = self.experiment.last_personal(own, before, "personal.safetensors")
        spec = spec_of(self.of_kind(PERSONAL, self.initial))
        return load_state(path, spec) if path is not None else {}
