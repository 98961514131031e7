"""The nonce of an experiment's noise, and the record of its releases.

    EXP/nonce                               128 random bits, drawn when the experiment began
    EXP/releases.tsv                        round, draw and sha256 of each release of the server
    EXP/clients/<client>/releases.tsv       the same for a client, where clients add the noise
    EXP/{server,clients/<client>}/release.safetensors
                                            the release of the open round
    <key>.releases/<nonce>/<sender>.tsv     a second record, next to the key, with ...
    <key>.releases/<nonce>/{folder,clients} the experiment's first folder, and its clients

The nonce is not secret. It is part of the label of all noise, so that two experiments never draw
the same noise, even if everything else is equal.

A release is drawn once. It is written before it is used, and until its round is reset, every repeat
returns the written release, even if counts have changed: otherwise an attacker who changes a
message and repeats the round would get a second noise on the other clients' counts. If there is a
row but no file, as after a reset, the next draw has a new label and is counted too. No command
removes a row.

The record next to the key covers all folders with this nonce. A draw repeated in a copy of the
experiment, or in a folder restored from a backup, has a new label and counts for all of them. A
folder that was moved, or has another path on other machines, remains the same experiment. A key
copied to another machine without its records draws nothing there; if the records are copied too,
the two machines do not know each other's draws. Nothing removes the record, so it also covers
experiments that were deleted.

For tests, and to reproduce published tables, $FEDTOOLS_NONCE sets the nonce, with a warning and a
mark. Then there is no record next to the key, and copies are not distinguished. Labels still
contain the SHA-256 sums of configuration and data, so noise is equal only where all of these are.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.files.atomic import sha256, write_text
from fedtools.files.errors import UserError
from fedtools.files.locks import lock
from fedtools.files.private import Private, make_private
from fedtools.files.states import load_state, save_state
from fedtools.files.tables import count, read_tsv, write_tsv
from fedtools.files.text_files import read_lines, read_text
from fedtools.privacy.key import key_path

NONCE, RELEASES = "nonce", "releases.tsv"
VARIABLE = "FEDTOOLS_NONCE"
COLUMNS = ("round", "draw", "sha256")
# The name of the server as a sender, which no client can have.
SERVER_NAME = "-"
_FIXED = " fixed"
FIXED_WARNING = (
    f"the nonce of the noise was set by {VARIABLE}: other experiments may have the same noise, and "
    "releases of copies are not counted; use it only for tests and to reproduce tables"
)


@dataclass(frozen=True)
class Nonce:
    """A nonce, as 32 hexadecimal digits, and whether $FEDTOOLS_NONCE has set it."""

    text: str
    fixed: bool = False

    @classmethod
    def draw(cls) -> Nonce:
        """Draw a nonce, or take that of $FEDTOOLS_NONCE, with a warning."""
        chosen = os.environ.get(VARIABLE)
        if not chosen:
            return cls(secrets.token_hex(16))
        if not re.fullmatch("[0-9a-f]{32}", chosen):
            raise UserError(f"{VARIABLE} is {chosen[:40]!r}, not 32 hexadecimal digits")
        print(f"warning: {FIXED_WARNING}", file=sys.stderr)
        return cls(chosen, True)

    @classmethod
    def read(cls, path: Path) -> Nonce:
        """Read a nonce file; raise a `UserError` if `write` cannot have written it."""
        found = re.fullmatch(rf"([0-9a-f]{{32}})({_FIXED})?\n", read_text(path))
        if not found:
            raise UserError("not a nonce of 32 hexadecimal digits", path=path, line=1)
        return cls(found[1], bool(found[2]))

    @classmethod
    def kept(cls, path: Path) -> Nonce:
        """Read the nonce in a file, which is written first if missing or $FEDTOOLS_NONCE is set."""
        if os.environ.get(VARIABLE) or not path.exists():
            cls.draw().write(path)
        return cls.read(path)

    def write(self, path: Path) -> None:
        """Write the nonce, for `read`."""
        write_text(path, f"{self.text}{_FIXED if self.fixed else ''}\n")


class Row(NamedTuple):
    """A release: its round, the number of its draw, from 1, and the SHA-256 of its file."""

    number: int
    draw: int
    sha256: str


class Record:
    """The releases of an experiment, and of all other folders with its nonce.

    Args:
        experiment: the experiment's folder.
        option: path of the key, see `fedtools.privacy.key.key_path`.

    Raises:
        UserError: if the experiment has no nonce, since an earlier version created it.
    """

    def __init__(self, experiment: Path, option: str | Path | None = None):
        self._experiment, path = experiment, experiment / NONCE
        if not path.exists():
            problem = "an experiment with privacy from a version whose noise had no nonce"
            raise UserError(problem, path=experiment, remedy="begin another one")
        self.nonce = Nonce.read(path)
        key = key_path(option)
        self.registry = key.with_name(f"{key.name}.releases") / self.nonce.text

    @staticmethod
    def begin(experiment: Path, option: str | Path | None = None) -> None:
        """Draw the nonce of a new experiment, and create its record next to the key."""
        nonce = Nonce.draw()
        nonce.write(experiment / NONCE)
        if not nonce.fixed:
            registry = Record(experiment, option).registry
            registry.parent.mkdir(exist_ok=True, mode=0o700)
            registry.mkdir(mode=0o700)
            write_text(registry / "folder", f"{experiment.resolve()}\n")
            shutil.copyfile(experiment / "clients.txt", registry / "clients")

    def others(self) -> dict[str, str]:
        """Return other experiments under the same key with releases of clients of the same names.

        Returns:
            nonce -> the experiment's first folder.
        """
        clients = set(read_lines(self._experiment / "clients.txt"))
        found = {}
        for folder in self.registry.parent.glob("*/folder"):
            released = any(folder.parent.glob("*.tsv"))
            if released and clients & set(read_lines(folder.with_name("clients"))):
                found[folder.parent.name] = read_text(folder).strip()
        found.pop(self.nonce.text, None)
        return found

    @property
    def complete(self) -> bool:
        """Return whether the releases of other folders with this nonce are known."""
        return self.nonce.fixed or self.registry.is_dir()

    def once(self, own: Private, sender: str, make: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return the written release of a round, or draw one with `make` and write it.

        Args:
            own: the sender's private files in the round.
            sender: a client, or `SERVER_NAME`.
            make: function from the number of the draw, from 1, to noisy counts, (V,).

        Raises:
            UserError: if the record next to the key is missing, or the written release has changed.
        """
        chosen = os.environ.get(VARIABLE, self.nonce.text)
        if chosen not in ("", self.nonce.text):
            problem = f"its nonce differs from {VARIABLE}"
            raise UserError(problem, path=self._experiment, remedy="begin another experiment")
        if not self.complete:
            problem = f"the record of the releases of {self._experiment} is missing"
            remedy = "put it back next to the key, or begin another experiment"
            raise UserError(problem, path=self.registry, remedy=remedy)
        # One lock per sender, which copies of the experiment share unless the nonce is fixed.
        place = self._experiment if self.nonce.fixed else self.registry.parent
        with lock(place, f"{self.nonce.text}-{sender}", wait=True):
            written = _read_release(own)
            if written is None:
                draw = 1 + max((row.draw for row in self.of(sender, own.number)), default=0)
                make_private(own.folder)
                written = make(draw), draw
                save_state(own.release, _tensors(written[0], own.number, draw))
            counts, draw = written
            row = Row(own.number, draw, sha256(own.release))
            for path in self._paths(sender):
                _add(path, row)
            if len([one for one in _read(self._paths(sender)[0]) if one[:2] == row[:2]]) > 1:
                remedy = f"run fedtools reset --round {own.number}"
                raise UserError("changed since its release", path=own.release, remedy=remedy)
        return counts

    def of(self, sender: str, number: int | None = None) -> set[Row]:
        """Return a sender's releases of one round or of all, also those of other folders."""
        rows = {row for path in self._paths(sender) for row in _read(path)}
        return {row for row in rows if number in (None, row.number)}

    def _paths(self, sender: str) -> list[Path]:
        own = self._experiment if sender == SERVER_NAME else self._experiment / "clients" / sender
        registry = [] if self.nonce.fixed else [self.registry / f"{sender}.tsv"]
        return [own / RELEASES, *registry]


def close(own: Private) -> None:
    """Remove the release of a complete round; keep that of a later one."""
    if own.release.exists() and int(load_state(own.release)["round"]) <= own.number:
        own.release.unlink()


def _tensors(counts: np.ndarray, number: int, draw: int) -> dict[str, np.ndarray]:
    return {"counts": counts, "round": np.array(number), "draw": np.array(draw)}


def _read_release(own: Private) -> tuple[np.ndarray, int] | None:
    """Read the counts released in the round, and their draw; None if there are none."""
    if not own.release.exists():
        return None
    found = load_state(own.release)
    # The file may be from an earlier round.
    return (found["counts"], int(found["draw"])) if int(found["round"]) == own.number else None


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [
        Row(count(row, "round", path, line), count(row, "draw", path, line), row["sha256"])
        for line, row in enumerate(read_tsv(path, COLUMNS), 2)
    ]


def _add(path: Path, row: Row) -> None:
    rows = _read(path)
    if row not in rows:
        write_tsv(path, COLUMNS, [dict(zip(COLUMNS, one, strict=True)) for one in [*rows, row]])
