"""The server in one round: the updates it holds, and what it can do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedtools.client.learner import Learner
from fedtools.files.experiment import Experiment
from fedtools.files.states import Spec, load_state, save_state
from fedtools.files.updates import Refusal, Update
from fedtools.server.aggregate import mean


class Server:
    """What a method's `update_server` works with; each of its acts makes the next round's state.

    Attributes:
        number: the round.
        updates: the updates that were not refused, in the order of the round's clients.
        refusals: the updates that were, with their reasons.
        losses: mean training loss by client, and by "server" where the server trains.
    """

    def __init__(
        self,
        experiment: Experiment,
        number: int,
        spec: Spec,
        updates: Sequence[Update],
        refusals: Sequence[Refusal],
        min_clients: int,
        make_learner: Callable[[], Learner],
    ):
        self.number = number
        self.updates = list(updates)
        self.refusals = list(refusals)
        self.losses = {update.client: update.loss for update in updates}
        self._experiment = experiment
        self._spec = spec
        self._min_clients = min_clients
        self._make_learner = make_learner

    @property
    def next_state(self) -> Path:
        """Where the shared tensors of the next round are written."""
        return self._experiment.global_state(self.number + 1)

    def mean(self, weights: Sequence[float]) -> None:
        """The next state is the weighted mean of the updates (weights need not sum to 1)."""
        refused = mean(
            self.updates,
            weights,
            self.next_state,
            self._spec,
            min_clients=self._min_clients,
            refused=self.refusals,
        )
        self.refusals += refused
        names = {refusal.client for refusal in refused}
        self.updates = [update for update in self.updates if update.client not in names]

    def keep(self) -> None:
        """The next state is this round's."""
        save_state(self.next_state, load_state(self._experiment.global_state(self.number)))

    def fit(self, epochs: int) -> None:
        """Train on the server's data; the next state is the trained model's.

        Raises:
            Diverged: if loss or parameters are no longer finite.
        """
        learner = self._make_learner()
        self.losses["server"] = learner.fit(epochs, keep_optimizer=True).loss
        state = learner.model.state_dict()
        save_state(self.next_state, {name: state[name] for name in self._spec})
        learner.finish()
