"""A federation of clients who rescore what they said, and exchange how often they said which word.

No model is opened: what the neural language model says of every word was stored by
`fedtools rescore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property

import numpy as np

from fedtools.federation.base import Beginning, Federation, Sent, State
from fedtools.files.datadir import DataDir
from fedtools.files.messages import Payload, Report
from fedtools.files.states import load_state
from fedtools.lm.rescored import Rescored
from fedtools.lm.reweighting import Adaptation, Lists, Talk, Weights, groups_of
from fedtools.lm.stream import open_stream
from fedtools.lm.vocabulary import Vocabulary
from fedtools.methods.base import COUNTS, Phase
from fedtools.score.align import count_errors


class RescoreFederation(Federation):
    """FMP's: the state is one tensor of counts, (V,), that all clients share."""

    @staticmethod
    def begin(beginning: Beginning) -> tuple[State, State]:
        size = len(Vocabulary.read(beginning.data["train"]))
        state = {"counts": np.zeros(size)}
        return state, state

    def payload(self, phase: Phase) -> Payload:
        assert phase.sends == COUNTS
        return Payload({"counts": ((len(self.lists.background),), "float64")})

    def units(self, clients: Sequence[str], number: int) -> list[list[str]]:
        return [[client] for client in clients]

    def work(self, clients: Sequence[str], number: int, phase: Phase) -> Iterator[Sent]:
        for client in clients:
            talk = self.talk(client, number)
            counts = phase.client(talk)
            size = talk.group.stop - talk.group.start
            yield Sent([Report(client, utterances=size)], {"counts": counts[None]})

    def load_result(self, client: str | None, number: int) -> None:
        self._number = number
        self._counts = load_state(self.experiment.global_state(number + 1))["counts"]

    def measure(self, split: str, client: str) -> dict[str, object]:
        """The group after the round that is loaded, rescored with that round's counts."""
        talk = self.talk(client, self._number + 1)
        words = errors = 0
        for name, said in zip(self.names(talk.group), self.rescored(talk), strict=True):
            spoken = self._text[name].split()
            words += len(spoken)
            errors += count_errors(spoken, said.split()).errors
        utterances = talk.group.stop - talk.group.start
        rate = f"{100 * errors / words:.4f}" if words else "nan"
        return {"utterances": utterances, "words": words, "errors": errors, "wer": rate}

    def best_text(self) -> dict[str, str]:
        """What every client makes of all its utterances, the last group included."""
        found = {}
        for number in range(self.experiment.last_round() + 1):
            self.load_result(None, number)
            for client in self.experiment.clients:
                talk = self.talk(client, number + 1)
                found |= zip(self.names(talk.group), self.rescored(talk), strict=True)
        return found

    def rescored(self, talk: Talk) -> list[str]:
        """The best hypotheses of a client's round, with the counts that are loaded."""
        return [self._stream[0].hypotheses[best] for best in talk.rescore(self._counts)]

    def names(self, group: slice) -> list[str]:
        return self._stream[0].utterances[group]

    def talk(self, client: str, number: int) -> Talk:
        """A client in a round."""
        rounds = self.experiment.config["rounds"]
        groups = groups_of(self._stream[1][client], rounds)
        sent = [before for before in range(1, number) if client in self.experiment.sampled(before)]
        return Talk(self.lists, groups, number, sent, _part(self.method, Adaptation))

    @cached_property
    def lists(self) -> Lists:
        """Of all clients."""
        return Lists(self._stream[0], _part(self.method, Weights))

    @cached_property
    def _stream(self) -> tuple[Rescored, dict[str, slice]]:
        return open_stream(self.data_path("train"))

    @cached_property
    def _text(self) -> dict[str, str]:
        return DataDir.read(self.data_path("train"), "text").text


def _part(method: object, kind: type):
    """Those options of a method that another part of it has under the same names."""
    return kind(**{one.name: getattr(method, one.name) for one in fields(kind)})
