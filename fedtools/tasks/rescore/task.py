"""A federation whose clients rescore their utterances, and exchange counts of their words.

No model is opened: `fedtools rescore` has stored the neural language model's score of every word.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import SERVER_ROW
from fedtools.exchange.messages import Payload
from fedtools.exchange.states import Spec
from fedtools.lm.reweighting import ListWeights, warn_of_no_lm
from fedtools.lm.stream import NO_TIMES, Stream, open_stream, times_in
from fedtools.lm.word_scores import NBEST
from fedtools.methods.base import COUNTS, Phase
from fedtools.methods.fmp import FMP, ClientState
from fedtools.privacy.incoming import bounds_on_counts
from fedtools.privacy.key import RECORD as KEY_RECORD
from fedtools.privacy.key import open_key
from fedtools.privacy.marginals import PAPER_WARNING
from fedtools.privacy.options import LAPLACE, NONE, PAPER, USER
from fedtools.privacy.record import NONCE, Record, check_unprotected
from fedtools.privacy.releases import ReleasesOf
from fedtools.tasks.base import NewExperiment, State, Task
from fedtools.tasks.rescore.clients import Clients
from fedtools.tasks.rescore.protection import Protection
from fedtools.tasks.rescore.spoken import check_planned, check_split, measure_text

# The share of all counts above which a client's bound is too large to be silent about.
_LARGE_SHARE = 0.5


class RescoreTask(Task[FMP]):
    """FMP's task: the state is one tensor of counts, (V,), that all clients share.

    Raises:
        UserError: if the experiment has privacy and no nonce, or an error that any task finds.
    """

    def __init__(self, experiment: Experiment, method: FMP, device: str = "cpu"):
        super().__init__(experiment, method, device)
        self._counts: np.ndarray | None = None
        self._releases = None
        if method.protection.mechanism != NONE:
            plan = method.plan(experiment.options.rounds)
            self._releases = ReleasesOf(plan, experiment, method.noise_key)
        else:
            check_unprotected(experiment.path, method.noise_key)

    @cached_property
    def clients(self) -> Clients:
        """Return the clients, with their utterances and counts."""
        path = self.data_path("train")
        return Clients(self.experiment, self.method, self._releases, path)

    @cached_property
    def protection(self) -> Protection | None:
        """Return the protection of counts; None without differential privacy."""
        return Protection(self.clients, self._releases) if self._releases else None

    @staticmethod
    def begin(new: NewExperiment[FMP]) -> tuple[State, State]:
        method, where = new.method, f"{new.where}: method_conf"
        try:
            method.plan(new.options.rounds)
        except ValueError as error:
            raise UserError(f"privacy: {error}", path=where) from None
        _check_sampling(method, new.options.clients_per_round, where)
        if method.protection.mechanism == PAPER:
            print(f"warning: {PAPER_WARNING}", file=sys.stderr)
        if method.clock and not times_in(new.data["train"]):
            raise UserError(NO_TIMES, path=new.data["train"], remedy="set groups: even")
        stream = open_stream(new.data["train"])
        rescored = stream.rescored
        if method.protection.mechanism != NONE:
            _check_words(stream, method, new.data["train"])
        warn_of_no_lm(rescored, method.part(ListWeights), new.data["train"] / NBEST)
        state = {"counts": np.zeros(len(rescored.vocabulary))}
        return state, state

    @staticmethod
    def keep_own(path: Path, method: FMP) -> list[str]:
        """Write the noise's nonce and the record of its key, and return their names."""
        if method.protection.mechanism == NONE:
            return []
        open_key(path, method.noise_key)
        Record.begin(path, method.noise_key)
        return [NONCE, KEY_RECORD]

    @property
    def spec(self) -> Spec:
        return {"counts": ((len(self.clients.lists.background),), "float64")}

    def payload(self, phase: Phase) -> Payload:
        assert phase.sends == COUNTS
        size, clients = len(self.clients.lists.background), len(self.experiment.clients)
        plan = self._releases.plan if self._releases else None
        # The largest count of a word, if it is in each hypothesis of a list of a thousand or fewer.
        most = float(self.method.kernel(np.arange(1, 1001)).sum())
        bounds = bounds_on_counts(plan, self.method.max_words * most, size, clients)
        return Payload({"counts": ((size,), "float64")}, values={"counts": bounds})

    def source(self, clients: Sequence[str], number: int, phase: Phase) -> ClientState:
        (client,) = clients
        check_planned(self.experiment, number)
        return self.clients.state(client, number)

    def load(self, state: State, number: int) -> None:
        self._number = number
        # The same for all clients of a round.
        if state["counts"] is self._counts:
            return
        self._counts = state["counts"]
        self._q_bar = self._global_distribution(state["counts"], number)

    def _global_distribution(self, counts: np.ndarray, number: int) -> np.ndarray:
        """Return q_bar of the counts that the server sends after a round, (V,)."""
        deviation = 0.0
        if self._releases:
            deviation = self._releases.plan.deviation(number, len(self.experiment.clients))
        u = self.clients.lists.background
        return self.method.global_distribution(counts, u, deviation)

    def measure(self, split: str, client: str) -> dict[str, object]:
        """Measure the group after the loaded round, rescored with that round's counts."""
        check_split(split, self.experiment)
        return measure_text(self.rescored(client), self.clients.text)

    def rescored(self, client: str) -> dict[str, str]:
        """Return utterance -> words, for a client's group after the loaded round."""
        state, rescored = self.clients.state(client, self._number + 1), self.clients.stream.rescored
        best = [rescored.hypotheses[one] for one in state.rescore(self._q_bar)]
        return dict(zip(rescored.utterances[state.group], best, strict=True))

    def marginals(self) -> dict[str, np.ndarray]:
        """Return the distributions after the last round, (V,): each client's, and "-", all's."""
        last, u = self.experiment.last_round(), self.clients.lists.background
        counts = self.experiment.round(last + 1).shared_state()["counts"]
        found = {SERVER_ROW: self._global_distribution(counts, last)}
        for client in self.experiment.clients:
            found[client] = self.method.smoothed(self.clients.state(client, last + 1).counts, u)
        return {name: value.astype(np.float32) for name, value in found.items()}


def _all_take_part(sampled: float | int | None) -> bool:
    return sampled is None or (sampled == 1 and isinstance(sampled, float))


def _check_sampling(method: FMP, sampled: float | int | None, where: str) -> None:
    """Raise a `UserError` if the removal of one client would change which others are drawn.

    A client with a single utterance, or word, disappears if that is removed.
    """
    if method.protection.mechanism == LAPLACE and not _all_take_part(sampled):
        problem = f"privacy: mechanism: laplace excludes clients_per_round: {sampled}"
        remedy = "let all clients take part; without one client, others would be drawn"
        raise UserError(problem, path=where, remedy=remedy)


def _check_words(stream: Stream, method: FMP, path: Path) -> None:
    """Check the bound on a client's words, which must not depend on the data.

    Prints a warning if it lets one dishonest client have most of the counts.

    Raises:
        UserError: if an honest client could be refused for its words, which leaks them.
    """
    rescored, most = stream.rescored, method.max_words
    longest = np.maximum.reduceat(np.diff(rescored.first_word), rescored.first_hypothesis[:-1])
    words = {client: int(longest[run].sum()) for client, run in stream.runs.items()}
    for client, counted in words.items():
        if counted > most:
            problem = f"client {client!r} may count {counted} words, over max_words of {most:g}"
            remedy = "with privacy, raise method_conf.max_words: a refusal would leak these words"
            raise UserError(problem, path=path, remedy=remedy)
    share = most / (most + sum(words.values()) - max(words.values()))
    if method.bounds_sums or method.protection.unit == USER or share <= _LARGE_SHARE:
        return
    problem = f"max_words of {most:g} lets one dishonest client have {share:.0%} of all counts"
    remedy = "lower it to what is publicly known of a client's words, or take unit: user"
    print(f"warning: {path}: {problem}; {remedy}", file=sys.stderr)
