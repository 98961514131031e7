"""The clients of an experiment who talk: what each has said by when, and what it has counted."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from fedtools.files.experiment import Experiment
from fedtools.lm.reweighting import Lists, Weights
from fedtools.lm.stream import Stream, open_stream, spoken
from fedtools.methods.fmp import FMP, ClientState
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.releases import ReleasesOf
from fedtools.server.sample import draw


class Clients:
    """All clients of an experiment, in any round.

    Args:
        experiment: opened.
        method: of the experiment.
        releases: bounds and noise; None without differential privacy.
        path: of the stream; it is opened when it is first asked for.
    """

    def __init__(
        self, experiment: Experiment, method: FMP, releases: ReleasesOf | None, path: Path
    ):
        self.experiment, self.method, self.releases = experiment, method, releases
        self._path = path
        self._samples: dict[int, frozenset[str]] = {}

    @cached_property
    def stream(self) -> Stream:
        """What all have said."""
        return open_stream(self._path)

    @cached_property
    def lists(self) -> Lists:
        """The N-best lists of all utterances."""
        return Lists(self.stream.rescored, self.method.part(Weights), self.stream.covered())

    @cached_property
    def text(self) -> dict[str, str]:
        """Utterance -> words, as they were spoken."""
        return spoken(self._path, self.stream.rescored.utterances)

    @property
    def owners(self) -> dict[str, str]:
        """Utterance -> client, of all that clients count."""
        names = self.stream.rescored.utterances
        return {name: client for client, run in self.stream.runs.items() for name in names[run]}

    def state(self, client: str, number: int) -> ClientState:
        """A client when a round begins; it counts again what came before."""
        groups = self.stream.groups(client, self.experiment.options.rounds, self.method.clock)
        state = ClientState(client, self.lists, groups, self.method, self.releases)
        for before in range(1, number):
            state.count()
            if client in self.sampled(before):
                state.take()
        return state

    def new(self, client: str, number: int) -> Utterances:
        """What a client has in a round, and no round before has had."""
        state = self.state(client, number)
        state.count()
        return state.new

    def sampled(self, number: int) -> frozenset[str]:
        """Who takes part in a round, drawn once, since all clients ask of all rounds before.

        Not as a file says it, by which a server could have a client count something twice.
        """
        if number not in self._samples:
            drawn = draw(self.experiment, number, self.method.phase(number))
            self._samples[number] = frozenset(drawn)
        return self._samples[number]
