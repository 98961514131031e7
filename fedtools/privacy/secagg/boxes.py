"""Files with the messages of several clients, or with what the server has for them.

    for each client 4 bytes, its number in the session; 8, the length of what follows, high bytes
    first; the content

The index is checked before anything is read, so that a file is taken whole or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from fedtools.core.atomic import atomic_write
from fedtools.core.errors import UserError
from fedtools.core.untrusted import open_received
from fedtools.privacy.secagg.signed import NUMBER_BYTES

_LENGTH_BYTES = 8
_HEAD_BYTES = NUMBER_BYTES + _LENGTH_BYTES


class BoxWriter:
    """A box that is being written, one client after the other."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def put(self, number: int, content: bytes | memoryview) -> None:
        """Add what is of, or for, a client."""
        head = (number.to_bytes(NUMBER_BYTES, "big"), len(content).to_bytes(_LENGTH_BYTES, "big"))
        self._file.write(b"".join(head))
        self._file.write(content)


@contextmanager
def new_box(path: Path) -> Iterator[BoxWriter]:
    """Yield the writer of a box, which is in place when the block ends without an error."""
    with atomic_write(path, "wb") as file:
        yield BoxWriter(file)


def write_box(path: Path, contents: Mapping[int, bytes]) -> None:
    """Write a box, in the order of the clients' numbers."""
    with new_box(path) as box:
        for number in sorted(contents):
            box.put(number, contents[number])


def read_box(path: Path, clients: Collection[int], most: int) -> dict[int, bytes]:
    """Read a box whole; arguments and errors as in `open_box`."""
    return dict(open_box(path, clients, most))


def parse_box(content: bytes, path: Path, clients: Collection[int], most: int) -> dict[int, bytes]:
    """Return the entries of a box that was read; arguments and errors as in `open_box`."""
    return dict(_entries(BytesIO(content), path, clients, most))


def open_box(path: Path, clients: Collection[int], most: int) -> Iterator[tuple[int, bytes]]:
    """Yield each client's number and content, in the order of the file.

    Args:
        clients: the numbers of those that may have an entry.
        most: the largest length of an entry, in bytes.

    Raises:
        UserError: before anything is yielded, if the file is missing, not a regular file of its
            own, no box, or has an entry of another client or a second one; later, if it becomes
            shorter.
    """
    with open_received(path, box_bytes(len(clients), most)) as file:
        yield from _entries(file, path, clients, most)


def box_bytes(clients: int, most: int) -> int:
    """Return the largest size of a box with the entries of some clients, in bytes."""
    return clients * (_HEAD_BYTES + most)


def _entries(
    file: BinaryIO, path: Path, clients: Collection[int], most: int
) -> Iterator[tuple[int, bytes]]:
    for number, begin, size in _index(file, path, set(clients), most):
        file.seek(begin)
        content = file.read(size)
        if len(content) != size:
            raise UserError("changed while it was read", path=path)
        yield number, content


def _index(file: BinaryIO, path: Path, clients: set[int], most: int) -> list[tuple[int, int, int]]:
    """Return each entry's client, first byte and length."""
    end = file.seek(0, 2)
    found, at = dict[int, tuple[int, int]](), 0
    while at < end:
        file.seek(at)
        head = file.read(_HEAD_BYTES)
        number, size = int.from_bytes(head[:NUMBER_BYTES], "big"), head[NUMBER_BYTES:]
        begin, length, problem = at + _HEAD_BYTES, int.from_bytes(size, "big"), ""
        if len(head) < _HEAD_BYTES or begin + length > end:
            problem = "the file is truncated"
        elif number not in clients:
            problem = f"byte {at}: an entry of client {number}, which has none here"
        elif number in found:
            problem = f"byte {at}: a second entry of client {number}"
        elif length > most:
            problem = f"byte {at}: an entry of {length} bytes, and {most} are the most"
        if problem:
            raise UserError(problem, path=path)
        found[number], at = (begin, length), begin + length
    return [(number, *place) for number, place in found.items()]
