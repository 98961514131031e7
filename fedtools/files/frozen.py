"""What the frozen bottom of a model makes of data: computed once, and kept beside the data's owner.

    EXP/clients/<client>/frozen/<split>.<key>.npy   of a client's own utterances or clips
    EXP/frozen/<owner>/<split>.<key>.npy            of somebody who is no client, such as the
                                                    speakers of a test
    EXP/frozen/<split>.<key>.npy                    of a whole split, where the server trains on it,
                                                    or it is measured as a whole

Each is an array (rows, values) in numpy's format: the positions of one utterance after another.
The key is a hash of all that the values depend on: the pretrained model, the layers, the data, what
they are padded with, and how they are kept. A file of another key is removed when one is made in
its place. Nobody else can read these folders. They may be removed while nothing runs: what is
missing is made again, with the same values. They do not depend on rounds, so a reset leaves them.
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
# Another number where what is computed changes.
_VERSION = 1
# Each takes a file descriptor.
_MAPPED = 128


@dataclass(frozen=True)
class Place:
    """Where values lie, and what they are.

    Attributes:
        folder: private.
        split: of the data.
        key: of `key_of`.
        shape: (rows, values).
        dtype: numpy's name.
    """

    folder: Path
    split: str
    key: str
    shape: tuple[int, int]
    dtype: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.split}.{self.key}.npy"

    def make(self, parts: Callable[[], Iterable[tuple[int, np.ndarray]]]) -> None:
        """Compute and write what is not there yet; another process that does so is waited for.

        Args:
            parts: gives first rows, and the values from there; every row once.
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
        # Not through a map, by which a full disk would end the process.
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
        """A copy of rows `first` to `last` - 1, float32."""
        return np.array(self.mapped()[first:last], "f4")

    def mapped(self) -> np.ndarray:
        """All rows; a `UserError` if the file is gone or damaged."""
        try:
            told = self.path.stat()
            return _mapped(self, told.st_ino, told.st_mtime_ns)
        except (OSError, ValueError):
            remedy = "remove it if it is there, and run the same command again"
            raise UserError("missing or damaged", path=self.path, remedy=remedy) from None


@lru_cache(maxsize=_MAPPED)
def _mapped(place: Place, inode: int, changed: int) -> np.ndarray:
    # For torch, which warns of what cannot be written; what is written stays with the process.
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
    """Where values of somebody's data lie.

    Args:
        owner: whose data; None: the whole split.
        what: all that the values depend on, as things that print alike if they are alike.
        shape, dtype: of the array.
    """
    if owner is None:
        folder = experiment.path / _FOLDER
    elif experiment.knows(owner):
        folder = experiment.client_dir(owner) / _FOLDER
    else:
        folder = experiment.path / _FOLDER / owner
    said = repr([_VERSION, *what, shape, dtype])
    key = hashlib.sha256(said.encode()).hexdigest()[:_DIGITS]
    return Place(folder, split, key, shape, dtype)
