"""Input files from outside: they must be regular, of bounded size, in UTF-8, and without NUL.

A byte order mark at the beginning of a file is not part of its text; anywhere else, where it would
be an invisible part of a word, it is an error.
"""

from __future__ import annotations

import codecs
import os
import shlex
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from fedtools.core.errors import UserError

# Far above any useful size; a larger file is some other file, and would only fill the memory.
SMALL_FILE = 16 << 20
TABLE = 1 << 30

_BLOCK = 1 << 20
# What a clone without Git LFS has in place of a large file.
_POINTER, _POINTER_SIZE = b"version https://git-lfs.github.com/spec/", 1024
_MARK = codecs.BOM_UTF8
_WITHOUT_MARK = "remove it with: LC_ALL=C sed -i 's/\\xEF\\xBB\\xBF//g' {}"
# Longer marks first: the mark of UTF-32 begins like that of UTF-16.
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def open_input(
    path: str | Path, limit: int | None = None, remedy: str | None = None, flags: int = 0
) -> BufferedReader:
    """Open a file for reading bytes, without waiting for the writer of a FIFO.

    Args:
        path: a regular file, or a link to one.
        limit: the maximum size in bytes; None for any size.
        remedy: what to do about a missing, irregular or too large file.
        flags: additional flags of `os.open`.

    Raises:
        UserError: if it cannot be opened, is not a regular file, is too large, or is a Git LFS
            pointer in its place.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except (OSError, ValueError) as error:
        # A ValueError is raised for a name that no file can have.
        reason = getattr(error, "strerror", None) or error
        remedy = _remedy(Path(path), error) if remedy is None else remedy
        raise UserError(f"cannot be read: {reason}", path=path, remedy=remedy) from None
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "cannot be read: not a regular file"
        if stat.S_ISDIR(status.st_mode):
            remedy = "name a file in this folder" if remedy is None else remedy
    elif limit is not None and status.st_size > limit:
        problem = f"{status.st_size} bytes, more than {limit}"
    elif status.st_size < _POINTER_SIZE:
        try:
            if os.pread(descriptor, _BLOCK, 0).startswith(_POINTER):
                problem = "a Git LFS pointer, not the file itself"
                remedy = "run in its repository: git lfs install && git lfs pull"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
    if problem:
        os.close(descriptor)
        raise UserError(problem, path=path, remedy=remedy)
    return BufferedReader(_Named(descriptor, path))


class _Named(FileIO):
    """A file that names itself in errors of reading, which otherwise are those of another file."""

    def __init__(self, descriptor: int, path: str | Path):
        super().__init__(descriptor, "rb")
        self._path = path

    def readinto(self, buffer: Any) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            error.filename = str(self._path)
            raise

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            error.filename = str(self._path)
            raise


def _remedy(path: Path, error: Exception) -> str | None:
    """Return what to do about a file that cannot be opened."""
    if isinstance(error, PermissionError):
        return "ask its owner for the right to read it"
    if not isinstance(error, FileNotFoundError):
        return None
    return "check its name" if path.parent.is_dir() else f"{path.parent} is not there either"


def read_bytes(path: str | Path, limit: int = SMALL_FILE, remedy: str | None = None) -> bytes:
    """Read the content of a file; arguments and errors as in `open_input`."""
    with open_input(path, limit, remedy) as file:
        return file.read()


def read_text(
    path: str | Path,
    limit: int = SMALL_FILE,
    remedy: str | None = None,
    may_be_marked: bool = True,
) -> str:
    """Read the content of a UTF-8 file; arguments and errors as in `open_input` and `decode`."""
    raw = read_bytes(path, limit, remedy)
    return decode(raw, path, remedy, may_be_marked=may_be_marked)


def decode(
    raw: bytes,
    path: str | Path,
    remedy: str | None = None,
    first_line: int = 1,
    may_be_marked: bool = True,
) -> str:
    """Decode bytes of a UTF-8 file, which begin at line `first_line`.

    Args:
        may_be_marked: whether the file may begin with a byte order mark, which is then removed.

    Raises:
        UserError: naming file and line, if they are not UTF-8, or have a NUL, or a byte order mark
            anywhere else.
    """
    size = len(raw)
    if may_be_marked and first_line == 1:
        raw = raw.removeprefix(_MARK)
    remedy = remedy or "convert the file"
    try:
        text, position = raw.decode("utf-8"), raw.find(b"\0")
        problem = "a NUL byte"
        if position < 0:
            position = raw.find(_MARK)
            at_start = first_line == 1 and position == 0
            byte = f"at the beginning of the file, byte {size - len(raw)}"
            where = byte if at_start else "within the text"
            problem = f"a byte order mark (U+FEFF) {where}"
            remedy = _WITHOUT_MARK.format(shlex.quote(str(path)))
    except UnicodeDecodeError as error:
        text, position = "", error.start
        problem = "not UTF-8"
        if first_line == 1 and (name := other_encoding(raw)):
            problem, remedy = f"{name}, not UTF-8", f"convert it with: iconv -f {name} -t UTF-8"
    if position >= 0:
        line = first_line + raw.count(b"\n", 0, position)
        raise UserError(problem, path=path, line=line, remedy=remedy)
    return text


def other_encoding(beginning: bytes) -> str:
    """Return the encoding, other than UTF-8, that a file's byte order mark names; "" for none."""
    return next((name for mark, name in _OTHER_MARKS.items() if beginning.startswith(mark)), "")


def read_lines(
    path: str | Path, remedy: str | None = None, may_be_marked: bool = True
) -> list[str]:
    """Read the lines of a UTF-8 file; arguments and errors as in `stream_lines`."""
    return list(stream_lines(path, remedy, may_be_marked))


def stream_lines(
    path: str | Path, remedy: str | None = None, may_be_marked: bool = True
) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, without line ends; only "\\n" ends a line.

    The file is read in blocks, one of which is in memory at a time.

    Args:
        path: the file; the last line must have a line end.
        remedy: what to do about a file that is missing or not a text.
        may_be_marked: see `decode`.

    Raises:
        UserError: if the file cannot be read, is not UTF-8, has a NUL, or is cut off; raised after
            all lines before the faulty one.
    """
    with open_input(path, TABLE, remedy) as file:
        yield from lines_of(file, path, remedy, may_be_marked)


def lines_of(
    file: BinaryIO, path: str | Path, remedy: str | None = None, may_be_marked: bool = True
) -> Iterator[str]:
    """Yield the lines of an open file; arguments and errors as in `stream_lines`."""
    number = 1
    while block := file.read(_BLOCK):
        block += file.readline()
        # Not splitlines(), which also splits at characters that may be part of a word.
        try:
            lines = decode(block, path, remedy, number, may_be_marked).split("\n")
        except UserError:
            # Find the first faulty line, so that the error does not depend on the blocks.
            for line, raw in enumerate(block.split(b"\n"), number):
                yield decode(raw, path, remedy, line, may_be_marked)
            raise
        rest = lines.pop()
        yield from lines
        number += len(lines)
        if rest:
            remedy = "file cut off?"
            raise UserError("the last line has no end", path=path, line=number, remedy=remedy)


def read_words(path: str | Path, remedy: str | None = None) -> list[str]:
    """Read a list of distinct words, one per line; errors as in `read_lines`, and if empty."""
    seen: dict[str, None] = {}
    for line, word in enumerate(stream_lines(path, remedy), 1):
        if "\r" in word:
            raise UserError("carriage return", path=path, line=line, remedy="run dos2unix")
        if word in seen or word.split() != [word]:
            problem = "is duplicated" if word in seen else "is not one word"
            raise UserError(f"{word!r} {problem}", path=path, line=line, remedy=remedy)
        seen[word] = None
    if not seen:
        raise UserError("empty", path=path, remedy=remedy)
    return list(seen)
