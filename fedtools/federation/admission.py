"""A site's check of a capsule, before it uses anything in the folder.

    CAPSULE/admitted    an `Admitted`, once only the server's files were there; signed with the
                        site's key if there is a roster: admitted.sig

A site keeps in its capsule what it answers with, and what its clients keep. Whoever carries a
capsule could put such files there, and the site would sign them as its own.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.core.atomic import sha256
from fedtools.core.errors import UserError
from fedtools.core.untrusted import open_received
from fedtools.exchange.experiment import LOCAL, ORIGIN, Experiment
from fedtools.exchange.signed import (
    SERVER,
    key_for,
    read_signed,
    read_statement,
    signature_of,
    write_statement,
)
from fedtools.exchange.sites import names_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ADMITTED = "admitted"
_SUMS = "sha256sums"
# Of a capsule: far more than any task has.
_MOST_FILES, _SUM_BYTES = 100, 512
# A plain name; the one file that is in a folder; and what a site writes itself.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_START = "round_0001/global.safetensors"
_OWN = (ADMITTED, LOCAL)
_AGAIN = "ask the server for the capsule again"


@dataclass(frozen=True)
class Admitted:
    """What a site states for itself about its capsule.

    Attributes:
        capsule: SHA-256 of the capsule's sha256sums.
        files: none.
    """

    capsule: str
    files: dict[str, str]


def check_there(capsule: Path) -> None:
    """Raise a `UserError` unless a folder looks like a capsule, and can be locked."""
    sums = capsule / _SUMS
    if not os.path.lexists(sums):
        raise UserError("no capsule here", path=capsule, remedy="name the folder of fedtools site")
    with open_received(sums, _MOST_FILES * _SUM_BYTES), open_received(capsule / "config.yaml"):
        pass
    for path in (capsule / ".locks", *capsule.glob(".locks/*")):
        if path.is_symlink():
            raise UserError("a symbolic link in a capsule", path=path, remedy=_AGAIN)


def admit(capsule: Path, key_path: Path | None) -> tuple[Experiment, Ed25519PrivateKey | None]:
    """Return the experiment of a capsule, and the site's key.

    Args:
        capsule: the folder; the caller holds its lock.
        key_path: the site's private key, if the experiment has a roster.

    Raises:
        UserError: if it is no capsule of one site, the server has not signed it, the key is not the
            site's, or at its first use it has a file of which the server has not stated the sum.
    """
    experiment = Experiment(capsule)
    sums, roster = experiment.sums, experiment.roster
    if ORIGIN not in sums:
        remedy = "make one by fedtools site, and use that"
        raise UserError("a whole experiment, no capsule of a site", path=capsule, remedy=remedy)
    if roster:
        read_signed(capsule / _SUMS, SERVER, roster, len(sums))
    for name in sums:
        if name != _START and (not _NAME.fullmatch(name) or name in _OWN):
            raise UserError(f"{name!r} is no file of a capsule", path=capsule / _SUMS)
    sites = names_of(experiment.sites)
    if len(sites) != 1:
        problem = f"a capsule of {len(sites)} sites, not of one"
        raise UserError(problem, path=capsule, remedy=_AGAIN)
    key = key_for(key_path, roster, sites[0])
    if not _is_admitted(capsule, sites[0], roster):
        _check_new(capsule, {*sums})
        fields = {"capsule": sha256(capsule / _SUMS)}
        write_statement(capsule / ADMITTED, fields, (), key)
    return experiment, key


def _is_admitted(capsule: Path, site: str, roster: Mapping[str, str]) -> bool:
    """Return whether the site has admitted this capsule before."""
    try:
        known = read_statement(Admitted, capsule / ADMITTED, site, roster, 0)
    except UserError:
        return False
    return known.capsule == sha256(capsule / _SUMS)


def _check_new(capsule: Path, names: set[str]) -> None:
    """Raise a `UserError` if a capsule has what the server has not put there."""
    sums = capsule / _SUMS
    known = names | {_SUMS, signature_of(sums).name, ".locks", ".locks/rounds"}
    # Those of a site that was killed before it had admitted the capsule.
    known |= {ADMITTED, f"{ADMITTED}.sig"}
    folders = {str(Path(name).parent) for name in known}
    for name, mode, links in _found(capsule):
        plain = stat.S_ISREG(mode) and links == 1
        if name in known | folders and not (stat.S_ISDIR(mode) if name in folders else plain):
            raise UserError("a link, or no regular file", path=capsule / name, remedy=_AGAIN)
        if name not in known | folders and not (plain and name.startswith(f".{ADMITTED}.")):
            problem = "in the capsule, but not one of the files that the server has put there"
            remedy = f"remove it, or {_AGAIN}"
            raise UserError(problem, path=capsule / name, remedy=remedy)


def _found(capsule: Path, below: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield name, mode and number of links of all that is below a folder; links are not followed.

    A folder comes before what is in it, so that only folders of a capsule are ever listed.
    """
    with os.scandir(capsule / below) as entries:
        found = sorted(entries, key=lambda one: one.name)
    for entry in found:
        status, name = entry.stat(follow_symlinks=False), f"{below}{entry.name}"
        yield name, status.st_mode, status.st_nlink
        if stat.S_ISDIR(status.st_mode):
            yield from _found(capsule, f"{name}/")
