"""Sites: who holds the data of which clients.

    EXP/sites.tsv    client and site, in the order of clients.txt; one of the fixed files

A job of a round is a site, whether or not any of its clients takes part: its number is the site's
place in C order. Clients of different sites never train in one unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedtools.core.errors import UserError, some
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.datadir import byte_order, check_id

FILE = "sites.tsv"
COLUMNS = ("client", "site")


def read_sites(path: Path, clients: Sequence[str]) -> dict[str, str]:
    """Read the site of each client, in the order of the clients.

    Raises:
        UserError: if a client has no site, or several, or a row is not of a client.
    """
    found: dict[str, str] = {}
    known = set(clients)
    for line, row in enumerate(read_tsv(path, COLUMNS), 2):
        client, site = check_id(row["client"], "client", path, line), row["site"]
        check_id(site, "site", path, line)
        if client not in known:
            raise UserError(f"{client} is no client of the training data", path=path, line=line)
        if client in found:
            raise UserError(f"{client} came before", path=path, line=line)
        found[client] = site
    if missing := [client for client in clients if client not in found]:
        raise UserError(f"no site of {some(missing)}", path=path, remedy="add a row for each")
    return {client: found[client] for client in clients}


def write_sites(path: Path, sites: Mapping[str, str]) -> None:
    """Write the table of clients and their sites."""
    write_tsv(path, COLUMNS, [{"client": one, "site": site} for one, site in sites.items()])


def names_of(sites: Mapping[str, str]) -> list[str]:
    """Return the sites, in the order of their jobs."""
    return byte_order(set(sites.values()))


def by_site(sites: Mapping[str, str], clients: Iterable[str]) -> dict[str, list[str]]:
    """Return the clients of each site that has any of them; none without sites."""
    found: dict[str, list[str]] = {}
    for client in clients if sites else ():
        found.setdefault(sites[client], []).append(client)
    return found
