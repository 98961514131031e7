"""What a federation knows of each client: the size of its data, and what its task adds.

    EXP/facts.tsv    with sites: the values of all clients, fixed when the experiment begins

The server reads no other fact of a client's data, so that a federation between sites needs none of
the data at the server. A site's capsule has the rows of its own clients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.core.tables import number, read_tsv, write_tsv

FILE = "facts.tsv"


@dataclass(frozen=True)
class ClientFacts:
    """Values of clients.

    Attributes:
        clients: their names, in C order.
        values: name -> (clients,); "size" is the number of clips or utterances, and with clips
            "steps" that of gradient steps in a round, and "entropy" that of the labels, divided by
            log(classes).
    """

    clients: Sequence[str]
    values: Mapping[str, np.ndarray]

    @staticmethod
    def read(path: Path) -> ClientFacts:
        """Read a table that `write` has written."""
        rows = read_tsv(path, None)
        names = [name for name in (rows[0] if rows else {}) if name != "client"]
        values = {}
        for name in names:
            whole = all(row[name].isdecimal() for row in rows)
            found = [number(row, name, path, line) for line, row in enumerate(rows, 2)]
            values[name] = np.array(found, np.int64 if whole else np.float64)
        return ClientFacts([row["client"] for row in rows], values)

    def write(self, path: Path, clients: Iterable[str] | None = None) -> None:
        """Write the values of some clients, by default all, with all their digits."""
        chosen = set(self.clients if clients is None else clients)
        rows = [
            {"client": client, **{name: one[place].item() for name, one in self.values.items()}}
            for place, client in enumerate(self.clients)
            if client in chosen
        ]
        write_tsv(path, ("client", *self.values), rows)

    def same(self, other: ClientFacts) -> bool:
        """Return whether others have the same clients and values."""
        names = self.values.keys()
        return (
            [*self.clients] == [*other.clients]
            and names == other.values.keys()
            and all(np.array_equal(self.values[name], other.values[name]) for name in names)
        )

    def value(self, name: str, client: str) -> int:
        """Return a whole number of one client, as `select` does."""
        place = bisect_left(self.clients, client)
        if self.clients[place : place + 1] == [client]:
            return int(self.values[name][place])
        return int(self.values[name].max()) if name == "steps" else 0

    def select(self, clients: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the values of some clients: name -> (clients,).

        A client without clips has the largest number of steps, and zeros otherwise.
        """
        places = np.array([bisect_left(self.clients, client) for client in clients], int)
        there = np.array(
            [self.clients[at : at + 1] == [one] for at, one in zip(places, clients, strict=True)]
        )
        last = len(self.clients) - 1
        found = {
            name: np.where(there, values[np.minimum(places, last)], 0).astype(values.dtype)
            for name, values in self.values.items()
        }
        if not there.all():
            found["steps"] = np.where(there, found["steps"], self.values["steps"].max())
        return found
