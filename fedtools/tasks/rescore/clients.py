"""The clients of a rescoring experiment: the utterances and word counts of each in any round."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from fedtools.exchange.experiment import Experiment
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import Stream, open_stream, spoken
from fedtools.methods.fmp import FMP, ClientState
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.releases import ReleasesOf
from fedtools.server.sample import draw


class Clients:
    """All clients of an experiment, in any round.

    Args:
        experiment: the opened experiment.
        method: of the experiment.
        releases: bounds and noise; None without differential privacy.
        path: of the stream, which is opened on first use.
    """

    def __init__(
        self, experiment: Experiment, method: FMP, releases: ReleasesOf | None, path: Path
    ):
        self.experiment, self.method, self.releases = experiment, method, releases
        self._path = path
        self._samples: dict[int, frozenset[str]] = {}

    @cached_property
    def stream(self) -> Stream:
        """Return the utterances of all clients."""
        return open_stream(self._path)

    @cached_property
    def lists(self) -> Lists:
        """Return the N-best lists of all utterances."""
        return Lists(self.stream.rescored, self.method.part(ListWeights), self.stream.covered())

    @cached_property
    def text(self) -> dict[str, str]:
        """Return utterance -> words, as they were spoken."""
        return spoken(self._path, self.stream.rescored.utterances)

    @property
    def owners(self) -> dict[str, str]:
        """Return utterance -> client, for all utterances that clients count."""
        names = self.stream.rescored.utterances
        return {name: client for client, run in self.stream.runs.items() for name in names[run]}

    def state(self, client: str, number: int) -> ClientState:
        """Return a client's state when a round begins; it counts the rounds before again."""
        groups = self.stream.groups(client, self.experiment.options.rounds, self.method.clock)
        state = ClientState(client, self.lists, groups, self.method, self.releases)
        for before in range(1, number):
            state.count()
            if client in self.sampled(before):
                state.take()
        return state

    def new(self, client: str, number: int) -> Utterances:
        """Return the utterances that are new to a client's counts in a round."""
        state = self.state(client, number)
        state.count()
        return state.new

    def sampled(self, number: int) -> frozenset[str]:
        """Return the clients that take part in a round, drawn once and kept for later calls.

        They are drawn, not read from a file, with which a server could make a client count words
        twice.
        """
        if number not in self._samples:
            drawn = draw(self.experiment, number, self.method.phase(number))
            self._samples[number] = frozenset(drawn)
        return self._samples[number]
