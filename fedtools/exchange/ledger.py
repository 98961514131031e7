"""The ledger: the costs of every client in every round, in bytes, epochs and seconds.

Each round has its own `round_0007/ledger.tsv`, written once, when the round is closed; the ledger
of an experiment is their sum. Seconds differ between runs, all other columns do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fedtools.core.errors import UserError
from fedtools.core.tables import count, number, read_tsv, write_tsv
from fedtools.data.datadir import check_id
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import OK

# The client column of the row for the server's own work; no client can have this name.
SERVER_ROW = "-"


class LedgerRow(NamedTuple):
    """One client, or the server, in one round.

    `bytes_down` and `bytes_up` are sizes of sent files, those of refused messages included; a
    refused client has 0 steps, epochs and seconds, because its own report does not count. `status`
    is OK, COLLAPSED, CAPPED, LARGE, OTHER, CLIPPED, LEFT_OUT, or the reason for which the client's
    message was refused. If the server trains, a client whose labels collapsed has a row without
    costs; if the data have no clients, that row is the server's. An `attacker` of an experiment
    with the section `attackers` has a mark after its status, which is for the experimenter: no rule
    reads ledgers.
    """

    round: int
    client: str
    bytes_down: int = 0
    bytes_up: int = 0
    steps: int = 0
    client_epochs: float = 0.0
    server_epochs: float = 0.0
    seconds: float = 0.0
    status: str = OK
    attacker: bool = False

    @property
    def marked(self) -> str:
        """Return the status as experimenters see it."""
        return (" ".join(self.status.split()) or OK) + _ATTACKER * self.attacker


COLUMNS = tuple(name for name in LedgerRow._fields if name != "attacker")
# At the end of an attacker's status.
_ATTACKER = " (attacker)"


def write_ledger(path: Path, rows: Sequence[LedgerRow]) -> None:
    """Write the rows of one round."""
    numbers = ("client_epochs", "server_epochs")
    write_tsv(
        path,
        COLUMNS,
        [
            {
                **{name: getattr(row, name) for name in COLUMNS},
                **{name: f"{getattr(row, name):g}" for name in numbers},
                "seconds": f"{row.seconds:.3f}",
                "status": row.marked,
            }
            for row in rows
        ],
    )


def read_ledger(experiment: Experiment) -> Iterator[LedgerRow]:
    """Yield the rows of all complete rounds, in order.

    Raises:
        UserError: naming file and line, if a file is missing or was changed, or a row is malformed.
    """
    for at in range(1, experiment.last_round() + 1):
        yield from read_round(experiment, at)


def read_round(experiment: Experiment, at: int) -> Iterator[LedgerRow]:
    """Yield the rows of one complete round; errors as in `read_ledger`."""
    experiment.round(at).check_ledger()
    path = experiment.round(at).ledger
    for line, row in enumerate(read_rows(path), 2):
        if row.round != at:
            raise UserError(f"{row.client!r} is of another round", path=path, line=line)
        yield row


def read_rows(path: Path, lines: Iterable[str] | None = None) -> Iterator[LedgerRow]:
    """Yield the rows of a table, each of another client; `lines` if they have been read."""
    seen: set[str] = set()
    for line, row in enumerate(read_tsv(path, COLUMNS, lines=lines), 2):
        client = row["client"]
        if client != SERVER_ROW:
            check_id(client, "client", path, line)
        if client in seen:
            raise UserError(f"{client!r} is duplicated", path=path, line=line)
        seen.add(client)
        at, down, up, steps = (count(row, name, path, line) for name in ("round", *COLUMNS[2:5]))
        theirs, ours, seconds = (number(row, name, path, line) for name in COLUMNS[5:8])
        status = row["status"].removesuffix(_ATTACKER)
        attacker = status != row["status"]
        yield LedgerRow(at, client, down, up, steps, theirs, ours, seconds, status, attacker)
