"""The differential privacy of an experiment's counts: noise, its record, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fedtools.privacy.ledger import Amount, ledger_rows
from fedtools.privacy.record import Row, close
from fedtools.privacy.releases import ReleasesOf
from fedtools.server.server import Release
from fedtools.tasks.rescore.clients import Clients


class Protection:
    """What stands between clients' counts and what is known of them.

    Args:
        clients: whose counts they are.
        releases: bounds and noise.
    """

    def __init__(self, clients: Clients, releases: ReleasesOf):
        self.releases, self._clients = releases, clients
        self._experiment = clients.experiment

    def release(self, number: int) -> Release:
        """What the server makes known of the sum of a round's counts."""
        method, u = self._clients.method, self._clients.lists.background
        return lambda total: method.release(total, number, u, self.releases)

    def closed(self, number: int, clients: Sequence[str]) -> None:
        """A round is complete: its releases are not made again."""
        close(self._experiment.at_server(number))
        for client in clients:
            close(self._experiment.own(client, number))

    def released(self) -> set[tuple[str, Row]]:
        """What was released, by sender; by copies of the experiment too."""
        return self.releases.rows(self._experiment.clients)

    def ledger(self, released: Iterable[tuple[str, Row]]) -> list[dict[str, str]]:
        """What releases cost whom: rows of `fedtools.privacy.ledger`.

        Args:
            released: as `released` gives it.
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
        """Utterance -> client, of all that clients count."""
        return self._clients.owners
