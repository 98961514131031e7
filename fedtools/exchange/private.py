"""Private files that a client, or the server, keeps from round to round.

    <owner>/round_0007/<name>.safetensors   tensors as they were after round 7
    <owner>/checkpoint.safetensors          a training in progress
    <owner>/release.safetensors             noisy counts, see `fedtools.privacy.record`

The owner's folder is `EXP/clients/<client>` or `EXP/server`; other users cannot read it. A killed
round is repeated, so the files of an earlier round are kept until the next one is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedtools.core.atomic import remove
from fedtools.exchange.states import Spec, load_state, save_state

if TYPE_CHECKING:
    import torch

# The personal part of a client's model, kept for every round, for `fedtools average`.
PERSONAL_STATE = "personal"

# Files that wait for the disk together, whose file system then writes its journal once for all.
_TOGETHER = 8


def make_private(folder: Path) -> Path:
    """Return a folder that only its owner can read, made or restricted if need be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return folder


class Private:
    """An owner's private files, seen from one round."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.number = folder, number

    @property
    def checkpoint(self) -> Path:
        """Return the path of the checkpoint of a training in progress."""
        return self.folder / "checkpoint.safetensors"

    @property
    def release(self) -> Path:
        """Return the path of what was released, with noise, in an incomplete round."""
        return self.folder / "release.safetensors"

    def load(self, name: str, spec: Spec | None = None) -> dict[str, np.ndarray] | None:
        """Load the newest tensors of a name from rounds before this one; None if there are none."""
        for number in reversed(self._rounds()):
            path = self._path(name, number)
            if number < self.number and path.exists():
                return load_state(path, spec)
        return None

    def has(self, name: str) -> bool:
        """Return whether `load` would find tensors."""
        return any(at < self.number and self._path(name, at).exists() for at in self._rounds())

    def keeps(self, rounds: Collection[int]) -> bool:
        """Return whether anything was kept in some rounds."""
        return any(at in rounds for at in self._rounds())

    def save(self, name: str, tensors: Mapping[str, np.ndarray | torch.Tensor]) -> None:
        """Save tensors for a later round."""
        make_private(self.folder)
        save_state(self._path(name, self.number), tensors)

    def save_checkpoint(self, tensors: Mapping[str, np.ndarray | torch.Tensor]) -> None:
        """Save the checkpoint of a training in progress."""
        make_private(self.folder)
        save_state(self.checkpoint, tensors)

    def finish(self) -> None:
        """Remove the files kept in case of a kill, now that the round's result is on disk."""
        self.checkpoint.unlink(missing_ok=True)
        self.drop_old(keep=2)

    def drop_old(self, keep: int) -> None:
        """Remove all but the newest `keep` files of each name, except the personal state.

        In an open round, `keep` must be 2: a killed round is repeated from the last but one.
        """
        for found in self._found().values():
            for number in sorted(at for at in found if at <= self.number)[:-keep]:
                path = found[number]
                path.unlink()
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()

    def only_later(self) -> list[int]:
        """Return the first kept round of each name that has no files from before this round."""
        return [min(found) for found in self._found().values() if min(found) >= self.number]

    def remove(self) -> None:
        """Remove the files of this round, any checkpoint, and any release."""
        remove(self.checkpoint)
        remove(self.release)
        remove(self._folder(self.number))

    def _found(self) -> dict[str, dict[int, Path]]:
        """Return the files of each name by round, except the personal state."""
        found: dict[str, dict[int, Path]] = {}
        for number in self._rounds():
            folder = self._folder(number)
            for name in _listed(folder):
                stem, dot, kind = name.rpartition(".")
                if dot and kind == "safetensors" and stem != PERSONAL_STATE:
                    found.setdefault(stem, {})[number] = folder / name
        return found

    def _folder(self, number: int) -> Path:
        return self.folder / f"round_{number:04d}"

    def _path(self, name: str, number: int) -> Path:
        return self._folder(number) / f"{name}.safetensors"

    def _rounds(self) -> list[int]:
        """Return the rounds with files, sorted as numbers, so that 10000 comes after 9999."""
        found = (re.fullmatch(r"round_(\d+)", name) for name in _listed(self.folder))
        return sorted(int(match.group(1)) for match in found if match)


def _listed(folder: Path) -> list[str]:
    """Return the names in a folder; none if it is missing."""
    try:
        with os.scandir(folder) as found:
            return [entry.name for entry in found]
    except (FileNotFoundError, NotADirectoryError):
        return []


def save_each(
    name: str, kept: Iterable[tuple[Private, Mapping[str, np.ndarray | torch.Tensor]]]
) -> None:
    """Save tensors of many owners under one name, each as `Private.save` does."""
    do_together([partial(owner.save, name, tensors) for owner, tensors in kept])


def do_together(tasks: Sequence[Callable[[], None]]) -> None:
    """Change the files of many owners in threads.

    A file system that is busy with other programs let 300 owners wait 2 s for a removal each, one
    after another, and 0.1 s together.
    """
    with ThreadPoolExecutor(_TOGETHER) as threads:
        for done in [threads.submit(task) for task in tasks]:
            done.result()
