"""Files that clients wrote, opened in such a way that exactly the checked content is used.

A client may replace its file at any time, by a link, a pipe, or other bytes. So a file is opened
without following links, must be regular and have no second name (a hard link would let a client
send a file that is not its own), and has a seal by which it is recognised when it is opened again.
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedtools.core.atomic import sha256_of
from fedtools.core.errors import UserError
from fedtools.core.text_files import lines_of, open_input

# More than the longest line of a table: names have at most 200 characters.
_ROW_BYTES = 1280


class Seal(NamedTuple):
    """The identity of a file that was opened before, and has not been written to since.

    `changed` is the time of the last change in ns (ctime), which users cannot set.
    """

    device: int
    inode: int
    size: int
    changed: int


def seal_of(file: BinaryIO) -> Seal:
    """Return the seal of an open file."""
    status = os.fstat(file.fileno())
    return Seal(status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)


def open_received(path: str | Path, limit: int | None = None, seal: Seal | None = None) -> BinaryIO:
    """Open a client's file for reading bytes.

    Args:
        limit: the maximum size in bytes; None for any size.
        seal: the seal of the file when it was checked; None if it is opened for the first time.

    Raises:
        UserError: if it cannot be opened, is a link or no regular file, has a second name, is too
            large, or has changed since it was checked.
    """
    try:
        file = open_input(path, limit, "", os.O_NOFOLLOW)
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
    """Raise a `UserError` if an open file has changed since it was sealed."""
    if seal_of(file) != seal:
        raise UserError("changed while it was read", path=path)


def sum_of(path: str | Path, seal: Seal) -> str:
    """Return the SHA-256 of a client's file, in hexadecimal; raise a `UserError` if it changed."""
    with open_received(path, seal=seal) as file:
        digest = sha256_of(file)
        check_seal(file, seal, path)
    return digest


def received_lines(path: str | Path, rows: int, seal: Seal | None = None) -> tuple[list[str], Seal]:
    """Read the lines of a client's table of at most `rows` rows, and the file's seal.

    Args:
        seal: as in `open_received`.

    Raises:
        UserError: as in `open_received` and `fedtools.core.text_files.read_lines`.
    """
    with open_received(path, seal=seal) as file:
        seal = seal_of(file)
        if seal.size > _ROW_BYTES * (rows + 64):
            raise UserError(f"too long for a table of {rows} rows", path=path)
        # No more than its size when it was opened: the client may still be writing.
        lines = list(lines_of(BytesIO(file.read(seal.size)), path))
        check_seal(file, seal, path)
    return lines, seal
