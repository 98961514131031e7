"""Model states of an experiment: the shared state of each round, and clients' personal states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import read_round
from fedtools.exchange.messages import COUNTED
from fedtools.exchange.private import PERSONAL_STATE
from fedtools.exchange.states import Spec, load_state
from fedtools.methods.base import GIVEN, PERSONAL, SHARED, Method
from fedtools.tasks.base import MissingData

State = dict[str, np.ndarray]


class States:
    """The models, or counts, in an experiment's folder.

    Args:
        experiment: the opened experiment.
        method: the method of the experiment; its patterns match parameters.
        spec: the spec of a full state.
        parameters: the names of the tensors that training changes; empty if nothing is trained.
    """

    def __init__(self, experiment: Experiment, method: Method, spec: Spec, parameters: set[str]):
        self.spec, self.parameters = spec, parameters
        self._experiment, self._method = experiment, method
        # tensor name -> SHARED, PERSONAL, GIVEN or RESET.
        self.kinds = method.kinds(parameters, spec) if parameters else dict.fromkeys(spec, SHARED)
        # The round and the tensors of the state read last.
        self._start: tuple[int, State] = (0, {})
        # client -> the first round in which it trained, among the rounds up to `_read`.
        self._trained: dict[str, int] = {}
        self._read = 0

    @cached_property
    def initial(self) -> State:
        """Return the full initial state."""
        return load_state(self._experiment.init, self.spec)

    @cached_property
    def personal(self) -> frozenset[str]:
        """Return the names of the tensors that stay at each client."""
        return frozenset(name for name, kind in self.kinds.items() if kind == PERSONAL)

    @cached_property
    def shared_spec(self) -> Spec:
        """Return names, shapes and types of the tensors that clients send."""
        return self.of_kind(SHARED, self.spec)

    @cached_property
    def sent_spec(self) -> Spec:
        """Return names, shapes and types of the tensors that the server sends."""
        return self.shared_spec | self.of_kind(GIVEN, self.spec)

    def of_kind(self, kind: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors of `state` of one kind."""
        return {name: value for name, value in state.items() if self.kinds[name] == kind}

    def start(self, number: int) -> State:
        """Return the state at the start of round `number`, with initial personal tensors."""
        if self._start[0] != number:
            shared = self._experiment.round(number).shared_state(self.sent_spec)
            self._start = number, {**self.initial, **shared}
        return self._start[1]

    def of_client(self, client: str, number: int) -> State:
        """Return a client's state at the start of round `number`."""
        return {**self.start(number), **self.own(client, number)}

    def result(self, client: str | None, number: int) -> State:
        """Return the state of a client, None for a newcomer, after round `number` (0: initial)."""
        return self.of_client(client, number + 1) if client else self.start(number + 1)

    def own(self, client: str, before: int) -> State:
        """Return a client's latest personal tensors from before round `before`, if any."""
        if not self.personal:
            return {}
        spec = self.of_kind(PERSONAL, self.spec)
        return self._experiment.own(client, before).load(PERSONAL_STATE, spec) or {}

    def known(self, client: str, number: int) -> str | None:
        """Return the client if it has a state of its own after round `number`, else None."""
        known = self._experiment.knows(client) and not self.lost(client, number + 1)
        return client if known else None

    def lost(self, client: str, number: int) -> bool:
        """Return whether personal tensors that a client trained before a round are missing.

        Without this check the client would start from the initial ones, as a new client does.
        """
        if not self.personal or self._experiment.own(client, number).has(PERSONAL_STATE):
            return False
        for at in range(self._read + 1, number):
            if self._method.phase(at).jointly:
                for one in self._experiment.clients:
                    self._trained.setdefault(one, at)
            for row in read_round(self._experiment, at):
                if row.client_epochs > 0 and row.status in COUNTED:
                    self._trained.setdefault(row.client, at)
            self._read = at
        return self._trained.get(client, number) < number

    def check_there(self, client: str, number: int) -> None:
        """Raise `MissingData` if a client's trained personal tensors are `lost`."""
        if self.lost(client, number):
            raise MissingData(
                "its trained personal parameters are missing",
                problem="the personal parameters are missing",
                path=self._experiment.client_dir(client),
                remedy="put the folder back, or run fedtools reset --round 1",
            )
