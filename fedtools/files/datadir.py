"""Kaldi data directories: reading, writing, and the checks that Kaldi makes and should make.

A data directory holds text tables, one entry a line, "key value...", sorted by key in the C
locale (byte order), every utterance id prefixed by its speaker id:

    wav.scp text utt2spk spk2utt [segments] [utt2dur] [feats.scp] [utt2client client2utt]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedtools.files.atomic import write_text
from fedtools.files.errors import UserError

# A speaker, utterance or client id becomes a file name and a column: keep it to what both allow.
ID_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")


def check_id(name: str, what: str, path: str | Path | None = None, line: int | None = None) -> str:
    """Return `name` if it can be used as an id and a file name; a `UserError` names it if not."""
    if not ID_PATTERN.fullmatch(name):
        raise UserError(
            f"{what} {name!r} is not usable as an id",
            path=path,
            line=line,
            remedy="use letters, digits, '_', '-', '.' and '+', not beginning with '.', '-' or '+'",
        )
    return name


def byte_order(keys: Iterable[str]) -> list[str]:
    """Sort as `LC_ALL=C sort` does: by UTF-8 bytes."""
    return sorted(keys, key=lambda key: key.encode("utf-8"))


def read_table(path: str | Path, *, values: str = "required") -> dict[str, str]:
    """Read a "key value" table, checking that it is sorted, unique, and cleanly spaced.

    Args:
        path: the table.
        values: "required", or "optional" to let a key stand alone (its value is then "").

    Returns:
        key -> value, in the order of the file.

    Raises:
        UserError: naming file and line, for the first line that breaks a rule.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path=path) from None
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError("not UTF-8", path=path, line=line, remedy="convert the file") from None
    if "\r" in content:
        line = content[: content.index("\r")].count("\n") + 1
        raise UserError("carriage return", path=path, line=line, remedy="run dos2unix")
    if content and not content.endswith("\n"):
        last = content.count("\n") + 1
        raise UserError("the last line has no end", path=path, line=last, remedy="file cut off?")
    table: dict[str, str] = {}
    previous = b""
    for number, line in enumerate(content.split("\n")[:-1], 1):
        key, _, value = line.partition(" ")
        if "\t" in key:
            key, _, value = line.partition("\t")
        if not key:
            raise UserError("empty line or leading blank", path=path, line=number)
        if not value and values == "required":
            raise UserError(f"{key!r} has no value", path=path, line=number, remedy="remove it")
        if value != value.strip() or "  " in value:
            raise UserError(
                "leading, doubled or trailing blank", path=path, line=number, remedy="squeeze it"
            )
        if key in table:
            raise UserError(f"{key!r} comes twice", path=path, line=number)
        encoded = key.encode("utf-8")
        if encoded < previous:
            raise UserError(
                f"{key!r} is not in order", path=path, line=number, remedy="sort with LC_ALL=C"
            )
        previous = encoded
        table[key] = value
    return table


def write_table(path: str | Path, table: Mapping[str, str]) -> None:
    """Write a "key value" table, sorted in the C locale, atomically."""
    write_text(path, "".join(f"{key} {table[key]}\n" for key in byte_order(table)))


def invert(utt2x: Mapping[str, str]) -> dict[str, list[str]]:
    """utt -> x to x -> sorted utts, keys sorted."""
    x2utt: dict[str, list[str]] = {}
    for utt in byte_order(utt2x):
        x2utt.setdefault(utt2x[utt], []).append(utt)
    return {x: x2utt[x] for x in byte_order(x2utt)}


@dataclass
class DataDir:
    """A data directory in memory; tables that the directory lacks are empty.

    `wav_scp` and `segments` values are kept as strings, as they stand in the files.
    """

    path: Path
    wav_scp: dict[str, str] = field(default_factory=dict)
    segments: dict[str, str] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    utt2spk: dict[str, str] = field(default_factory=dict)
    utt2dur: dict[str, str] = field(default_factory=dict)
    utt2client: dict[str, str] = field(default_factory=dict)
    feats_scp: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, *tables: str) -> DataDir:
        """Read the named tables ("text", "utt2spk", ...), or all that are there.

        Raises:
            UserError: if a named table is missing, or a table breaks a rule of `read_table`.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError("no such data directory", path=path)
        data = cls(path)
        for attribute, name in _FILES.items():
            if name in tables or attribute in tables or (not tables and (path / name).exists()):
                optional = "optional" if name == "text" else "required"
                setattr(data, attribute, read_table(path / name, values=optional))
        return data

    def write(self) -> None:
        """Write every non-empty table, and spk2utt and client2utt with them."""
        self.path.mkdir(parents=True, exist_ok=True)
        for attribute, name in _FILES.items():
            if table := getattr(self, attribute):
                write_table(self.path / name, table)
        for utt2x, name in ((self.utt2spk, "spk2utt"), (self.utt2client, "client2utt")):
            if utt2x:
                lists = {x: " ".join(utts) for x, utts in invert(utt2x).items()}
                write_table(self.path / name, lists)

    @property
    def utterances(self) -> list[str]:
        """Utterance ids in C order."""
        return list(self.utt2spk)

    def client_utterances(self, client: str) -> list[str]:
        """The utterances of one client, in C order; a `UserError` if it has none."""
        utts = [utt for utt, owner in self.utt2client.items() if owner == client]
        if not utts:
            known = ", ".join(invert(self.utt2client)) or "none"
            raise UserError(
                f"no utterance of client {client!r}",
                path=self.path / "utt2client",
                remedy=f"clients there: {known}",
            )
        return utts


_FILES = {
    "wav_scp": "wav.scp",
    "segments": "segments",
    "text": "text",
    "utt2spk": "utt2spk",
    "utt2dur": "utt2dur",
    "utt2client": "utt2client",
    "feats_scp": "feats.scp",
}
