"""The server in one round: its client messages and the operations on them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtools.core.atomic import scratch_dir
from fedtools.core.errors import UserError, some
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import (
    CAPPED,
    COLLAPSED,
    LARGE,
    LEFT_OUT,
    OK,
    Message,
    Payload,
    Refusal,
    status_of,
)
from fedtools.exchange.private import make_private
from fedtools.exchange.states import load_state, save_state
from fedtools.models.adapt.adaptation import combine_of
from fedtools.server.aggregate import Bound, check_min_clients, combine
from fedtools.server.by_rule import Given, combine_by_rule
from fedtools.server.products import Adapters, combine_models
from fedtools.server.robust.base import Rule
from fedtools.server.robust.mean import Mean
from fedtools.server.shares import Rules, client_weights, dominant, most_of

if TYPE_CHECKING:
    from fedtools.client.client import Client

# The sum of client messages -> what the server publishes of it.
Release = Callable[["np.ndarray"], "np.ndarray"]


@dataclass(frozen=True)
class Round:
    """A round to aggregate.

    Attributes:
        experiment: the opened experiment.
        number: the round.
        sampled: the clients that take part.
        start_sum: the SHA-256 sum of the state that the server sent.
        payload: what each client sends.
        parameters: the names of the tensors that a server's optimiser may change.
        total: int64 (values,), the sum of the clients' changes, if it was computed securely.
    """

    experiment: Experiment
    number: int
    sampled: Sequence[str]
    start_sum: str
    payload: Payload
    parameters: frozenset[str]
    total: np.ndarray | None = None


class Server:
    """The interface of a method's server update; its operations write the next round's state.

    Attributes:
        round: the round.
        messages: the messages of clients that were not refused.
        refusals: the refused clients, with reasons.
        learner: the server as a training unit, if it trains in this phase; otherwise None.
        epochs, steps: length of the server's own training in this round.
        collapsed: client, or "" for data without clients -> share of utterances with an empty
            pseudo-label in the server's training; only clients where nearly all were empty.
    """

    def __init__(
        self,
        round: Round,
        rules: Rules,
        messages: Sequence[Message],
        refusals: Sequence[Refusal],
        learner: Client | None = None,
        release: Release | None = None,
    ):
        self.round, self.learner = round, learner
        self.epochs, self.steps = 0.0, 0
        self.messages, self.refusals = list(messages), list(refusals)
        self.collapsed: dict[str, float] = {}
        self._rules, self._spec, self._release = rules, round.payload.tensors, release
        self._experiment, self._own = round.experiment, round.experiment.at_server(round.number)
        self._trained: dict[str, float] = {}
        sampled = len(self.messages) + len(self.refusals)
        # A Poisson sample may be smaller than min_clients.
        self._least = min(rules.min_clients, sampled)
        self._check_enough()

    def _check_enough(self) -> None:
        if (self.messages or self.refusals) and self._rules.min_clients:
            folder = self._experiment.round(self.round.number).path
            check_min_clients(len(self.messages), self._least, self.refusals, folder)

    @property
    def losses(self) -> dict[str, float]:
        """Return the mean training loss of each client that trained, and of "server" if it did."""
        trained = {message.client: message.loss for message in self.messages if message.steps}
        return trained | self._trained

    @property
    def state(self) -> Path:
        """Return the path of the shared tensors that the clients started from."""
        return self._experiment.round(self.round.number).global_state

    @property
    def next_state(self) -> Path:
        """Return the path of the shared tensors of the next round."""
        return self._experiment.round(self.round.number + 1).global_state

    def mean(self) -> None:
        """Write the mean of the client updates, with the method's weights, as the next state.

        Updates with norms far above the median are refused (`Method.max_norm_ratio`), and weights
        far above the median are lowered (`Method.max_weight_ratio`). With a robust rule, the state
        is what the rule makes of the updates (`Method.robust`).
        """
        bound, rule = Bound(self.state, self._rules.max_norm_ratio), self._rules.rule
        if not isinstance(rule, Mean):
            self._mean_by_rule(rule, bound)
            return
        self._combine(self._weights(), bound, self.next_state)

    def _mean_by_rule(self, rule: Rule, bound: Bound) -> None:
        """Write the next state by a robust rule, and note whose updates it clipped or left out."""
        weights = self._weights() if rule.uses_weights else [1.0] * len(self.messages)
        kept = {part: float(one) for part, one in (self._own.load("rule") or {}).items()}
        how = combine_of(self._experiment.options.model)
        adapters = Adapters(how, self.state, f"round {self.round.number}")
        with scratch_dir(make_private(self._own.folder)) as folder:
            root = self._train_root(folder) if rule.root_in(self.round.number) else None
            given = Given(rule, bound, adapters, root, kept, self.round.payload.values)
            done = combine_by_rule(
                self.messages,
                weights,
                self.next_state,
                self._spec,
                given,
                min_clients=self._least,
            )
        self._refuse(done.refusals, {message.client: message.bytes for message in self.messages})
        self._check_enough()
        if not self.messages:
            self.keep()
        for index, message in enumerate(self.messages):
            status = done.statuses.get(message.client)
            if status == LEFT_OUT or (status and message.status == OK):
                self.messages[index] = replace(message, status=status)
        # In the first round in any case, so that a reset finds what was kept before later ones.
        if done.recorded or (self.round.number == 1 and rule.records):
            kept |= done.recorded
            self._own.save("rule", {part: np.array(one) for part, one in kept.items()})
        if root:
            self._own.finish()

    def _train_root(self, folder: Path) -> Path:
        """Train on the server's own data as a client does, and return the file of the result."""
        assert self.learner is not None, "the phase has no server_trains"
        (trained,) = self._rules.client(self.learner)
        if trained.reason:
            self._diverged(trained.reason)
        self.steps += trained.steps
        self.epochs += trained.steps / self.learner.source.batches(1, None, "train").steps[0]
        state, path = self.learner.tensors(), folder / "root.safetensors"
        save_state(path, {name: state[name] for name in self._spec})
        return path

    def sum(
        self,
        step: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
        relative: bool = True,
    ) -> None:
        """Compute the next state from the sum of what clients sent: counts, not models.

        The sum is released as the task defines, possibly with noise; before that it is stored only
        in the server's private folder.

        Args:
            step: function from a tensor of this round's state and the released sum to the tensor of
                the next state; by default the released sum.
            relative: whether counts of a client that add up to far more than the median client's
                are scaled down (`Method.max_weight_ratio`). Noise that the server adds afterwards
                does not cover this: one utterance could change how all others are counted.
        """
        if not self.messages:
            self.keep()
            return
        with scratch_dir(self._own.folder) as folder:
            path, totals = folder / "sum.safetensors", dict[str, float]()
            self._combine([1.0] * len(self.messages), None, path, totals)
            if relative and (weights := self._lowered(totals)):
                self._combine(weights, None, path, totals)
            else:
                weights = [1.0] * len(self.messages)
            amounts = [totals[one.client] for one in self.messages]
            self._note_shares(np.multiply(weights, amounts).tolist(), "counts")
            found = load_state(path)
        if self._release:
            found = {name: self._release(total) for name, total in found.items()}
        if step:
            state = load_state(self.state)
            found = {name: step(state[name], released) for name, released in found.items()}
        save_state(self.next_state, found)

    def add_mean_change(self) -> None:
        """Write the state plus the released mean of the clients' changes as the next state.

        The changes are whole numbers, whose sum is exact. It is kept in the server's private folder
        alone, and only until it is released, with the noise that the phase's privacy asks for.
        Clients that are refused count as changes of 0.
        """
        assert self._release, "the phase has no privacy"
        total = self.round.total
        if total is None:
            found = self._sum_of_changes()
            total = np.concatenate([found[name].ravel() for name in self._spec]).astype(np.int64)
        change = self._release(total)
        state, first = load_state(self.state), 0
        for name, (shape, _) in self._spec.items():
            last = first + math.prod(shape)
            moved = state[name] + change[first:last].reshape(shape)
            state[name] = moved.astype(state[name].dtype)
            if not np.isfinite(state[name]).all():
                self._diverged(f"{name} is not finite")
            first = last
        save_state(self.next_state, state)

    def _sum_of_changes(self) -> dict[str, np.ndarray]:
        """Return the sum of the changes, in steps: name -> float64, whole numbers."""
        zeros = {name: np.zeros(shape) for name, (shape, _) in self._spec.items()}
        if not self.messages:
            return zeros
        with scratch_dir(self._own.folder) as folder:
            path, sizes = folder / "sum.safetensors", {m.client: m.bytes for m in self.messages}
            found = combine(
                self.messages,
                [1.0] * len(self.messages),
                path,
                self._spec,
                values=self.round.payload.values,
                normalise=False,
                norm=self.round.payload.norm,
            )
            self._refuse(found, sizes)
            return load_state(path) if self.messages else zeros

    def _refuse(self, found: Sequence[Refusal], sizes: Mapping[str, int]) -> None:
        """Move the messages of refused clients to the refusals."""
        self.refusals += [replace(one, bytes=sizes[one.client]) for one in found]
        refused = {refusal.client for refusal in self.refusals}
        self.messages = [one for one in self.messages if one.client not in refused]

    def _lowered(self, totals: Mapping[str, float]) -> list[float]:
        """Return factors that lower the clients' totals to the most allowed; [] if none is over."""
        amounts = [totals[message.client] for message in self.messages]
        most = most_of(amounts, self._rules.max_weight_ratio)
        for index, amount in enumerate(amounts):
            if amount > most:
                self._lower(index, f"counts of {amount:g} in all lowered to {most:g}")
        over = any(amount > most for amount in amounts)
        return [min(1.0, most / amount) if amount else 1.0 for amount in amounts] if over else []

    def _note_shares(self, amounts: Sequence[float], what: str) -> None:
        """Name the clients that together have most of what the server uses, and mark them.

        Args:
            amounts: what is used of each message.
            what: what it is.
        """
        large = dominant(amounts)
        if not large:
            return
        total = sum(amounts)
        named = some([f"{self.messages[at].client} ({amounts[at] / total:.0%})" for at in large])
        share, have = sum(amounts[at] for at in large) / total, "has" if len(large) == 1 else "have"
        few = f"{len(large)} of {len(amounts)} clients {have} {share:.0%} of all {what}: {named}"
        print(f"round {self.round.number}: {few}", file=sys.stderr)
        for at in large:
            if self.messages[at].status == OK:
                self.messages[at] = replace(self.messages[at], status=LARGE)

    def _combine(
        self,
        weights: Sequence[float],
        bound: Bound | None,
        out: Path,
        totals: dict[str, float] | None = None,
    ) -> None:
        if not self.messages:
            # Poisson sampling may draw no client.
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
            totals=totals,
        )
        self._refuse(found, {message.client: message.bytes for message in self.messages})
        self._check_enough()

    def _weights(self) -> list[float]:
        weights = client_weights(self._rules, self.messages)
        for index, weight in enumerate(weights):
            own = self._rules.weight(self.messages[index].utterances)
            if own > weight:
                self._lower(index, f"weight {own:g} lowered to {weight:g}")
        return weights

    def lower_shares(self) -> None:
        """Mark the clients whose features are used only in part, see `max_weight_ratio`."""
        ratio = self._rules.max_weight_ratio
        for what in ("utterances", "frames"):
            amounts = [getattr(message, what) for message in self.messages]
            most = most_of(amounts, ratio)
            for index, amount in enumerate(amounts):
                if amount > most:
                    self._lower(index, f"only {most:g} of {amount} {what} are used")
            if what == "frames":
                self._note_shares([min(amount, most) for amount in amounts], what)

    def _lower(self, index: int, what: str) -> None:
        message = self.messages[index]
        if message.status == OK:
            self.messages[index] = replace(message, status=CAPPED)
        ratio = self._rules.max_weight_ratio
        detail = f"{what}, {ratio:g} times the median (max_weight_ratio)"
        print(f"round {self.round.number}, {message.client}: {detail}", file=sys.stderr)

    def keep(self) -> None:
        """Write this round's state as the next state."""
        save_state(self.next_state, load_state(self.state))

    def step(
        self,
        rule: Callable[[np.ndarray, dict[str, np.ndarray]], np.ndarray],
        slots: Mapping[str, float],
    ) -> None:
        """Replace the mean by a step of the server's own optimiser towards it.

        Buffers, such as BatchNorm statistics, keep the mean.

        Args:
            rule: function of the mean minus the model, and of the optimiser state of a parameter by
                name, which it changes in place; returns the update of the parameter.
            slots: name of an optimiser state -> its value before the first step.
        """
        import numpy as np

        model, state = load_state(self.state), load_state(self.next_state)
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
        """Train on the server's data, and write the trained model as the next state.

        Args:
            epochs: length of the training.
            only: selects the parameters to train by name; by default all.
        """
        assert self.learner is not None, "the phase has no server_trains"
        (trained,) = self.learner.train(epochs=epochs, keep_optimizer=True, only=only)
        if trained.reason:
            self._diverged(trained.reason)
        # Personal tensors, where the server trains a model for each client.
        self.learner.keep_personal([True] * len(self.learner.unit.own))
        shares = trained.empty_labels.items()
        self.collapsed = {who: share for who, share in shares if status_of("", share) == COLLAPSED}
        self._trained["server"] = trained.loss
        self.epochs += epochs
        self.steps += trained.steps
        state = self.learner.tensors()
        save_state(self.next_state, {name: state[name] for name in self._spec})
        self._own.finish()

    def _diverged(self, reason: str) -> None:
        problem = f"training diverged in round {self.round.number}: {reason}"
        raise UserError(problem, path=self._experiment.path, remedy="lower the learning rate")

    def mean_loss(self) -> float:
        """Return the mean of `losses`, NaN if there are none."""
        losses = self.losses.values()
        return math.fsum(losses) / len(losses) if losses else math.nan
