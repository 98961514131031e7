"""The server in one round: the messages it holds, and what it can do with them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.files.atomic import scratch_dir
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.messages import CAPPED, COLLAPSED, OK, Message, Payload, Refusal, status_of
from fedtools.files.states import load_state, save_state
from fedtools.models.adaptation import combine_of
from fedtools.server.aggregate import Bound, check_min_clients
from fedtools.server.products import Adapters, combine_models
from fedtools.server.shares import Rules, most_of, weights_of

if TYPE_CHECKING:
    import numpy as np

    from fedtools.client.client import Client

# What the server makes known of a sum of what clients sent.
Release = Callable[["np.ndarray"], "np.ndarray"]


@dataclass(frozen=True)
class Round:
    """A round that is aggregated.

    Attributes:
        experiment: opened.
        number: the round.
        sampled: who takes part.
        base: the sum of the state that the server sent.
        payload: what each client sends.
        parameters: the names of the tensors that a server's optimiser may change.
    """

    experiment: Experiment
    number: int
    sampled: Sequence[str]
    base: str
    payload: Payload
    parameters: frozenset[str]


class Server:
    """What a method's server half works with; each of its acts makes the next round's state.

    Attributes:
        round: the round.
        messages: those of clients that were not refused.
        refusals: the clients that were, with their reasons.
        client: the server as one who trains, where the phase has it train; otherwise None.
        epochs, steps: of its own training in this round.
        collapsed: client, or "" where data have none -> the share of its utterances whose
            pseudo-labels were empty in that training, of those of whom nearly all were.
    """

    def __init__(
        self,
        round: Round,
        rules: Rules,
        messages: Sequence[Message],
        refusals: Sequence[Refusal],
        client: Client | None = None,
        release: Release | None = None,
    ):
        self.round, self.client = round, client
        self.epochs, self.steps = 0.0, 0
        self.messages, self.refusals = list(messages), list(refusals)
        self.collapsed: dict[str, float] = {}
        self._rules, self._spec, self._release = rules, round.payload.tensors, release
        self._experiment, self._own = round.experiment, round.experiment.at_server(round.number)
        self._trained: dict[str, float] = {}
        sampled = len(self.messages) + len(self.refusals)
        # A sample drawn with a probability may be smaller than that.
        self._least = min(rules.min_clients, sampled)
        self._check_enough()

    def _check_enough(self) -> None:
        if self.messages or self.refusals:
            folder = self._experiment.round(self.round.number).path
            check_min_clients(len(self.messages), self._least, self.refusals, folder)

    @property
    def losses(self) -> dict[str, float]:
        """Mean training loss of each client that trained, and of "server" where the server did."""
        trained = {message.client: message.loss for message in self.messages if message.steps}
        return trained | self._trained

    @property
    def state(self) -> Path:
        """The shared tensors that the clients started from."""
        return self._experiment.round(self.round.number).global_state

    @property
    def next_state(self) -> Path:
        """Where the shared tensors of the next round are written."""
        return self._experiment.round(self.round.number + 1).global_state

    def mean(self) -> None:
        """The next state is the mean of what clients sent, weighted as the method says.

        Updates far longer than the others are refused, and weights far over the others are
        lowered: `Method.max_norm_ratio`, `Method.max_weight_ratio`.
        """
        bound = Bound(self.state, self._rules.max_norm_ratio)
        self._combine(self._weights(), bound, self.next_state)

    def sum(self, step: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None) -> None:
        """The next state is made of the sum of what clients sent: of counts, not of models.

        It is released as the task has it, with noise perhaps: until then it is in the server's own
        folder alone.

        Args:
            step: from a tensor of this round's state, and what was released of the sum, to that of
                the next state; by default what was released.
        """
        if not self.messages:
            self.keep()
            return
        with scratch_dir(self._own.folder) as folder:
            self._combine([1.0] * len(self.messages), None, folder / "sum.safetensors")
            found = load_state(folder / "sum.safetensors")
        if self._release:
            found = {name: self._release(total) for name, total in found.items()}
        if step:
            state = load_state(self.state)
            found = {name: step(state[name], released) for name, released in found.items()}
        save_state(self.next_state, found)

    def _combine(self, weights: Sequence[float], bound: Bound | None, out: Path) -> None:
        if not self.messages:
            # Nobody was drawn: sampling with a probability does that at times.
            self.keep()
            return
        how = combine_of(self._experiment.options.model)
        found = combine_models(
            self.messages,
            weights,
            out,
            self._spec,
            Adapters(how, self.state, f"round {self.round.number}"),
            values=self.round.payload.values,
            bound=bound,
            normalise=bound is not None,
            min_clients=self._least,
        )
        sizes = {message.client: message.bytes for message in self.messages}
        self.refusals += [replace(one, bytes=sizes[one.client]) for one in found]
        refused = {refusal.client for refusal in self.refusals}
        self.messages = [one for one in self.messages if one.client not in refused]
        self._check_enough()

    def _weights(self) -> list[float]:
        weights = weights_of(self._rules, self.messages)
        for index, weight in enumerate(weights):
            own = self._rules.weight(self.messages[index].utterances)
            if own > weight:
                self._lower(index, f"its weight {own:g} counts as {weight:g}")
        return weights

    def lower_shares(self) -> None:
        """Mark the clients of whose features a part alone will be taken: `max_weight_ratio`."""
        ratio = self._rules.max_weight_ratio
        for what in ("utterances", "frames"):
            amounts = [getattr(message, what) for message in self.messages]
            most = most_of(amounts, ratio)
            for index, amount in enumerate(amounts):
                if amount > most:
                    self._lower(index, f"of its {amount} {what} {most:g} are taken")

    def _lower(self, index: int, what: str) -> None:
        message = self.messages[index]
        if message.status == OK:
            self.messages[index] = replace(message, status=CAPPED)
        ratio = self._rules.max_weight_ratio
        said = f"{what}, {ratio:g} times the median (max_weight_ratio)"
        print(f"round {self.round.number}, {message.client}: {said}", file=sys.stderr)

    def keep(self) -> None:
        """The next state is this round's."""
        save_state(self.next_state, load_state(self.state))

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

        model = load_state(self.state, self._spec)
        state = load_state(self.next_state, self._spec)
        kept = self._own.load("optimizer") or {}
        for name in sorted(self.round.parameters & state.keys()):
            old = model[name].astype(np.float64)
            own = {
                slot: kept.setdefault(f"{slot}.{name}", np.full_like(old, first))
                for slot, first in slots.items()
            }
            state[name] = (old + rule(state[name] - old, own)).astype(state[name].dtype)
            if not np.isfinite(state[name]).all():
                self._diverged(f"{name} is not finite after the server's step")
        self._own.save("optimizer", kept)
        self._own.drop_old(keep=2)
        save_state(self.next_state, state)

    def train(self, epochs: int = 1, only: Callable[[str], bool] | None = None) -> None:
        """Train on the server's data; the next state is the trained model's.

        Args:
            only: chooses parameters by name; by default all are trained.
        """
        assert self.client is not None, "the phase has no server_trains"
        (trained,) = self.client.train(epochs=epochs, keep_optimizer=True, only=only)
        if trained.reason:
            self._diverged(trained.reason)
        # Of models that the server trains for clients.
        self.client.keep_personal([True] * len(self.client.unit.own))
        shares = trained.empty_labels.items()
        self.collapsed = {who: share for who, share in shares if status_of("", share) == COLLAPSED}
        self._trained["server"] = trained.loss
        self.epochs += epochs
        self.steps += trained.steps
        state = self.client.tensors()
        save_state(self.next_state, {name: state[name] for name in self._spec})
        self._own.finish()

    def _diverged(self, reason: str) -> None:
        problem = f"training diverged in round {self.round.number}: {reason}"
        raise UserError(problem, path=self._experiment.path, remedy="lower the learning rate")

    def mean_loss(self) -> float:
        """The mean of `losses`, NaN if there is none."""
        losses = self.losses.values()
        return math.fsum(losses) / len(losses) if losses else math.nan
