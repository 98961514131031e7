"""A cache of the outputs of a model's frozen layers, computed once and kept by the data's owner.

    EXP/clients/<client>/frozen/<split>.<key>.npy   for a client's own utterances or clips
    EXP/frozen/<owner>/<split>.<key>.npy            for people who are no clients, such as test
                                                    speakers
    EXP/frozen/<split>.<key>.npy                    for a whole split, on which the server trains or
                                                    evaluates

Each file is an array (rows, values) in numpy's format, with the frames of all utterances end to
end. The key is a hash of all that the values depend on: the pretrained model, the layers, the data,
the padding and the number format. A new file replaces one with another key. Other users cannot read
these folders. They may be removed while nothing runs: missing files are computed again, with the
same values. They do not depend on rounds, so a reset keeps them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedtools.files.atomic import atomic_path, remove
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.locks import lock
from fedtools.files.private import make_private

_FOLDER, _DIGITS = "frozen", 16
# To be increased whenever the computation changes.
_VERSION = 1
# Each mapped file takes a file descriptor.
_MAPPED = 128


@dataclass(frozen=True)
class Place:
    """The location, shape and type of cached values.

    Attributes:
        folder: a private folder.
        split: the split of the data.
        key: a hash of all that the values depend on.
        shape: (rows, values).
        dtype: numpy's name of the type.
    """

    folder: Path
    split: str
    key: str
    shape: tuple[int, int]
    dtype: str

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self.folder / f"{self.split}.{self.key}.npy"

    def make(self, parts: Callable[[], Iterable[tuple[int, np.ndarray]]]) -> None:
        """Compute and write the values if they are missing; wait for another process that does so.

        Args:
            parts: yields the first row of a part, and its values; every row comes once.
        """
        if self.path.is_file():
            return
        make_private(self.folder.parent)
        make_private(self.folder)
        with lock(self.folder, self.split, wait=True):
            if self.path.is_file():
                return
            with atomic_path(self.path) as temporary:
                self._write(temporary, parts())
            for other in self.folder.glob(f"{self.split}.{'?' * _DIGITS}.npy"):
                if other != self.path:
                    remove(other)

    def _write(self, path: Path, parts: Iterable[tuple[int, np.ndarray]]) -> None:
        rows, values = self.shape
        written = 0
        # Not through a memory map: on a full disk, that would kill the process.
        with open(path, "wb") as file:
            description = {"descr": np.dtype(self.dtype).str, "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, description | {"shape": self.shape})
            begin, width = file.tell(), values * np.dtype(self.dtype).itemsize
            for first, part in parts:
                file.seek(begin + first * width)
                file.write(np.ascontiguousarray(part, self.dtype))
                written += len(part)
        if written != rows:
            raise ValueError(f"{written} rows, {rows} are expected")

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return a copy of rows `first` to `last` - 1, as float32."""
        return np.array(self.mapped()[first:last], "f4")

    def mapped(self) -> np.ndarray:
        """Return all rows, memory-mapped; raise a `UserError` if the file is missing or damaged."""
        try:
            status = self.path.stat()
            return _mapped(self, status.st_ino, status.st_mtime_ns)
        except (OSError, ValueError):
            remedy = "remove it if it is there, and run the same command again"
            raise UserError("missing or damaged", path=self.path, remedy=remedy) from None


@lru_cache(maxsize=_MAPPED)
def _mapped(place: Place, inode: int, changed: int) -> np.ndarray:
    # Mapped copy on write, because torch warns of arrays that it cannot write to.
    found: np.ndarray = np.lib.format.open_memmap(place.path, "c")
    if (found.shape, found.dtype) != (place.shape, np.dtype(place.dtype)):
        raise ValueError("another array")
    return found


def place_of(
    experiment: Experiment,
    split: str,
    owner: str | None,
    what: Iterable[object],
    shape: tuple[int, int],
    dtype: str,
) -> Place:
    """Return the place of the cached values of an owner's data.

    Args:
        owner: a client or another owner of the data; None for the whole split.
        what: all that the values depend on, as objects with the same `repr` if they are equal.
        shape, dtype: those of the array.
    """
    if owner is None:
        folder = experiment.path / _FOLDER
    elif experiment.knows(owner):
        folder = experiment.client_dir(owner) / _FOLDER
    else:
        folder = experiment.path / _FOLDER / owner
    text = repr([_VERSION, *what, shape, dtype])
    key = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    return Place(folder, split, key, shape, dtype)
