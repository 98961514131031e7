"""The server in one round: the updates it holds, and what it can do with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.client.train import Diverged
from fedtools.files.experiment import Experiment
from fedtools.files.means import Member
from fedtools.files.states import Spec, load_state, save_state
from fedtools.files.updates import Refusal, Update
from fedtools.server.aggregate import mean

if TYPE_CHECKING:
    import numpy as np

    from fedtools.client.learner import Learner
    from fedtools.client.parallel import Stack


class Server:
    """What a method's `update_server` works with; each of its acts makes the next round's state.

    Attributes:
        number: the round.
        members: the clients whose updates were not refused.
        refusals: those whose updates were, with their reasons.
    """

    def __init__(
        self,
        experiment: Experiment,
        number: int,
        spec: Spec,
        updates: Sequence[Update],
        weights: Sequence[float],
        groups: Mapping[str, Sequence[Member]],
        refusals: Sequence[Refusal],
        min_clients: int,
        parameters: Collection[str],
        make_learner: Callable[[], Learner | Stack],
    ):
        self.number = number
        self.refusals = list(refusals)
        self._groups = groups
        self.members = [member for of in groups.values() for member in of]
        self._trained: dict[str, float] = {}
        self._updates = list(updates)
        self._weights = list(weights)
        self._experiment = experiment
        self._spec = spec
        self._min_clients = min_clients
        self._parameters = set(parameters)
        self._make_learner = make_learner

    @property
    def losses(self) -> dict[str, float]:
        """Mean training loss by client, and by "server" where the server trains."""
        return {member.client: member.loss for member in self.members} | self._trained

    @property
    def next_state(self) -> Path:
        """Where the shared tensors of the next round are written."""
        return self._experiment.global_state(self.number + 1)

    def mean(self) -> None:
        """The next state is the mean of the updates, weighted as the method says."""
        refused = mean(
            self._updates,
            self._weights,
            self.next_state,
            self._spec,
            min_clients=self._min_clients,
            refused=self.refusals,
            behind={name: [member.client for member in of] for name, of in self._groups.items()},
        )
        self.refusals += refused
        names = {refusal.client for refusal in refused}
        self.members = [member for member in self.members if member.client not in names]

    def keep(self) -> None:
        """The next state is this round's."""
        save_state(self.next_state, load_state(self._experiment.global_state(self.number)))

    def step(
        self,
        rule: Callable[[np.ndarray, dict[str, np.ndarray]], np.ndarray],
        slots: Mapping[str, float],
    ) -> None:
        """Replace the mean by a step of the server's own optimiser towards it.

        Buffers, such as BatchNorm's statistics, stay the mean's.

        Args:
            rule: called with mean minus model, and what it kept of the parameter under each name
                in `slots`, which it changes in place; returns what is added.
            slots: name of what is kept from round to round -> its value before the first step.
        """
        import numpy as np

        model = load_state(self._experiment.global_state(self.number), self._spec)
        state = load_state(self.next_state, self._spec)
        owner = self._experiment.server_dir()
        path = self._experiment.last_personal(owner, self.number, "optimizer.safetensors")
        kept = load_state(path) if path is not None else {}
        for name in sorted(self._parameters & state.keys()):
            old = model[name].astype(np.float64)
            own = {
                slot: kept.setdefault(f"{slot}.{name}", np.full_like(old, first))
                for slot, first in slots.items()
            }
            state[name] = (old + rule(state[name] - old, own)).astype(state[name].dtype)
            if not np.isfinite(state[name]).all():
                raise Diverged(f"{name} is not finite after the server's step")
        folder = self._experiment.personal_dir(owner, self.number)
        save_state(folder / "optimizer.safetensors", kept)
        self._experiment.drop_old_rounds(owner, keep=2)
        save_state(self.next_state, state)

    def fit(self) -> None:
        """Train on the server's data; the next state is the trained model's.

        Raises:
            Diverged: if loss or parameters are no longer finite.
        """
        learner = self._make_learner()
        (fitted,) = learner.fit(keep_optimizer=True)
        if not math.isfinite(fitted.loss):
            raise Diverged(f"loss {fitted.loss} after {fitted.steps} steps")
        self._trained["server"] = fitted.loss
        state = learner.tensors()
        save_state(self.next_state, {name: state[name] for name in self._spec})
        learner.finish()
