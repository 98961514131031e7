"""The states of an experiment: what everybody begins a round with, and each client's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fedtools.files.experiment import Experiment
from fedtools.files.ledger import read_round
from fedtools.files.messages import COUNTED
from fedtools.files.private import PERSONAL_STATE
from fedtools.files.states import Spec, load_state
from fedtools.methods.base import GIVEN, PERSONAL, SHARED, Method
from fedtools.tasks.base import Gone

State = dict[str, np.ndarray]


class States:
    """What lies in an experiment's folder of its models, or of its counts.

    Args:
        experiment: opened.
        method: of the experiment; its patterns match parameters.
        spec: of a full state.
        parameters: the names of the tensors that training changes; none where nothing is trained.
    """

    def __init__(self, experiment: Experiment, method: Method, spec: Spec, parameters: set[str]):
        self.spec, self.parameters = spec, parameters
        self._experiment, self._method = experiment, method
        # tensor name -> SHARED, PERSONAL, GIVEN or RESET.
        self.kinds = method.kinds(parameters, spec) if parameters else dict.fromkeys(spec, SHARED)
        # The round and the tensors of the state that was read last.
        self._start: tuple[int, State] = (0, {})
        # The first round in which a client trained, of the rounds whose ledger was read.
        self._trained: dict[str, int] = {}
        self._read = 0

    @cached_property
    def initial(self) -> State:
        """The full state that everybody begins with."""
        return load_state(self._experiment.init, self.spec)

    @cached_property
    def personal(self) -> frozenset[str]:
        """The names of the tensors that stay at each client."""
        return frozenset(name for name, kind in self.kinds.items() if kind == PERSONAL)

    @cached_property
    def shared_spec(self) -> Spec:
        """Names, shapes and types of the tensors that clients send."""
        return self.of_kind(SHARED, self.spec)

    @cached_property
    def sent_spec(self) -> Spec:
        """Those of the tensors that the server sends."""
        return self.shared_spec | self.of_kind(GIVEN, self.spec)

    def of_kind(self, kind: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of `state` that are of one kind."""
        return {name: value for name, value in state.items() if self.kinds[name] == kind}

    def start(self, number: int) -> State:
        """What every client begins round `number` with, but for what is personal."""
        if self._start[0] != number:
            shared = self._experiment.round(number).shared_state(self.sent_spec)
            self._start = number, {**self.initial, **shared}
        return self._start[1]

    def of_client(self, client: str, number: int) -> State:
        """What a client begins round `number` with."""
        return {**self.start(number), **self.own(client, number)}

    def result(self, client: str | None, number: int) -> State:
        """What a client uses after round `number` (0: the beginning); None: a newcomer."""
        return self.of_client(client, number + 1) if client else self.start(number + 1)

    def own(self, client: str, before: int) -> State:
        """The newest personal tensors of a client from rounds before `before`, if there are any."""
        if not self.personal:
            return {}
        spec = self.of_kind(PERSONAL, self.spec)
        return self._experiment.own(client, before).load(PERSONAL_STATE, spec) or {}

    def known(self, client: str, number: int) -> str | None:
        """The client if it has a state of its own in the experiment after a round; else None."""
        known = self._experiment.knows(client) and not self.lost(client, number + 1)
        return client if known else None

    def lost(self, client: str, number: int) -> bool:
        """Whether nothing is left of personal tensors that a client trained before a round.

        It would begin with the initial ones, as one that has not trained yet.
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
        """Raise `Gone` if what a client trained is `lost`."""
        if self.lost(client, number):
            raise Gone(
                "the personal parameters that it trained are gone",
                problem="the personal parameters are gone",
                path=self._experiment.client_dir(client),
                remedy="put the folder back, or run fedtools reset --round 1",
            )
