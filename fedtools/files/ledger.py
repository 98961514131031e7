"""The ledger: what every client of every round cost, in bytes, epochs and seconds.

`ledger.tsv` grows by one round at a time and is never rewritten, since an experiment may have a
million rows. A round is appended behind a "#" in the place of its first character; the character
itself is written last. So whatever follows a "#" is a round that a kill cut short: readers leave
it out, and the next append removes it.

Seconds differ between runs, so the ledger is no part of the promise that reruns give the same
bytes; all its other columns are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from fedtools.files.atomic import atomic_write
from fedtools.files.errors import UserError

# The client column of the row for the server's own work; no client can have this name.
SERVER_ROW = "-"


class LedgerRow(NamedTuple):
    """One client, or the server, in one round.

    `bytes_down` and `bytes_up` are sizes of files, not formulas. `status` is "ok", or the reason
    for which the client's update was refused.
    """

    round: int
    client: str
    bytes_down: int
    bytes_up: int
    client_epochs: float
    server_epochs: float
    seconds: float
    status: str


COLUMNS = LedgerRow._fields
_HEADER = "\t".join(COLUMNS).encode() + b"\n"


def append_round(path: str | Path, round: int, rows: Sequence[LedgerRow]) -> None:
    """Put a round's rows into the ledger, whole or not at all.

    Rows of the same round that are there already are replaced, so that a rerun doubles nothing.

    Args:
        path: the ledger, made if it is not there.
        round: the round.
        rows: its rows, in the order in which they shall stand.

    Raises:
        UserError: if the file there is no ledger.
        ValueError: if a row is of another round, or a client's name has a blank.
    """
    path = Path(path)
    block = "".join(_line(row, round) for row in rows).encode("utf-8")
    if not path.exists():
        with atomic_write(path, "wb") as file:
            file.write(_HEADER)
    with open(path, "r+b") as file:
        if file.readline() != _HEADER:
            raise UserError("this is no ledger", path=path, line=1, remedy="remove the file")
        position, followed = _place(file, round, path)
        if not followed:
            _append(file, position, block)
            return
    # Rounds after this one stay: a rare case, that may cost a rewriting of the file.
    others = [row for row in read_ledger(path) if row.round != round]
    with atomic_write(path, "wb") as file:
        file.write(_HEADER)
        for row in sorted([*others, *rows], key=lambda row: row.round):
            file.write(_line(row, row.round).encode("utf-8"))


def read_ledger(path: str | Path) -> Iterator[LedgerRow]:
    """Read a ledger row by row, leaving out a round whose writing was cut short.

    Raises:
        UserError: naming file and line, if the file is missing, no ledger, or a row is malformed.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            yield from _rows(file, path)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path=path) from None


def _rows(file: IO[bytes], path: Path) -> Iterator[LedgerRow]:
    if file.readline() != _HEADER:
        raise UserError("this is no ledger", path=path, line=1, remedy="remove the file")
    for number, line in enumerate(file, 2):
        if line.startswith(b"#") or not line.endswith(b"\n"):
            return
        yield _row(line, path, number)


def _line(row: LedgerRow, round: int) -> str:
    if row.round != round or row.client.split() != [row.client]:
        raise ValueError(f"not a row of round {round}: {row}")
    status = " ".join(row.status.split()) or "ok"
    numbers = (row.bytes_down, row.bytes_up, f"{row.client_epochs:g}", f"{row.server_epochs:g}")
    return "\t".join(map(str, (round, row.client, *numbers, f"{row.seconds:.3f}", status))) + "\n"


def _row(line: bytes, path: Path, number: int) -> LedgerRow:
    try:
        round, client, down, up, ours, servers, seconds, status = line.decode().split("\t")
        counts = int(round), client, int(down), int(up)
        return LedgerRow(*counts, float(ours), float(servers), float(seconds), status.rstrip("\n"))
    except ValueError:
        raise UserError("malformed row", path=path, line=number, remedy="mend the line") from None


def _place(file: IO[bytes], round: int, path: Path) -> tuple[int, bool]:
    """The byte after the last row of an earlier round, and whether rows of later rounds follow.

    The file is read backwards, as far as is needed: its end is where a round belongs.
    """
    size = file.seek(0, os.SEEK_END)
    span = 1 << 16
    while True:
        begin = max(0, size - span)
        file.seek(begin)
        # The first line of a tail is a part of a line, or the line before is not known.
        lines = file.read().splitlines(keepends=True)[1:]
        place, followed, position = None, False, size - sum(map(len, lines))
        if begin == 0:
            place = position
        for line in lines:
            if line.startswith(b"#") or not line.endswith(b"\n"):
                break
            position += len(line)
            try:
                this = int(line.split(b"\t", 1)[0])
            except ValueError:
                raise UserError("malformed row", path=path, remedy="mend the last rows") from None
            followed |= this > round
            if this < round:
                place = position
        if place is not None:
            return place, followed
        span *= 4


def _append(file: IO[bytes], position: int, block: bytes) -> None:
    file.truncate(position)
    if block:
        file.seek(position)
        file.write(b"#" + block[1:])
        file.flush()
        os.fsync(file.fileno())
        os.pwrite(file.fileno(), block[:1], position)
    os.fsync(file.fileno())
