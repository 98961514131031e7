"""Kaldi data directories: reading, writing, and the checks that Kaldi makes or should make.

A data directory holds text tables of one entry per line, "key value...", sorted by key in the C
locale (byte order), with every utterance id prefixed by its speaker id:

    wav.scp text utt2spk spk2utt [segments] [utt2dur] [feats.scp utt2num_frames]
    [utt2client client2utt] [any other utt2*, spk2*, reco2*, such as utt2accent or spk2gender]

A table has all utterances, speakers or recordings, unless it has facts that speakers need not give
(PARTIAL).
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from fedtools.core.atomic import write_lines
from fedtools.core.errors import UserError
from fedtools.core.text_files import stream_lines
from fedtools.data.symbols import check_sentence, unprintable

# Speaker, utterance and client ids are used as file names and columns, so both must allow them.
ID_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
# Of pages, and of tables.
_MARKUP = '<>|`"\\[]{}=*'
_LABEL = re.compile(rf"(?=\w)[^\s\x00-\x1f\x7f-\x9f{re.escape(_MARKUP)}]{{1,200}}")
# Endings of what corpora are packed in.
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".zip")
# Facts that not every speaker gives: these tables have at least one of the speakers.
PARTIAL = ("spk2gender", "spk2age")
# Kaldi's extract-segments lets a segment end this far (in seconds) beyond its recording.
MAX_OVERSHOOT = 0.5


def check_id(name: str, what: str, path: str | Path | None = None, line: int | None = None) -> str:
    """Return `name` if it is usable as an id and a file name; otherwise raise a `UserError`."""
    if not ID_PATTERN.fullmatch(name):
        problem = f"{what} {name[:200]!r} is not usable as an id"
        remedy = "use letters, digits, '_', '-', '.' and '+', not beginning with '.', '-' or '+'"
        raise UserError(problem, path=path, line=line, remedy=remedy)
    return name


def check_label(
    name: str, what: str, path: str | Path | None = None, line: int | None = None
) -> str:
    """Return `name` if it is a word, in any script, that pages and tables can show as it is.

    Raises:
        UserError: if it looks like HTML or Markdown on a page, or a formula in a spreadsheet.
    """
    if not _LABEL.fullmatch(name):
        problem, remedy = f"{what} {name[:80]!r} is no word", "begin with a letter, digit or '_'"
        remedy = f"{remedy}, and use none of {' '.join(_MARKUP)}"
        raise UserError(problem, path=path, line=line, remedy=remedy)
    return name


def check_ids(table: Mapping[str, str], path: Path) -> None:
    """Raise a `UserError`, naming the line, if utt2spk or utt2client has an unusable id.

    These two tables define the utterances, speakers and clients; other tables are not checked.
    """
    if owner := {"utt2spk": "speaker", "utt2client": "client"}.get(path.name):
        for line, (key, value) in enumerate(table.items(), 1):
            check_id(key, "utterance", path, line)
            check_id(value, owner, path, line)


def corpus_folder(folder: Path, what: str) -> Path:
    """Return a folder's absolute path; raise a `UserError` if wav.scp cannot name files in it.

    Args:
        folder: the folder.
        what: what to name instead, for the remedy if the folder is missing.
    """
    if folder.is_file():
        quoted = shlex.quote(str(folder))
        unpack = f"unzip {quoted}" if folder.suffix == ".zip" else f"tar -xf {quoted}"
        if not folder.name.endswith(_ARCHIVES):
            raise UserError("a file, not a folder", path=folder, remedy=f"name {what}")
        raise UserError("an archive", path=folder, remedy=f"unpack it, with {unpack}; name {what}")
    if not folder.is_dir():
        raise UserError("no such folder", path=folder, remedy=f"name {what}")
    folder = folder.resolve()
    if str(folder) != " ".join(str(folder).split()):
        raise UserError("wav.scp cannot hold doubled spaces", path=folder, remedy="rename it")
    # A table with unprintable characters, or bytes that are not UTF-8, could not be read.
    if not str(folder).isprintable():
        problem = f"the folder {str(folder)!r} has characters that do not print"
        raise UserError(problem, remedy="rename it")
    return folder


def byte_order(keys: Iterable[str]) -> list[str]:
    """Sort keys as `LC_ALL=C sort` does: by UTF-8 bytes."""
    return sorted(keys, key=lambda key: key.encode("utf-8"))


def read_table(
    path: str | Path, *, values: str = "required", lines: Iterable[str] | None = None
) -> dict[str, str]:
    """Read a "key value" table, checking that it is sorted, unique, and cleanly spaced.

    Args:
        path: the table.
        values: "required", or "optional" to let a key stand alone (its value is then "").
        lines: its lines, if they have been read already.

    Returns:
        key -> value, in the order of the file.

    Raises:
        UserError: naming file and line, for the first line that breaks a rule.
    """
    table: dict[str, str] = {}
    previous = b""
    lines = stream_lines(path, may_be_marked=False) if lines is None else lines
    for number, line in enumerate(lines, 1):
        key, _, value = line.partition("\t" if "\t" in line.partition(" ")[0] else " ")
        encoded = key.encode("utf-8")
        problem, remedy = "", None
        if "\r" in line:
            problem, remedy = "carriage return", "run dos2unix"
        elif not key:
            problem = "empty line or leading whitespace"
        elif not value and values == "required":
            problem, remedy = f"{key!r} has no value", "remove it"
        elif value != value.strip() or "  " in value or line.endswith((" ", "\t")):
            problem, remedy = "leading, doubled or trailing whitespace", "use single spaces"
        elif key in table:
            problem = f"{key!r} is duplicated"
        elif encoded < previous:
            problem, remedy = f"{key!r} is not in order", "sort with LC_ALL=C"
        if problem:
            raise UserError(problem, path=path, line=number, remedy=remedy)
        previous = encoded
        table[key] = value
    return table


def read_transcripts(path: str | Path) -> dict[str, str]:
    """Read a Kaldi `text`: utterance -> words, "" for an empty transcript.

    Raises:
        UserError: as in `read_table`, and for a reserved word or an unprintable character.
    """
    table = read_table(path, values="optional")
    for line, sentence in enumerate(table.values(), 1):
        check_sentence(sentence, path, line)
        if mark := unprintable(sentence):
            problem = f"a character that does not print (U+{ord(mark):04X})"
            remedy = "see it with: grep -nP '[^[:print:]]'"
            raise UserError(problem, path=path, line=line, remedy=remedy)
    return table


def write_table(path: str | Path, table: Mapping[str, str]) -> None:
    """Write a "key value" table, sorted in the C locale, atomically."""
    # A key without a value has no trailing space, which `read_table` would refuse.
    lines = (f"{key} {table[key]}" if table[key] else key for key in byte_order(table))
    write_lines(path, lines)


def parse_segment(value: str, path: str | Path, line: int) -> tuple[str, float, float]:
    """Parse a line of Kaldi's `segments`, after its key: recording id, start and end in seconds.

    Raises:
        UserError: naming `path` and `line`, unless there are three fields, the last two are
            numbers, and 0 <= start < end (or end is -1: the recording's end).
    """
    try:
        recording, begin, stop = value.split()
        start, end = float(begin), float(stop)
    except ValueError:
        problem = f"{value!r} is not a segment"
        remedy = "write: utterance recording start end (mono audio has no channel)"
        raise UserError(problem, path=path, line=line, remedy=remedy) from None
    if not (math.isfinite(start) and start >= 0 and (end == -1 or start < end < math.inf)):
        problem = f"a segment from {begin} to {stop} seconds"
        remedy = "0 <= start < end, or end = -1 for the recording's end"
        raise UserError(problem, path=path, line=line, remedy=remedy)
    return recording, start, end


def invert(utt2x: Mapping[str, str]) -> dict[str, list[str]]:
    """Invert a map utt -> x into x -> sorted utts, with sorted keys."""
    x2utt: dict[str, list[str]] = {}
    for utt in byte_order(utt2x):
        x2utt.setdefault(utt2x[utt], []).append(utt)
    return {x: x2utt[x] for x in byte_order(x2utt)}


@dataclass
class DataDir:
    """A data directory in memory; tables that the directory lacks are empty.

    `wav_scp` and `segments` values are kept as strings, as they stand in the files. `others` holds
    the tables without a field of their own (utt2accent, spk2gender, ...) by file name; they are
    read only if all tables are.
    """

    path: Path
    # In the order of writing: utt2spk comes first, because it defines the utterances.
    utt2spk: dict[str, str] = field(default_factory=dict)
    wav_scp: dict[str, str] = field(default_factory=dict)
    segments: dict[str, str] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    utt2dur: dict[str, str] = field(default_factory=dict)
    utt2client: dict[str, str] = field(default_factory=dict)
    utt2num_frames: dict[str, str] = field(default_factory=dict)
    feats_scp: dict[str, str] = field(default_factory=dict)
    others: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, *tables: str) -> DataDir:
        """Read the named tables ("text", "utt2spk", ...), or all tables of a directory.

        Raises:
            UserError: if a named table is missing, a table is empty or breaks a rule of
                `read_table` (text: of `read_transcripts`), or an utterance, speaker or client id
                is not usable.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError("no such data directory", path=path)
        data = cls(path)
        for attribute, name in _FILES.items():
            # A link to nowhere is not an absent table.
            there = not tables and os.path.lexists(path / name)
            if name in tables or attribute in tables or there:
                table = (read_transcripts if name == "text" else read_table)(path / name)
                if not table:
                    remedy = "remove it or make it again"
                    raise UserError("empty", path=path / name, remedy=remedy)
                check_ids(table, path / name)
                setattr(data, attribute, table)
        if not tables:
            data.others = {name: read_table(path / name) for name in other_tables(path)}
        return data

    def write(self, *, remove_others: bool = False) -> None:
        """Write every non-empty table, as well as spk2utt and client2utt.

        With `remove_others`, tables that an earlier run wrote and this one lacks are removed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if remove_others:
            for name in (*_FILES.values(), *_INVERSES, *other_tables(self.path)):
                if name not in self._tables():
                    (self.path / name).unlink(missing_ok=True)
        for name, table in self._tables().items():
            write_table(self.path / name, table)
        for utt2x, name in ((self.utt2spk, "spk2utt"), (self.utt2client, "client2utt")):
            if utt2x:
                lists = {x: " ".join(utts) for x, utts in invert(utt2x).items()}
                write_table(self.path / name, lists)

    @property
    def utterances(self) -> list[str]:
        """Return the utterance ids in C order."""
        return list(self.utt2spk)

    def check_features(self, utts: Iterable[str]) -> None:
        """Raise a `UserError` naming the file if an utterance has no entry in feats.scp."""
        if missing := next((utt for utt in utts if utt not in self.feats_scp), None):
            problem = f"no features of utterance {missing!r}"
            raise UserError(problem, path=self.path / "feats.scp", remedy="extract them")

    def recordings(self, utts: Iterable[str]) -> set[str]:
        """Return the recordings, keys of `wav_scp`, that contain some utterances."""
        if not self.segments:
            return set(utts)
        return {self.segments[utt].split()[0] for utt in utts if utt in self.segments}

    def restrict(self, keep: Collection[str], path: Path | None = None) -> DataDir:
        """Return the tables restricted to some utterances, and their speakers and recordings."""
        utts = set(keep)
        # The keys to keep, by the kinds of `keyed_by`, which knows all tables here.
        keys: dict[str | None, set[str]] = {
            "utterance": utts,
            "speaker": {spk for utt, spk in self.utt2spk.items() if utt in utts},
            "recording": self.recordings(utts),
        }

        def part(name: str, table: dict[str, str]) -> dict[str, str]:
            kept = keys[keyed_by(name)]
            return {key: value for key, value in table.items() if key in kept}

        parts = {field: part(name, getattr(self, field)) for field, name in _FILES.items()}
        others = {name: part(name, table) for name, table in self.others.items()}
        return replace(self, path=path or self.path, others=others, **parts)

    @classmethod
    def combine(cls, path: Path, inputs: Sequence[DataDir]) -> tuple[DataDir, list[str]]:
        """Combine several data directories into one, like Kaldi's combine_data.sh.

        Returns:
            The data directory, and the names of the tables left out because an input lacks them.

        Raises:
            UserError: if an utterance is duplicated, a speaker or recording differs between inputs,
                or only some inputs have segments.
        """
        everything: dict[str, dict[str, str]] = {}
        left_out = []
        names = {name for data in inputs for name in data._tables()}
        for name in sorted(names):
            tables = [data._tables().get(name, {}) for data in inputs]
            if not all(tables) and name not in PARTIAL:
                if name == "segments":
                    raise UserError("only some of the inputs have segments", path=path)
                left_out.append(name)
                continue
            merged: dict[str, str] = {}
            for data, table in zip(inputs, tables, strict=True):
                for key, value in table.items():
                    if merged.get(key, value) != value or (key in merged and name == "utt2spk"):
                        raise UserError(f"{key!r} is in another input too", path=data.path / name)
                    merged[key] = value
            everything[name] = {key: merged[key] for key in byte_order(merged)}
        named = {attribute: everything.pop(name, {}) for attribute, name in _FILES.items()}
        return cls(path, **named, others=everything), left_out

    def client_utterances(self, client: str) -> list[str]:
        """Return the utterances of one client, in C order; raise a `UserError` if it has none."""
        utts = [utt for utt, owner in self.utt2client.items() if owner == client]
        if not utts:
            problem = f"no utterance of client {client!r}"
            remedy = f"known clients: {', '.join(invert(self.utt2client)) or 'none'}"
            raise UserError(problem, path=self.path / "utt2client", remedy=remedy)
        return utts

    def _tables(self) -> dict[str, dict[str, str]]:
        """Return every non-empty table by file name, in the order of writing."""
        named = {name: getattr(self, attribute) for attribute, name in _FILES.items()}
        return {name: table for name, table in {**named, **self.others}.items() if table}


def evenly_spread(items: Sequence[str], count: int, what: str, path: str | Path) -> list[str]:
    """Return `count` evenly spaced items, in order; raise a `UserError` if there are fewer."""
    if count > len(items):
        raise UserError(f"{count} {what} requested, but there are only {len(items)}", path=path)
    return [items[i * len(items) // count] for i in range(count)]


_FILES = {
    field.name: field.name.replace("_scp", ".scp")
    for field in fields(DataDir)
    if field.name not in ("path", "others")
}
_INVERSES = ("spk2utt", "client2utt")


def keyed_by(name: str) -> str | None:
    """Return the kind of a table's keys: "utterance", "speaker", "recording", or None."""
    if name.startswith("utt2") or name in ("text", "segments", "feats.scp", "vad.scp"):
        return "utterance"
    if name.startswith("spk2") or name == "cmvn.scp":
        return "speaker"
    return "recording" if name.startswith("reco2") or name == "wav.scp" else None


def other_tables(path: Path) -> list[str]:
    """Return the names of a data directory's tables that `DataDir` has no field for, sorted."""
    known = (*_FILES.values(), *_INVERSES)
    names = (file.name for file in path.iterdir() if not file.is_dir())
    return sorted(name for name in names if keyed_by(name) and name not in known)
