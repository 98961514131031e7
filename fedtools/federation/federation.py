"""An open experiment, with its configuration, method and task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtools.client.attackers.options import Attack, read_attackers
from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import Payload, Report
from fedtools.exchange.private import Private, do_together
from fedtools.exchange.states import Spec, as_array
from fedtools.exchange.values import of_model
from fedtools.federation.code import check_code
from fedtools.federation.states import States
from fedtools.federation.user_privacy import UserProtection
from fedtools.methods import make_method
from fedtools.methods.base import SHARED, Changes, Phase
from fedtools.privacy.secagg.holder import Holder
from fedtools.tasks import facts_of
from fedtools.tasks.base import MissingData, NoData, Protection, task_of
from fedtools.tasks.facts import ALL, check_fixed
from fedtools.tasks.parts import MODELS, POISON

if TYPE_CHECKING:
    from fedtools.client.client import Client
    from fedtools.client.unit import Trained


@dataclass(frozen=True)
class Sent:
    """What clients send: tensors with a row for each client, or features of a single client."""

    reports: Sequence[Report]
    tensors: Mapping[str, Any] | None = None
    features: Any = None


class Federation:
    """An open experiment; its initial files must be unchanged.

    Args:
        path: the experiment's folder.
        device: "cpu", "cuda" or "cuda:1".
        keys: the folder with the keys of the clients that train here, for secure sums.

    Attributes:
        holder: who keeps them; None without keys.
    """

    def __init__(self, path: str | Path, device: str = "cpu", keys: str | Path | None = None):
        self.experiment = Experiment(path)
        check_fixed(self.experiment)
        options = self.experiment.options
        self.where = self.experiment.path / "config.yaml"
        self.facts = facts_of(options.task, self.where)
        self.method = make_method(options.method, options.method_conf, self.where)
        self.task = task_of(self.facts)(self.experiment, self.method, device)
        check_code(self.experiment, self.method, type(self.task))
        self.holder = Holder(Path(keys)) if keys else None
        self._groups: dict[str, list[str]] = {}

    @cached_property
    def states(self) -> States:
        """Return the shared and personal states of the experiment."""
        task, models = self.task, self.task.models
        named = models.build().named_parameters() if models else ()
        try:
            return States(self.experiment, self.method, task.spec, {name for name, _ in named})
        except ValueError as error:
            raise UserError(f"method_conf.{error}", path=self.where) from None

    def settings(self) -> AbstractContextManager[None]:
        """Return a context that sets the process state on which the experiment's results depend."""
        return self.task.settings()

    @cached_property
    def protection(self) -> Protection | None:
        """Return what makes the releases of the server private; None without privacy."""
        if self.method.user_privacy is None:
            return self.task.protection
        return UserProtection(self.experiment, self.method)

    @cached_property
    def attack(self) -> Attack | None:
        """Return which clients attack, and how; None if none does."""
        options = read_attackers(self.experiment.options.attackers, self.where)
        names = tuple(self.experiment.attackers)
        return Attack(options, names) if options and names else None

    @property
    def personal(self) -> bool:
        """Return whether each client has a state of its own."""
        return bool(self.task.models) and bool(self.states.personal)

    def groups(self, split: str) -> list[str]:
        """Return the clients for which the data of a split are evaluated separately, or `ALL`."""
        if split not in self._groups:
            path = self.task.data_path(split)
            by_client = self.facts.by_client or self.personal
            self._groups[split] = (self.facts.clients(path) if by_client else []) or [ALL]
        return self._groups[split]

    def payload(self, phase: Phase) -> Payload:
        """Return the description of what each client of a phase sends."""
        shared = self.states.shared_spec
        if isinstance(phase.sends, Changes):
            spec: Spec = {name: (shape, "int32") for name, (shape, _) in shared.items()}
            return Payload(spec, values=phase.sends.grid.values(spec), norm=phase.sends.grid.steps)
        if phase.sends != SHARED:
            return self.task.payload(phase)
        return Payload(shared, values=of_model(shared))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Return the training utterances or clips of the clients with data.

        Others are in the list of clients alone.
        """
        return self.facts.sizes(self.task.data_path("train"))

    def load_result(self, client: str | None, number: int) -> None:
        """Load the state that `client` uses after round `number` (0: initial) into the task.

        Args:
            client: the client with the personal state; None for a newcomer's initial one.
            number: the round.
        """
        self.task.load(self.states.result(client, number), number)

    def work(
        self, clients: Sequence[str], number: int, phase: Phase, poisoned: bool = False
    ) -> Sent:
        """Run the client update of a unit; the caller then writes the result and calls `finish`.

        Args:
            poisoned: whether attackers train on what their attack puts in place of their data.
        """
        try:
            return self._work(clients, number, phase, poisoned)
        except (MissingData, NoData) as error:
            if not phase.may_lack and isinstance(error, MissingData):
                raise
            # Their rows in the files of the job, which nobody reads.
            spec = self.payload(phase).tensors.items()
            rows = {name: np.zeros((len(clients), *shape), kind) for name, (shape, kind) in spec}
            return Sent([Report(client, reason=error.reason) for client in clients], rows)

    def _work(self, clients: Sequence[str], number: int, phase: Phase, poisoned: bool) -> Sent:
        assert phase.client_update is not None
        if self.method.user_privacy and not any(client in self.sizes for client in clients):
            raise NoData("has no data")
        update = phase.client_update
        if not self.task.models:
            trained = update(self.task.source(clients, number, phase))
            return Sent(_reports(clients, trained), self._rows(trained, phase))
        client = self.client(clients, number, poisoned)
        trained = update(client)
        client.keep_personal([bool(one.steps) and not one.reason for one in trained])
        if isinstance(phase.sends, Changes):
            tensors = self._changes(client, number, phase.sends)
        else:
            tensors = self._models(client) if phase.sends == SHARED else self._rows(trained, phase)
        return Sent(_reports(clients, trained), tensors, trained[0].features)

    def client(self, clients: Sequence[str], number: int, poisoned: bool = False) -> Client:
        """Create the training unit of some clients, with their data and initial state."""
        from fedtools.client.client import Client
        from fedtools.client.unit import Unit
        from fedtools.models.training import load_model

        experiment, states, models = self.experiment, self.states, self.task.need(MODELS)
        source, variant = self.task.source(clients, number, self.method.phase(number)), ""
        if poisoned:
            assert self.attack is not None
            poison, variant = self.task.need(POISON), "poisoned/"
            source = poison(source, self.attack.options, self.attack.clients)
        for client in clients:
            states.check_there(client, number)
        own = [experiment.own(client, number) for client in clients]
        home = own[0] if len(own) == 1 else None
        title = experiment.title
        unit = Unit(clients, number, experiment.seed, home, own, states.personal, title, variant)
        model = models.build(len(clients))
        load_model(model.state_dict(), states.start(number))
        for index, client in enumerate(clients):
            load_model(models.tensors(model, index), states.own(client, number))
        return Client(unit, source, models, model)

    def learner(self, number: int) -> Client:
        """Create the training unit of the server, with the shared state of the round."""
        from fedtools.client.client import Client
        from fedtools.client.unit import SERVER, Unit
        from fedtools.models.training import load_model

        phase = self.method.phase(number)
        experiment, states, models = self.experiment, self.states, self.task.need(MODELS)
        own: list[Private] = []
        model = models.build()
        load_model(models.tensors(model), states.start(number))
        if phase.jointly:
            clients = experiment.clients
            model = models.joint(len(clients))
            own = [experiment.own(client, number) for client in clients]
            for index, client in enumerate(clients):
                states.check_there(client, number)
                load_model(models.tensors(model, index), states.of_client(client, number))
        home = experiment.at_server(number)
        title = experiment.title
        unit = Unit([SERVER], number, experiment.seed, home, own, states.personal, title)
        return Client(unit, self.task.source([], number, phase), models, model)

    def _models(self, client: Client) -> Mapping[str, Any]:
        """Return the shared tensors of a unit, with a row for each client."""
        shared = self.states.of_kind(SHARED, client.model.state_dict())
        if client.models.stacked:
            return shared
        return {name: value[None] for name, value in shared.items()}

    def _changes(self, client: Client, number: int, sends: Changes) -> Mapping[str, Any]:
        """Return the clipped changes of a unit's shared tensors, with a row for each client."""
        start = self.states.start(number)
        return sends.grid.rounded(
            {
                name: as_array(name, value).astype(np.float64) - start[name]
                for name, value in self._models(client).items()
            }
        )

    def _rows(self, trained: Sequence[Trained], phase: Phase) -> Mapping[str, Any]:
        """Return the tensors that clients send instead of a model, with a row for each client."""
        return {
            name: np.stack([as_array(name, one.tensors[name]) for one in trained])
            for name in self.payload(phase).tensors
        }

    def finish(self, clients: Sequence[str], number: int) -> None:
        """Remove the checkpoints of clients whose results are on disk."""
        do_together([own.finish for own in self._files_of(clients, number)])

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """Remove what clients kept for repeating a round, once it is complete."""
        do_together([partial(own.drop_old, keep=1) for own in self._files_of(clients, number)])
        if self.protection:
            self.protection.closed(number, clients)
        if self.holder:
            self.holder.forget_all(self.experiment.label)

    def _files_of(self, clients: Sequence[str], number: int) -> list[Private]:
        """Return the private files of those clients that have any."""
        folder = self.experiment.path / "clients"
        # A list of the folder takes less time than a look for each of thousands of clients.
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        return [self.experiment.own(client, number) for client in clients if client in there]


def _reports(clients: Sequence[str], trained: Sequence[Trained]) -> list[Report]:
    return [
        Report(
            client,
            one.utterances,
            one.steps,
            one.loss,
            reason=one.reason,
            empty_labels=max(one.empty_labels.values(), default=0.0),
        )
        for client, one in zip(clients, trained, strict=True)
    ]
