"""The public keys of all clients, for secure sums in an experiment without sites.

    EXP/client_keys.tsv   client and public key (64 hexadecimal digits); one of the fixed files

Each client has made its key for itself; clients in one place may have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.core.tables import write_tsv
from fedtools.exchange.signed import read_public_keys

FILE = "client_keys.tsv"
COLUMNS = ("client", "key")


def read_client_keys(path: Path, clients: Sequence[str] | None = None) -> dict[str, str]:
    """Read the public key of each client, in the order of the table.

    Args:
        clients: those that it must have, all of them and no other; None takes any.

    Raises:
        UserError: naming the line, if a row is duplicated, malformed or of no client; or if one is
            missing.
    """
    known = None if clients is None else set(clients)
    found = read_public_keys(path, COLUMNS, known, distinct=False)
    if missing := [name for name in clients or () if name not in found]:
        remedy = "add what fedtools client-keys prints there"
        raise UserError(f"no key of {missing[0]}", path=path, remedy=remedy)
    return found


def write_client_keys(path: Path, keys: Mapping[str, str]) -> None:
    """Write the table of clients' public keys."""
    write_tsv(path, COLUMNS, [{"client": name, "key": key} for name, key in keys.items()])
