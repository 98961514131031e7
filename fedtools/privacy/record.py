"""The nonce of an experiment's noise, and the record of its releases.

    EXP/nonce                               128 random bits, drawn when the experiment began
    EXP/releases.tsv                        round, draw and sha256 of each release of the server
    EXP/clients/<client>/releases.tsv       the same for a client, where clients add the noise
    EXP/{server,clients/<client>}/release.safetensors
                                            the release of the open round
    <key>.releases/<nonce>/<sender>.tsv     the record that counts, next to the key, with ...
    <key>.releases/<nonce>/<sender>.open    the release that is being written
    <key>.releases/<nonce>/{folder,clients} the experiment's first folder, and its clients
    <key>.releases/<nonce>/sha256sums       sums of its configuration, data and list of clients
    <key>.releases/<nonce>/replaced         exists once another experiment began in that folder

The nonce is not secret. It is part of the label of all noise, so that two experiments never draw
the same noise, even if everything else is equal.

A release is drawn once. It is written before it is used, and until its round is reset, every repeat
returns the written release, even if counts have changed: otherwise an attacker who changes a
message and repeats the round would get a second noise on the other clients' counts. If there is a
row but no file, as after a reset, the next draw has a new label and is counted too. No command
removes a row.

The server may write to the experiment's folder, so whatever protects a client is kept next to its
key, and compared with that folder whenever counts are about to leave: the options of privacy and
all others, the data, the list of clients, and which releases were drawn. The key and its record are
found behind links by their real path, belong to the user, and cannot be changed by others. A
release in the experiment's folder is used only if the record next to the key knows it.

The record next to the key covers all folders with this nonce. A draw repeated in a copy of the
experiment, or in a folder restored from a backup, has a new label and counts for all of them. A
folder that was moved, or has another path on other machines, remains the same experiment. A key
copied to another machine without its records draws nothing there; if the records are copied too,
the two machines do not know each other's draws. Nothing removes the record, so it also covers
experiments that were deleted.

For tests, and to reproduce published tables, $FEDTOOLS_NONCE sets the nonce, with a warning and a
mark. Then there is no record next to the key, and copies are not distinguished. The mark alone
does nothing: the variable must be set whenever noise is drawn. Labels still contain the SHA-256
sums of configuration and data, so noise is equal only where all of these are.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.core.atomic import atomic_path, sha256, sha256_once, write_text
from fedtools.core.errors import UserError, some
from fedtools.core.locks import lock
from fedtools.core.tables import count, read_tsv, write_tsv
from fedtools.core.text_files import read_lines, read_text
from fedtools.exchange.experiment import read_sums, write_sums
from fedtools.exchange.private import Private, make_private
from fedtools.exchange.states import load_state, save_state
from fedtools.privacy.key import check_own, key_path

NONCE, RELEASES = "nonce", "releases.tsv"
VARIABLE = "FEDTOOLS_NONCE"
COLUMNS = ("round", "draw", "sha256")
# The name of the server as a sender, which no client can have.
SERVER_NAME = "-"
_FIXED = " fixed"
# In the record next to the key: the sums of these fixed files, and the mark of a folder's end.
_PINNED, _REPLACED = "sha256sums", "replaced"
_PINS = ("config.yaml", "data.yaml", "clients.txt", "privacy.yaml")
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
    """

    def __init__(self, experiment: Path, option: str | Path | None = None):
        self._experiment = experiment
        self.nonce = Nonce.read(experiment / NONCE)
        self.registry = _registries(option) / self.nonce.text

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
            there = (name for name in _PINS if (experiment / name).exists())
            write_sums(registry / _PINNED, {name: experiment / name for name in there})

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
    def fixed(self) -> bool:
        """Return whether the user of this process has fixed the nonce, and needs no record."""
        return self.nonce.fixed and os.environ.get(VARIABLE) == self.nonce.text

    @property
    def complete(self) -> bool:
        """Return whether the releases of other folders with this nonce are known."""
        return self.fixed or self.registry.is_dir()

    def check(self) -> None:
        """Check that the experiment is the one that this user's record began with.

        Raises:
            UserError: if the record next to the key is missing, others can write to it, or the
                experiment's fixed files differ from those it began with.
        """
        chosen = os.environ.get(VARIABLE, self.nonce.text)
        if chosen not in ("", self.nonce.text):
            problem = f"its nonce differs from {VARIABLE}"
            raise UserError(problem, path=self._experiment, remedy="begin another experiment")
        if not self.complete:
            problem = f"the record of the releases of {self._experiment} is missing"
            remedy = "put it back next to the key, or begin another experiment"
            if self.nonce.fixed:
                remedy = f"set {VARIABLE} to the nonce of a test, or begin another experiment"
            raise UserError(problem, path=self.registry, remedy=remedy)
        if self.fixed:
            return
        for folder in (self.registry, self.registry.parent):
            check_own(folder)
        pinned, remedy = self.registry / _PINNED, "begin another experiment"
        if not pinned.exists():
            problem = f"a version whose record did not cover options began {self._experiment}"
            raise UserError(problem, path=self.registry, remedy=remedy)
        for name, known in read_sums(pinned).items():
            if not (path := self._experiment / name).is_file() or sha256_once(path) != known:
                problem = f"not the one that the noise key's record began with ({pinned})"
                raise UserError(problem, path=path, remedy=f"put it back, or {remedy}")

    def once(self, own: Private, sender: str, make: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return the written release of a round, or draw one with `make` and write it.

        Args:
            own: the sender's private files in the round.
            sender: a client, or `SERVER_NAME`.
            make: function from the number of the draw, from 1, to noisy counts, (V,).

        Raises:
            UserError: as `check`, or if the written release is none of the record's.
        """
        self.check()
        # One lock per sender, which copies of the experiment share unless the nonce is fixed.
        place = self._experiment if self.fixed else self.registry.parent
        with lock(place, f"{self.nonce.text}-{sender}", wait=True):
            *others, trusted = self._paths(sender)
            opened, written = trusted.with_suffix(".open"), _read_release(own)
            if written is None:
                draw = 1 + max((row.draw for row in self.of(sender, own.number)), default=0)
                counts = make(draw)
                make_private(own.folder)
                # Known to the record before it is in place: nobody else can put one there.
                with atomic_path(own.release) as temporary:
                    save_state(temporary, _tensors(counts, own.number, draw))
                    row = Row(own.number, draw, sha256(temporary))
                    _write(opened, [row])
            else:
                counts, draw = written
                row = Row(own.number, draw, sha256(own.release))
                if row not in (*_read(trusted), *_read(opened)):
                    remedy = f"run fedtools reset --round {own.number}"
                    raise UserError("changed since its release", path=own.release, remedy=remedy)
            for path in (trusted, *others):
                _add(path, row)
            opened.unlink(missing_ok=True)
        return counts

    def of(self, sender: str, number: int | None = None) -> set[Row]:
        """Return a sender's releases of one round or of all, also those of other folders."""
        rows = {row for path in self._paths(sender) for row in _read(path)}
        return {row for row in rows if number in (None, row.number)}

    def _paths(self, sender: str) -> list[Path]:
        """Return the paths of a sender's records; the last one cannot be changed by others."""
        own = self._experiment if sender == SERVER_NAME else self._experiment / "clients" / sender
        return [own / RELEASES, *([] if self.fixed else [self.registry / f"{sender}.tsv"])]


def check_unprotected(experiment: Path, option: str | Path | None = None) -> None:
    """Raise a `UserError` if an experiment without privacy began with privacy, by a user's record.

    Args:
        experiment: the experiment's folder.
        option: path of the key, see `fedtools.privacy.key.key_path`.
    """
    for registry in _of_folder(experiment, option):
        problem = f"began with differential privacy, by {registry}; now its options have none"
        raise UserError(problem, path=experiment, remedy="begin an experiment in another folder")


def note_replaced(experiment: Path, option: str | Path | None = None) -> None:
    """Note in a user's records that another experiment begins in a folder."""
    for registry in _of_folder(experiment, option):
        write_text(registry / _REPLACED, "")


def warn_of_uncounted(records: Mapping[Path, Record]) -> None:
    """Warn of releases that the records of experiments, by their folders, do not count."""
    if any(one.nonce.fixed for one in records.values()):
        print(f"warning: {FIXED_WARNING}", file=sys.stderr)
    for path, record in records.items():
        if record.complete:
            record.check()
        else:
            problem = f"copies are not counted: {record.registry} is missing"
            print(f"warning: {path}: {problem}", file=sys.stderr)
    others = {nonce: path for one in records.values() for nonce, path in one.others().items()}
    known = {one.nonce.text for one in records.values()}
    if others := {nonce: others[nonce] for nonce in others.keys() - known}:
        listed = some(sorted(others.values()))
        print(f"warning: experiments on the same clients not counted: {listed}", file=sys.stderr)


def _registries(option: str | Path | None) -> Path:
    """Return the folder of all records of a key, next to the file itself and not to a link."""
    key = Path(os.path.realpath(key_path(option)))
    return key.with_name(f"{key.name}.releases")


def _of_folder(experiment: Path, option: str | Path | None) -> list[Path]:
    """Return the records of experiments that began in a folder and were not replaced there."""
    here, found = str(experiment.resolve()), set[Path]()
    for one in (option, None):
        # Without a home folder there is no default key.
        with suppress(UserError):
            found.update(_registries(one).glob("*/folder"))
    return [
        path.parent
        for path in sorted(found)
        if read_text(path).strip() == here and not path.with_name(_REPLACED).exists()
    ]


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
        _write(path, [*rows, row])


def _write(path: Path, rows: Sequence[Row]) -> None:
    write_tsv(path, COLUMNS, [dict(zip(COLUMNS, one, strict=True)) for one in rows])
