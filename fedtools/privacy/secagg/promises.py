"""What clients have bound themselves to: in each round one attempt, and one list of survivors.

Training repeats byte for byte, so that a client has the same vector in every attempt at a round. If
some clients unmasked a sum over S, and others, in a second attempt, one over S without u, the
difference would be u's vector. It is not enough that those who unmasked refuse: others, which had
only signed, could make up the second sum. So a client is bound when it *signs*. That list it may
unmask more than once, as after a kill: what it answers is the same.

The file has a row for each round, which is on the disk before what it promises leaves, and is
shared by all clients whose keys are in one place:

    experiment  round  session  list

The digests of the attempt and of the list are in hexadecimal. A file that is lost, or put back from
an older copy, loses promises: it belongs beside the keys, and in no backup.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedtools.core.errors import UserError
from fedtools.core.locks import lock
from fedtools.core.tables import count, read_tsv, write_tsv
from fedtools.privacy.secagg.session import DIGEST_BYTES, Session

COLUMNS = ("experiment", "round", "session", "list")


class _Promise(NamedTuple):
    session: bytes
    listed: bytes


class Promises:
    """The lists of survivors that clients have signed.

    Args:
        path: the file, in a folder that exists; None keeps them in memory. Other processes may use
            the same file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._kept: dict[tuple[str, int], _Promise] = {}

    def check(self, session: Session) -> None:
        """Raise a `UserError` if another attempt at the round was signed."""
        with self._held():
            self._check(session)

    def signed(self, label: str, round: int) -> bool:
        """Return whether a list was signed in a round, which then is not done again."""
        with self._held():
            return (label, round) in self._kept

    def sign(self, session: Session, digest: bytes) -> None:
        """Bind the client to a list, before its signature leaves it.

        Args:
            digest: of the list.

        Raises:
            UserError: as in `check`, or if it has signed another list.
        """
        with self._held():
            before = self._check(session)
            if before is None:
                self._keep(session, _Promise(session.digest, digest))
            elif before.listed != digest:
                problem = f"in round {session.round} another list of survivors was signed"
                raise UserError(problem)

    def check_signed(self, session: Session, digest: bytes) -> None:
        """Raise a `UserError` unless this list was signed, before anything of it is unmasked."""
        with self._held():
            before = self._check(session)
        if before is None or before.listed != digest:
            problem = f"in round {session.round} this list of survivors was not signed here"
            raise UserError(problem)

    def _check(self, session: Session) -> _Promise | None:
        """Return what was signed in this attempt; raise a `UserError` as `check` does."""
        before = self._kept.get((session.label, session.round))
        if before is None:
            return None
        if before.session != session.digest:
            problem = f"in round {session.round} another attempt than {session.attempt} was signed"
            raise UserError(problem, remedy="finish that one")
        return before

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the file, with what is in it now."""
        if self._path is None:
            yield
            return
        with lock(self._path.parent, self._path.name, wait=True):
            self._kept = read_promises(self._path) if self._path.exists() else {}
            yield

    def _keep(self, session: Session, promise: _Promise) -> None:
        self._kept[session.label, session.round] = promise
        if self._path is not None:
            rows = (
                dict(zip(COLUMNS, (*where, one.session.hex(), one.listed.hex()), strict=True))
                for where, one in self._kept.items()
            )
            write_tsv(self._path, COLUMNS, rows)
            # The file's new name is only on the disk when its folder is.
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def read_promises(path: Path) -> dict[tuple[str, int], _Promise]:
    """Return the promises in a file, by experiment and round.

    Raises:
        UserError: naming the line, if one is malformed: it might be one that must be kept.
    """
    found: dict[tuple[str, int], _Promise] = {}
    for line, row in enumerate(read_tsv(path, COLUMNS), 2):
        where = row["experiment"], count(row, "round", path, line)
        if where in found:
            raise UserError(f"round {where[1]} is duplicated", path=path, line=line)
        session, listed = (_digest(row, name, path, line) for name in ("session", "list"))
        found[where] = _Promise(session, listed)
    return found


def _digest(row: Mapping[str, str], name: str, path: Path, line: int) -> bytes:
    text = row[name]
    if not re.fullmatch(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}", text):
        problem = f"{name} is {text[:70]!r}, not {2 * DIGEST_BYTES} hexadecimal digits"
        raise UserError(problem, path=path, line=line)
    return bytes.fromhex(text)
