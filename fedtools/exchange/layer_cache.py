"""Outputs of a model's frozen layers, computed once for a model and its data.

    DATA/frozen/<data>.<model>.npy            for a whole data set, such as all clients' clips
    DATA/frozen/<owner>/<data>.<model>.npy    for the utterances of one client, or of one speaker
    .../<data>.<model>.sums                   first row, last row + 1 and sum of each part

They lie beside the data, so that all experiments on these data share them. Each file is an array in
numpy's format, whose first dimension counts clips, or positions with all utterances end to end. Its
name has a hash of the data, and one of all else that the values depend on: model, layers, batches
and number format. A sum is the SHA-256 of that name, the owner and the values, so that no file
passes for another. Outputs of data that were replaced are removed.

Parts are written one by one, each followed by its line of sums, so that after a kill the same
command goes on with the next part; the file is complete if its parts are. A part is compared with
its sum when a process first reads it. The files may be removed while nothing runs: missing ones are
computed again, with the same values.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np

from fedtools.core.atomic import remove, write_lines
from fedtools.core.errors import UserError
from fedtools.core.locks import lock

_FOLDER, _DIGITS = "frozen", 16
# To be increased whenever the computation changes.
_VERSION = 3
# Each mapped file takes a file descriptor.
_MAPPED = 128
_LINE = re.compile(r"([0-9]{1,15}) ([0-9]{1,15}) ([0-9a-f]{64})\n")
_REMEDY = "remove it, and run the same command again"

# First row and last row + 1.
Part = tuple[int, int]
# The batches still to compute -> the values of each of their parts, in order.
Compute = Callable[[Sequence[Sequence[Part]]], Iterable[Sequence[np.ndarray]]]


@dataclass(frozen=True)
class Place:
    """The location, shape and type of outputs.

    Attributes:
        folder: where the file lies.
        data, model: hashes of all that the values depend on.
        shape: rows first.
        dtype: numpy's name of the type.
    """

    folder: Path
    data: str
    model: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def path(self) -> Path:
        """Return the path of the array."""
        return self.folder / f"{self.data}.{self.model}.npy"

    @property
    def sums(self) -> Path:
        """Return the path of the table of sums."""
        return self.path.with_suffix(".sums")

    @property
    def size(self) -> int:
        """Return the size of the values in bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def is_complete(self) -> bool:
        """Return whether all parts are there; their values are not read."""
        return self.path.is_file() and _rows(read_parts(self.sums)) == self.shape[0]

    def make(self, batches: Sequence[Sequence[Part]], compute: Compute) -> None:
        """Compute and write what is missing; wait for another process that does so.

        Args:
            batches: the parts of each batch; together they hold every row once.
            compute: computes the values of some of the batches.

        Raises:
            ValueError: if the parts do not hold every row once.
        """
        if self.is_complete():
            return
        parts = sorted(part for batch in batches for part in batch)
        edges = [0, *(last for _, last in parts)]
        if [first for first, _ in parts] != edges[:-1] or edges[-1] != self.shape[0]:
            raise ValueError(f"parts do not hold each of {self.shape[0]} rows once")
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder, self.path.stem, wait=True):
            if self.is_complete():
                return
            self._remove_outdated()
            done = self._take_up()
            left = [batch for batch in batches if not done.keys() >= set(batch)]
            try:
                if left:
                    self._write(left, compute)
            except OSError as error:
                # On a full disk, the system does not name the file.
                error.filename = error.filename or str(self.path)
                raise

    def _remove_outdated(self) -> None:
        """Remove outputs for other data, which were here before these."""
        for path in self.folder.iterdir():
            if re.fullmatch(rf"(?!{self.data})[0-9a-f]+\.[0-9a-f]+\.(npy|sums)", path.name):
                remove(path)

    def _take_up(self) -> dict[Part, str]:
        """Return the parts that a killed process has left, and make the files hold no others."""
        header = self.header
        done: dict[Part, str] = {}
        if self.path.is_file():
            with open(self.path, "rb") as file:
                if file.read(len(header)) == header:
                    for (first, last), digest in read_parts(self.sums).items():
                        file.seek(len(header) + first * self._width)
                        values = file.read((last - first) * self._width)
                        if self.sum_of(values) == digest:
                            done[first, last] = digest
        if not done:
            # First the sums, or they would stand for values that are not there.
            remove(self.sums)
            self.path.write_bytes(header)
        write_lines(self.sums, (_line(part, digest).rstrip() for part, digest in done.items()))
        return done

    def _write(self, batches: Sequence[Sequence[Part]], compute: Compute) -> None:
        begin = len(self.header)
        # Not through a memory map: on a full disk, that would kill the process.
        with open(self.path, "r+b") as file, open(self.sums, "a", encoding="ascii") as sums:
            for batch, found in zip(batches, compute(batches), strict=True):
                for (first, last), part in zip(batch, found, strict=True):
                    if part.shape != (last - first, *self.shape[1:]):
                        raise ValueError(f"rows {first} to {last - 1} have shape {part.shape}")
                    values = np.ascontiguousarray(part, self.dtype).data
                    file.seek(begin + first * self._width)
                    file.write(values)
                    file.flush()
                    sums.write(_line((first, last), self.sum_of(values)))
                sums.flush()
            os.fsync(file.fileno())
            os.fsync(sums.fileno())

    def sum_of(self, values: bytes | memoryview) -> str:
        """Return the sum of a part's values at this place."""
        digest = hashlib.sha256(f"{self.folder.name}/{self.path.stem}\n".encode())
        digest.update(values)
        return digest.hexdigest()

    @property
    def header(self) -> bytes:
        """Return the beginning of the file, before the first row."""
        file, kind = BytesIO(), np.dtype(self.dtype).str
        description = {"descr": kind, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(file, description)
        return file.getvalue()

    @property
    def _width(self) -> int:
        """Return the size of a row in bytes."""
        return self.size // max(self.shape[0], 1)

    def open(self) -> Outputs:
        """Map the file; raise a `UserError` if it is missing or damaged."""
        try:
            status = [path.stat() for path in (self.path, self.sums)]
            return _opened(self, tuple((one.st_ino, one.st_mtime_ns) for one in status))
        except (OSError, ValueError):
            raise UserError("missing or damaged", path=self.path, remedy=_REMEDY) from None


class Outputs:
    """The outputs at a place, whose parts are compared with their sums when they are first read.

    Args:
        place: the place, where all parts are complete.

    Raises:
        ValueError: if the file is not the array that its place announces.

    Attributes:
        values: all of them, memory-mapped; `check` the rows before they are used.
    """

    def __init__(self, place: Place):
        # Compared, not parsed: numpy's parser fails on crafted headers in many ways.
        header = place.header
        with open(place.path, "rb") as file:
            if file.read(len(header)) != header:
                raise ValueError("another array")
        # Mapped copy on write, because torch warns of arrays that it cannot write to.
        self.values: np.ndarray = np.memmap(place.path, place.dtype, "c", len(header), place.shape)
        parts = sorted(read_parts(place.sums).items())
        if _rows(dict(parts)) != place.shape[0]:
            raise ValueError("parts are missing")
        self._place = place
        self._parts, self._digests = [part for part, _ in parts], [one for _, one in parts]
        self._firsts = np.array([first for first, _ in self._parts])
        self._unread = np.ones(len(parts), bool)

    def check(self, rows: np.ndarray) -> None:
        """Raise a `UserError` if a part with one of the rows does not have its sum."""
        found = np.searchsorted(self._firsts, rows, "right") - 1
        for number in np.unique(found[self._unread[found]]).tolist():
            first, last = self._parts[number]
            if self._place.sum_of(self.values[first:last].data) != self._digests[number]:
                sums = self._place.sums.name
                problem = f"damaged: rows {first} to {last - 1} do not have the sum in {sums}"
                raise UserError(problem, path=self._place.path, remedy=_REMEDY)
            self._unread[number] = False

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return rows `first` to `last` - 1, checked and still memory-mapped."""
        self.check(np.arange(first, last))
        return self.values[first:last]


@lru_cache(maxsize=_MAPPED)
def _opened(place: Place, changed: tuple[tuple[int, int], ...]) -> Outputs:
    return Outputs(place)


def read_parts(path: Path) -> dict[Part, str]:
    """Read the sums of the parts that are complete; a line that a kill has cut is no part."""
    if not path.is_file():
        return {}
    found = {}
    with open(path, encoding="ascii", errors="replace", newline="\n") as lines:
        for line in lines:
            if match := _LINE.fullmatch(line):
                found[int(match[1]), int(match[2])] = match[3]
    return found


def _line(part: Part, digest: str) -> str:
    return f"{part[0]} {part[1]} {digest}\n"


def _rows(parts: Iterable[Part]) -> int:
    return sum(last - first for first, last in parts)


def place_of(
    folder: Path,
    owner: str | None,
    data: str,
    what: Iterable[object],
    shape: tuple[int, ...],
    dtype: str,
) -> Place:
    """Return the place of the outputs for some data.

    Args:
        folder: of the data.
        owner: a client, or another owner, of a part of the data; None for all of them.
        data: a sum of the data.
        what: all else that the values depend on, as objects with the same `repr` if they are equal.
        shape, dtype: those of the array.
    """
    text = repr([_VERSION, *what, shape, dtype])
    own = folder / _FOLDER / owner if owner else folder / _FOLDER
    return Place(own, _hash(data), _hash(text), shape, dtype)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
