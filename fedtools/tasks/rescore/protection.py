"""Differential privacy of an experiment's counts: the noise, its record, and its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fedtools.privacy.ledger import Amount, ledger_rows
from fedtools.privacy.record import Row, close
from fedtools.privacy.releases import ReleasesOf
from fedtools.server.server import Release
from fedtools.tasks.rescore.clients import Clients


class Protection:
    """The differential privacy of clients' counts.

    Args:
        clients: the clients that count.
        releases: bounds and noise.
    """

    def __init__(self, clients: Clients, releases: ReleasesOf):
        self.releases, self._clients = releases, clients
        self._experiment = clients.experiment

    def release(self, number: int) -> Release:
        """Return the function from the sum of a round's counts to what the server releases."""
        method, u = self._clients.method, self._clients.lists.background
        return lambda total: method.release(total, number, u, self.releases)

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """Close the records of a complete round, whose releases are not made again."""
        close(self._experiment.at_server(number))
        for client in clients:
            close(self._experiment.own(client, number))

    def released(self) -> set[tuple[str, Row]]:
        """Return what was released, by sender, including releases by copies of the experiment."""
        return self.releases.rows(self._experiment.clients)

    def ledger(self, released: Iterable[tuple[str, Row]]) -> list[dict[str, str]]:
        """Return the privacy cost of releases, as rows of `fedtools.privacy.ledger`.

        Args:
            released: what `released` returned.
        """
        rounds = range(1, self._experiment.options.rounds + 1)
        senders = Counter((sender, row.number) for sender, row in released)
        draws = [max((senders[one] for one in senders if one[1] == at), default=0) for at in rounds]
        amounts = [
            [
                Amount.of(self._clients.new(client, number))
                if count and client in self._clients.sampled(number)
                else Amount()
                for client in self._experiment.clients
            ]
            for number, count in zip(rounds, draws, strict=True)
        ]
        return ledger_rows(self.releases.plan, amounts, draws)

    @property
    def owners(self) -> Mapping[str, str]:
        """Return utterance -> client, for all utterances that clients count."""
        return self._clients.owners
