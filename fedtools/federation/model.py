"""A federation whose clients train models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from fedtools.client.fit import Fitted
from fedtools.client.place import Place
from fedtools.federation.base import Beginning, Federation, Sent, State
from fedtools.files.errors import UserError
from fedtools.files.ledger import read_round
from fedtools.files.messages import COUNTED, Payload, Report
from fedtools.files.private import PERSONAL_STATE
from fedtools.files.states import Spec, check_finite, load_state, spec_of
from fedtools.files.values import check_values, of_model
from fedtools.methods.base import PERSONAL, SHARED, Method, Phase
from fedtools.models.training import Training, load_model


class ModelFederation(Federation):
    """Clients train models, one after the other or in stacks; some tensors may be personal."""

    needs_torch: ClassVar[bool] = True

    def __init__(self, path: str | Path, device: str = "cpu"):
        super().__init__(path, device)
        self.device = torch.device(device)
        # The round and the tensors of the state that was read last.
        self._start: tuple[int, State] = (0, {})
        # The first round in which a client trained, of the rounds whose ledger was read.
        self._trained: dict[str, int] = {}
        self._read = 0

    # How its clients train; set by each task.
    training: Training

    def settings(self) -> AbstractContextManager[None]:
        return self.training.settings()

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The one model object; every user loads its own tensors into it."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers, not copied."""

    @abstractmethod
    def place(self, clients: Sequence[str], number: int) -> Place:
        """The clients of a unit, as a place that trains, with what they begin the round with."""

    @cached_property
    def initial(self) -> dict[str, torch.Tensor]:
        """The full model that everybody begins with."""
        state = load_state(self.experiment.init, spec_of(self.tensors()))
        return {name: torch.as_tensor(value) for name, value in state.items()}

    @cached_property
    def kinds(self) -> dict[str, str]:
        """tensor name -> SHARED, PERSONAL or RESET."""
        return kinds_of(self.method, self.model, self.tensors(), self.where)

    @cached_property
    def personal(self) -> bool:
        return PERSONAL in self.kinds.values()

    @property
    def parameters(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}

    @cached_property
    def shared_spec(self) -> Spec:
        """Names, shapes and types of the tensors that travel."""
        return spec_of(self.of_kind(SHARED, self.tensors()))

    @property
    def shares(self) -> bool:
        return bool(self.shared_spec)

    def payload(self, phase: Phase) -> Payload:
        if phase.sends != SHARED:
            return phase.sends
        return Payload(self.shared_spec, values=of_model(self.shared_spec))

    def of_kind(self, kind: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of `state` that are of one kind."""
        return {name: value for name, value in state.items() if self.kinds[name] == kind}

    def work(self, clients: Sequence[str], number: int, phase: Phase) -> Iterator[Sent]:
        for client in clients:
            if self.lost(client, number):
                raise self.gone(client)
        place = self.place(clients, number)
        fitted = phase.client(place)
        reports = []
        for index, (client, result) in enumerate(zip(place.names, fitted, strict=True)):
            counts = result.utterances, result.steps, result.loss
            empty = max(result.empty_labels.values(), default=0.0)
            reports.append(Report(client, *counts, reason=result.reason, empty_labels=empty))
            trained = result.steps and not result.reason
            if self.personal and trained:
                personal = self.of_kind(PERSONAL, place.tensors(client=index))
                self.experiment.own(client, number).save(PERSONAL_STATE, personal)
        yield Sent(reports, self._rows(place, fitted, phase), fitted[0].features)

    def gone(self, client: str) -> UserError:
        """What is told of a client that has lost its personal parameters."""
        remedy = "put the folder back, or run fedtools reset --round 1"
        folder = self.experiment.client_dir(client)
        return UserError("the personal parameters are gone", path=folder, remedy=remedy)

    def lost(self, client: str, number: int) -> bool:
        """Whether nothing is left of personal parameters that a client trained before a round.

        It would begin with the initial ones, as one that has not trained yet.
        """
        if not self.personal or self.experiment.own(client, number).has(PERSONAL_STATE):
            return False
        for at in range(self._read + 1, number):
            if self.method.phase(at).jointly:
                for one in self.experiment.clients:
                    self._trained.setdefault(one, at)
            for row in read_round(self.experiment, at):
                if row.client_epochs > 0 and row.status in COUNTED:
                    self._trained.setdefault(row.client, at)
            self._read = at
        return self._trained.get(client, number) < number

    def known(self, client: str, number: int) -> str | None:
        known = super().known(client, number)
        return None if known and self.lost(client, number + 1) else known

    def _rows(self, place: Place, fitted: Sequence[Fitted], phase: Phase) -> State:
        """What the clients send, a row for each."""
        if phase.sends == SHARED:
            shared = self.of_kind(SHARED, place.model.state_dict())
            return shared if place.stacked else {name: shared[name][None] for name in shared}
        names = self.payload(phase).tensors
        return {
            name: torch.stack([torch.as_tensor(one.tensors[name]) for one in fitted])
            for name in names
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Put tensors into the model; those that `state` lacks stay as they are."""
        load_model(self.tensors(), state)

    def load_shared(self, number: int) -> None:
        """Put into the model what the server sends in round `number`; all else is initial."""
        self.load(self.start(number))

    def start(self, number: int) -> State:
        """What every client begins round `number` with, but for what is personal."""
        if self._start[0] != number:
            shared = self.experiment.shared_state(number, self.shared_spec)
            tensors = {name: torch.as_tensor(value) for name, value in shared.items()}
            self._start = number, {**self.initial, **tensors}
        return self._start[1]

    def load_result(self, client: str | None, number: int) -> None:
        self.load_shared(number + 1)
        if client is not None:
            self.load(self.personal_state(client, number + 1))

    def personal_state(self, client: str, before: int) -> dict[str, Any]:
        """The newest personal tensors of a client from rounds before `before`, if there are any."""
        if not self.personal:
            return {}
        spec = spec_of(self.of_kind(PERSONAL, self.initial))
        return self.experiment.own(client, before).load(PERSONAL_STATE, spec) or {}


def kinds_of(
    method: Method, model: nn.Module, tensors: Mapping[str, torch.Tensor], where: str | Path
) -> dict[str, str]:
    """tensor name -> SHARED, PERSONAL or RESET; a `UserError` if a pattern matches nothing."""
    try:
        return method.kinds({name for name, _ in model.named_parameters()}, tensors)
    except ValueError as error:
        raise UserError(f"method_conf.{error}", path=where) from None


def begin_with(
    beginning: Beginning, model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[State, State]:
    """The states of a new experiment, `tensors` of `model` or those of the file to start with."""
    if beginning.start:
        state = load_state(beginning.start, spec_of(tensors))
        check_finite(state, beginning.start)
        check_values(state, of_model(state), beginning.start)
        load_model(tensors, state)
    kinds = kinds_of(beginning.method, model, tensors, beginning.where)
    shared = {name: value for name, value in tensors.items() if kinds[name] == SHARED}
    return tensors, shared
