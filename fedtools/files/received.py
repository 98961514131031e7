"""Files that clients wrote: opened so that what was checked is what is used.

A client may put anything in place of its file, at any time: a link, a pipe, other bytes. So a file
is opened without following links, must be regular and have no second name (a hard link would let a
client send a file that is not its own), and has a seal by which it is known when it is opened
again.
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedtools.files.atomic import sha256_of
from fedtools.files.errors import UserError
from fedtools.files.text_files import lines_of, open_input

# Lines of tables are far shorter: names are at most 200 characters long.
_ROW_BYTES = 1024


class Seal(NamedTuple):
    """What tells that a file is the very one that was opened before, and was not written since.

    `changed` is the time of the last change, ns, which nobody can set.
    """

    device: int
    inode: int
    size: int
    changed: int


def seal_of(file: BinaryIO) -> Seal:
    """The seal of an open file."""
    status = os.fstat(file.fileno())
    return Seal(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def open_received(path: str | Path, limit: int | None = None, seal: Seal | None = None) -> BinaryIO:
    """Open a client's file for reading bytes.

    Args:
        limit: the most bytes that it may have; None for any number.
        seal: of the file as it was checked; None where it is opened for the first time.

    Raises:
        UserError: if it cannot be opened, is a link or no regular file, has a second name, is too
            large, or is not as it was checked.
    """
    try:
        file = open_input(path, limit, flags=os.O_NOFOLLOW)
    except UserError:
        if Path(path).is_symlink():
            raise UserError("a symbolic link, which is not followed", path=path) from None
        raise
    problem = ""
    if (names := os.fstat(file.fileno()).st_nlink) != 1:
        problem = f"a file of {names} names, which may be somebody else's"
    elif seal is not None and seal_of(file) != seal:
        problem = "changed after it was checked"
    if problem:
        file.close()
        raise UserError(problem, path=path)
    return file


def check_seal(file: BinaryIO, seal: Seal, path: str | Path) -> None:
    """Fail with a `UserError` if an open file is not as it was any more."""
    if seal_of(file) != seal:
        raise UserError("changed while it was read", path=path)


def sum_of(path: str | Path, seal: Seal) -> str:
    """The SHA-256 of a client's file, in hexadecimal; a `UserError` if it is not as it was."""
    with open_received(path, seal=seal) as file:
        digest = sha256_of(file)
        check_seal(file, seal, path)
    return digest


def received_lines(path: str | Path, rows: int, seal: Seal | None = None) -> tuple[list[str], Seal]:
    """The lines of a table of at most so many rows that a client wrote, and the file's seal.

    Args:
        seal: as of `open_received`.

    Raises:
        UserError: as of `open_received` and `fedtools.files.text_files.read_lines`.
    """
    with open_received(path, seal=seal) as file:
        seal = seal_of(file)
        if seal.size > _ROW_BYTES * (rows + 64):
            raise UserError(f"too long for a table of {rows} rows", path=path)
        # No more than it had: a client may write on.
        lines = list(lines_of(BytesIO(file.read(seal.size)), path))
        check_seal(file, seal, path)
    return lines, seal
