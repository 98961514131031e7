"""A federation of clients who rescore what they said, and exchange how often they said which word.

No model is opened: what the neural language model says of every word was stored by
`fedtools rescore`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import numpy as np

from fedtools.federation.base import Beginning, Federation, Sent, State
from fedtools.federation.steps import draw
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import SERVER_ROW
from fedtools.files.messages import Payload, Report
from fedtools.files.symbols import words_of
from fedtools.lm.marginals import most_of_a_word, smoothed
from fedtools.lm.rescored import NBEST
from fedtools.lm.reweighting import Adaptation, Lists, Weights, warn_of_no_lm
from fedtools.lm.stream import NO_TIMES, Stream, open_stream, spoken, times_in
from fedtools.lm.talk import Talk
from fedtools.methods.base import COUNTS, Phase
from fedtools.methods.fmp import FMP
from fedtools.privacy.incoming import bounds_on_counts
from fedtools.privacy.key import RECORD as KEY_RECORD
from fedtools.privacy.key import open_key
from fedtools.privacy.ledger import Amount, ledger_rows
from fedtools.privacy.marginals import PAPER_WARNING
from fedtools.privacy.options import CLIENT, LAPLACE, NONE, PAPER
from fedtools.privacy.plan import Plan
from fedtools.privacy.record import NONCE, Record, Row, close
from fedtools.privacy.releases import ReleasesOf
from fedtools.score.align import count_errors
from fedtools.server.server import Release


class RescoreFederation(Federation):
    """FMP's: the state is one tensor of counts, (V,), that all clients share.

    Raises:
        UserError: beside what is wrong with any experiment, if this one has privacy and no nonce.
    """

    def __init__(self, path: str | Path, device: str = "cpu"):
        super().__init__(path, device)
        self.releases = self._releases()

    @staticmethod
    def begin(beginning: Beginning) -> tuple[State, State]:
        method, where = beginning.method, f"{beginning.where}: method_conf"
        try:
            plan_of(method, beginning.config["rounds"])
        except ValueError as error:
            raise UserError(f"privacy: {error}", path=where) from None
        _check_sampling(method, beginning.config["clients_per_round"], where)
        if method.protection.mechanism == PAPER:
            print(f"warning: {PAPER_WARNING}", file=sys.stderr)
        if method.clock and not times_in(beginning.data["train"]):
            raise UserError(NO_TIMES, path=beginning.data["train"], remedy="take groups: even")
        stream = open_stream(beginning.data["train"])
        rescored = stream.rescored
        if method.protection.mechanism != NONE:
            _check_words(stream, method.max_words, beginning.data["train"])
        warn_of_no_lm(rescored, part_of(method, Weights), beginning.data["train"] / NBEST)
        state = {"counts": np.zeros(len(rescored.vocabulary))}
        return state, state

    @staticmethod
    def keep_own(path: Path, method: FMP) -> list[str]:
        """The nonce of noise, and which key it is drawn under."""
        if method.protection.mechanism == NONE:
            return []
        open_key(path, method.noise_key)
        Record.begin(path, method.noise_key)
        return [NONCE, KEY_RECORD]

    def payload(self, phase: Phase) -> Payload:
        assert phase.sends == COUNTS
        size, clients = len(self.lists.background), len(self.experiment.clients)
        plan = self.releases.plan if self.releases else None
        words = self.method.max_words * most_of_a_word(self.method.sigma)
        bounds = bounds_on_counts(plan, words, size, clients)
        return Payload({"counts": ((size,), "float64")}, values={"counts": bounds})

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        return [[client] for client in clients]

    def work(self, clients: Sequence[str], number: int, phase: Phase) -> Iterator[Sent]:
        check_planned(self.experiment, number)
        for client in clients:
            talk = self.talk(client, number)
            counts = phase.client(talk)
            # The server is told nothing but counts where it is not trusted with them.
            hidden = self.releases is not None and self.releases.plan.options.trust == CLIENT
            size = 0 if hidden else talk.group.stop - talk.group.start
            yield Sent([Report(client, size)], {"counts": counts[None]}, untimed=hidden)

    def load_result(self, client: str | None, number: int) -> None:
        self._number = number
        self._counts = self.experiment.shared_state(number + 1)["counts"]

    def measure(self, split: str, client: str) -> dict[str, object]:
        """The group after the round that is loaded, rescored with that round's counts."""
        check_split(split, self.experiment)
        talk = self.talk(client, self._number + 1)
        said = dict(zip(self.names(talk.group), self.rescored(talk), strict=True))
        return measure_text(said, self._text)

    def best_text(self) -> dict[str, str]:
        """What every client makes of all its utterances, the last group included."""
        found = {}
        for number in range(self.experiment.last_round() + 1):
            self.load_result(None, number)
            for client in self.experiment.clients:
                talk = self.talk(client, number + 1)
                found |= zip(self.names(talk.group), self.rescored(talk), strict=True)
        return found

    def marginals(self) -> dict[str, np.ndarray]:
        """The distributions after the last round, (V,) each: every client's, and "-", all's."""
        last, smoothing = self.experiment.last_round(), self.method.smoothing
        self.load_result(None, last)
        marginal = self.method.protection.mechanism == PAPER
        found = {SERVER_ROW: self.lists.shared(self._counts, smoothing, marginal)}
        for client in self.experiment.clients:
            own = self.talk(client, last + 1).before
            found[client] = smoothed(own, self.lists.background, smoothing)
        return {name: value.astype(np.float32) for name, value in found.items()}

    def release(self, number: int) -> Release | None:
        if self.releases is None:
            return None
        background, smoothing = self.lists.background, self.method.smoothing

        def released(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            counts = self.releases.by_server(found["counts"], number, background, smoothing)
            return {"counts": counts}

        return released

    def closed(self, number: int, clients: Sequence[str]) -> None:
        super().closed(number, clients)
        if self.releases is not None:
            for own in (
                self.experiment.at_server(number),
                *(self.experiment.own(client, number) for client in clients),
            ):
                close(own)

    def released(self) -> set[tuple[str, Row]]:
        """What one with privacy has released, by sender; that of its copies too."""
        return self.releases.rows(self.experiment.clients)

    def ledger(self, released: Iterable[tuple[str, Row]]) -> list[dict[str, str]]:
        """What releases cost whom: rows of `fedtools.privacy.ledger`.

        Args:
            released: as `released` gives it.
        """
        rounds = range(1, self.experiment.config["rounds"] + 1)
        senders = Counter((sender, row.number) for sender, row in released)
        draws = [max((senders[one] for one in senders if one[1] == at), default=0) for at in rounds]
        amounts = [
            [
                Amount.of(self.talk(client, number).new)
                if count and client in self._sampled(number)
                else Amount()
                for client in self.experiment.clients
            ]
            for number, count in zip(rounds, draws, strict=True)
        ]
        return ledger_rows(self.releases.plan, amounts, draws)

    @property
    def owners(self) -> dict[str, str]:
        """Utterance -> client, of all that clients count."""
        names = self._stream.rescored.utterances
        return {name: client for client, run in self._stream.runs.items() for name in names[run]}

    def _releases(self) -> ReleasesOf | None:
        """Bounds and noise; None without differential privacy."""
        if self.method.protection.mechanism == NONE:
            return None
        plan = plan_of(self.method, self.experiment.config["rounds"])
        return ReleasesOf(plan, self.experiment, self.method.noise_key)

    def rescored(self, talk: Talk) -> list[str]:
        """The best hypotheses of a client's round, with the counts that are loaded."""
        hypotheses = self._stream.rescored.hypotheses
        return [hypotheses[best] for best in talk.rescore(self._counts)]

    def names(self, group: slice) -> list[str]:
        """The utterances of a group."""
        return self._stream.rescored.utterances[group]

    def talk(self, client: str, number: int) -> Talk:
        """A client in a round."""
        rounds = self.experiment.config["rounds"]
        groups = self._stream.groups(client, rounds, self.method.clock)
        sent = [before for before in range(1, number) if client in self._sampled(before)]
        options = part_of(self.method, Adaptation)
        return Talk(client, self.lists, groups, number, sent, options, self.releases)

    def _sampled(self, number: int) -> frozenset[str]:
        """Who takes part in a round, drawn once, since all clients ask of all rounds before.

        Not as a file says it, by which a server could have a client count something twice.
        """
        if number not in self._known_samples:
            drawn = draw(self.experiment, number, self.method.phase(number))
            self._known_samples[number] = frozenset(drawn)
        return self._known_samples[number]

    @cached_property
    def _known_samples(self) -> dict[int, frozenset[str]]:
        return {}

    @cached_property
    def lists(self) -> Lists:
        """Of all clients."""
        return Lists(self._stream.rescored, part_of(self.method, Weights), self._stream.covered())

    @cached_property
    def _stream(self) -> Stream:
        return open_stream(self.data_path("train"))

    @cached_property
    def _text(self) -> dict[str, str]:
        return spoken(self.data_path("train"), self._stream.rescored.utterances)


def _all_take_part(sampled: float | int | None) -> bool:
    return sampled is None or (sampled == 1 and isinstance(sampled, float))


def _check_sampling(method: FMP, sampled: float | int | None, where: str) -> None:
    """Fail with a `UserError` where one client less would have others drawn in its place.

    A client's only utterance, or word, takes the client with it.
    """
    if method.protection.mechanism == LAPLACE and not _all_take_part(sampled):
        problem = f"privacy: mechanism: laplace, and clients_per_round: {sampled}"
        remedy = "let all take part; without one client others would be drawn"
        raise UserError(problem, path=where, remedy=remedy)


def check_split(split: str, experiment: Experiment) -> None:
    """Fail with a `UserError` for data other than the streams that clients take part with.

    Raises:
        UserError: for a split other than "train".
    """
    if split != "train":
        problem = f"{split!r} is no stream of a federation that rescores"
        remedy = "measure 'train', whose utterances are rescored with what came before them"
        raise UserError(problem, path=experiment.path, remedy=remedy)


def check_planned(experiment: Experiment, number: int) -> None:
    """Fail with a `UserError` for a round beyond those that utterances were cut for.

    There is nothing left to say in it, and a release more would cost more than was promised.
    """
    rounds = experiment.config["rounds"]
    if number > rounds:
        problem = f"round {number}, but utterances are cut into groups for {rounds} rounds"
        remedy = "begin another experiment with more rounds"
        raise UserError(problem, path=experiment.path, remedy=remedy)


def measure_text(said: Mapping[str, str], text: Mapping[str, str]) -> dict[str, object]:
    """The columns of tasks whose clients rescore: word errors of some utterances; WER in %.

    Args:
        said: utterance -> words, as they were heard.
        text: as they were spoken.
    """
    words = errors = 0
    for name, heard in said.items():
        spoken = words_of(text[name])
        words += len(spoken)
        errors += count_errors(spoken, words_of(heard)).errors
    rate = f"{100 * errors / words:.4f}" if words else "nan"
    return {"utterances": len(said), "words": words, "errors": errors, "wer": rate}


def _check_words(stream: Stream, most: float, path: Path) -> None:
    """Insist that no honest client can be refused for its words, which would tell of them."""
    rescored = stream.rescored
    longest = np.maximum.reduceat(np.diff(rescored.first_word), rescored.first_hypothesis[:-1])
    for client, run in stream.runs.items():
        if (words := int(longest[run].sum())) > most:
            problem = f"client {client!r} may count {words} words, over max_words of {most:g}"
            remedy = "with privacy, raise method_conf.max_words: who is refused would tell of them"
            raise UserError(problem, path=path, remedy=remedy)


def plan_of(method: FMP, rounds: int) -> Plan:
    """What the options of differential privacy mean; a ValueError if they cannot be had."""
    return Plan(method.protection, rounds, method.clock is None)


def part_of(method: FMP, kind: type):
    """Those options of a method that another part of it has under the same names."""
    return kind(**{one.name: getattr(method, one.name) for one in fields(kind)})
