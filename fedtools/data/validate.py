"""Checks of a data directory: those of Kaldi's validate_data_dir.sh, and some that it lacks."""

from __future__ import annotations

import itertools
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.data.ark import FeatureReader
from fedtools.data.audio_files import AudioPlace, audio_place, open_entry
from fedtools.data.datadir import (
    MAX_OVERSHOOT,
    PARTIAL,
    byte_order,
    check_ids,
    invert,
    keyed_by,
    other_tables,
    parse_segment,
    read_table,
)
from fedtools.data.symbols import JOINERS, check_sentence

Tables = Mapping[str, Mapping[str, str]]
# Faults, one after the other: the table, its line if known, the problem, and the remedy if any.
Faults = Iterator[tuple[str, int | None, str, str | None]]

# The options of utils/validate_data_dir.py for tables that may be absent.
OPTIONS = {"text": "--no-text", "wav.scp": "--no-wav", "feats.scp": "--no-feats"}


def inverted(name: str, other: str) -> str:
    """Return what to do to make one of two tables, of which each is the other inverted."""
    if name.startswith("utt2"):
        program = "{for (n = 2; n <= NF; n++) print $n, $1}"
    else:
        program = '{a[$2] = a[$2] " " $1} END {for (x in a) print x a[x]}'
    return f"make it with: awk '{program}' {other} | LC_ALL=C sort >{name}"


# How to make the tables that a data directory must have.
_MAKE = {
    "utt2spk": "write a line for each utterance: <utterance> <speaker>",
    "spk2utt": inverted("spk2utt", "utt2spk"),
    "text": "write a line for each utterance: <utterance> <words>",
    "wav.scp": "write a line for each recording: <recording> <file>",
    "feats.scp": "make it with fedtools extract-features",
}
# Tables with one positive number per line.
NUMBERS = {"utt2dur", "reco2dur", "utt2num_frames", "utt2speed"}
# Tables with one word per line; other utt2* maps may hold anything.
WORDS = {"utt2spk", "utt2client", "utt2lang", "utt2uniq"}


@dataclass(frozen=True)
class Summary:
    """The content of a valid data directory; clients and hours are 0 if they are not given."""

    utterances: int
    speakers: int
    clients: int
    hours: float

    def __str__(self) -> str:
        parts = [f"{self.utterances} utterances", f"{self.speakers} speakers"]
        if self.clients:
            parts.append(f"{self.clients} clients")
        if self.hours:
            parts.append(f"{self.hours:.2f} hours")
        return ", ".join(parts)


def validate_data_dir(
    data_dir: str | Path,
    *,
    feats: bool = True,
    text: bool = True,
    wav: bool = True,
    recording_seconds: Callable[[str], float] | None = None,
) -> Summary:
    """Check every table of a data directory, and that the tables fit together.

    Args:
        data_dir: the directory.
        feats: whether feats.scp is required, and all features are read, to check that each value is
            a finite number. Files that exist are checked in any case, as in Kaldi.
        text: whether text is required.
        wav: whether wav.scp is required.
        recording_seconds: returns the length of a recording from its value in wav.scp; without it,
            segments are not compared with their recordings.

    Raises:
        UserError: for the first fault, naming file and line.
    """
    path = Path(data_dir)
    if not path.is_dir():
        raise UserError("no such data directory", path=path)
    required = {"utt2spk": True, "spk2utt": True, "text": text, "wav.scp": wav, "feats.scp": feats}
    for name, needed in required.items():
        if needed and not (path / name).exists():
            option, remedy = OPTIONS.get(name), _MAKE[name]
            remedy += f", or pass {option} if it is not needed" if option else ""
            raise UserError("not there", path=path / name, remedy=remedy)
    names = [*required, "segments", "utt2dur", "utt2num_frames", "utt2client", "client2utt"]
    names += other_tables(path)
    # A link to nowhere is not an absent table.
    tables = {name: read_table(path / name) for name in names if os.path.lexists(path / name)}
    for line, sentence in enumerate(tables.get("text", {}).values(), 1):
        check_sentence(sentence, path / "text", line)
    faults = itertools.chain(
        *(_value_faults(name, table) for name, table in tables.items()),
        _speaker_faults(tables["utt2spk"]),
        _inverse_faults(tables, "utt2spk", "spk2utt"),
        _key_faults(tables),
        _inverse_faults(tables, "utt2client", "client2utt"),
        _audio_faults(path, tables, recording_seconds),
        _feature_faults(tables, feats),
    )
    for name, at, problem, how in faults:
        raise UserError(problem, path=path / name, line=at, remedy=how)
    for name, table in tables.items():
        check_ids(table, path / name)
    return Summary(
        len(tables["utt2spk"]),
        len(tables["spk2utt"]),
        len(tables.get("client2utt", ())),
        math.fsum(map(float, tables.get("utt2dur", {}).values())) / 3600,
    )


def _value_faults(name: str, table: Mapping[str, str]) -> Faults:
    """Yield the faults of single lines."""
    if not table:
        yield name, None, "empty", "remove it or make it again"
    for line, (key, value) in enumerate(table.items(), 1):
        if not (key.isprintable() and value.translate(JOINERS).isprintable()):
            problem = "a character that does not print, or whitespace other than a space"
            yield name, line, problem, "see it with: grep -nP '[^[:print:]]'"
        if name in WORDS and " " in value:
            yield name, line, f"{len(value.split()) + 1} fields", "write two"
        if name in NUMBERS and not _positive(value, whole=name == "utt2num_frames"):
            yield name, line, f"{value!r} is not a positive number", None
        if name == "spk2gender" and value not in ("m", "f"):
            yield name, line, f"{value!r} is neither m nor f", None
        if name in ("spk2warp", "utt2warp") and not (_positive(value) and 0.5 < float(value) < 1.5):
            yield name, line, f"{value!r} is not between 0.5 and 1.5", None
        if name == "reco2file_and_channel" and not re.fullmatch("[^ ]+ [AB]", value):
            yield name, line, f"{value!r} is not a file and a channel, A or B", None


def _positive(value: str, *, whole: bool = False) -> bool:
    # float() alone would accept other scripts' digits, underscores and "inf".
    pattern = r"\d{1,15}" if whole else r"\d{1,15}(\.\d{1,15})?(e[+-]?\d\d?)?"
    return re.fullmatch(pattern, value, re.ASCII) is not None and float(value) > 0


def _speaker_faults(utt2spk: Mapping[str, str]) -> Faults:
    previous = b""
    for line, (utt, speaker) in enumerate(utt2spk.items(), 1):
        if not utt.startswith(speaker):
            problem = f"utterance {utt!r} does not begin with its speaker {speaker!r}"
            yield "utt2spk", line, problem, f"name it {speaker}-{utt}"
        if speaker.encode("utf-8") < previous:
            # Kaldi's tools iterate over utterances and speakers in parallel.
            problem = f"speaker {speaker!r} is not in order, though the utterances are"
            remedy = "join speaker and utterance by '-', which sorts before letters and digits"
            yield "utt2spk", line, problem, remedy
        previous = speaker.encode("utf-8")


def _inverse_faults(tables: Tables, forward: str, backward: str) -> Faults:
    """Yield faults unless `backward` is `forward` inverted, line by line, or neither exists."""
    if forward not in tables and backward not in tables:
        return
    for name, other in ((forward, backward), (backward, forward)):
        if name not in tables:
            yield name, None, "not there", f"{other} is there: {inverted(name, other)}"
    expected = {x: " ".join(utts) for x, utts in invert(tables[forward]).items()}
    yield from _set_faults(tables, backward, _lines(tables[forward].values()), forward)
    for line, (x, utts) in enumerate(tables[backward].items(), 1):
        if utts != expected[x]:
            problem = f"the utterances of {x!r} are not those of {forward}, in order"
            yield backward, line, problem, f"make {backward} again from {forward}"


def _lines(keys: Iterable[str]) -> dict[str, int]:
    """Return key -> its first line, for the keys of a table line by line."""
    lines: dict[str, int] = {}
    for line, key in enumerate(keys, 1):
        lines.setdefault(key, line)
    return lines


def _set_faults(tables: Tables, name: str, expected: Mapping[str, int], other: str) -> Faults:
    """Yield faults unless a table's keys are as expected, a map to lines in the table `other`.

    Keys may be missing only in a partial table.
    """
    for line, key in enumerate(tables[name], 1):
        if key not in expected:
            yield name, line, f"{key!r} is not in {other}", "remove it"
    if name in PARTIAL:
        return
    if missing := byte_order(set(expected) - set(tables[name])):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problem = f"{missing[0]!r}{more} missing, though in {other}:{expected[missing[0]]}"
        yield name, None, problem, f"add what is missing, or remove it from {other}"


def _key_faults(tables: Tables) -> Faults:
    """Yield tables' faulty keys: of utterances by utt2spk, speakers by spk2utt, and recordings."""
    segments = tables.get("segments")
    if segments and "wav.scp" not in tables:
        yield "segments", None, "there are segments, but no wav.scp", None
    utterances = (_lines(tables["utt2spk"]), "utt2spk")
    keys = {
        "utterance": utterances,
        "speaker": (_lines(tables["spk2utt"]), "spk2utt"),
        "recording": utterances,
    }
    if segments:
        keys["recording"] = _lines(value.split()[0] for value in segments.values()), "segments"
    for name in tables:
        if name not in ("utt2spk", "spk2utt") and (kind := keyed_by(name)):
            yield from _set_faults(tables, name, *keys[kind])


def _size(path: Path) -> int | None:
    """Return the size of a file; None if it is missing, or cannot be, such as of a long name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _audio_faults(
    path: Path, tables: Tables, recording_seconds: Callable[[str], float] | None
) -> Faults:
    """Yield audio files that are missing or empty, and segments outside their recording."""
    for line, (recording, spec) in enumerate(tables.get("wav.scp", {}).items(), 1):
        place = audio_place(spec, path / "wav.scp", line)
        problem = ""
        if (size := _size(place.path)) is None:
            problem = f"is not there: {spec}"
        elif size == 0:
            problem = f"is empty: {spec}"
        elif place.offset is not None:
            problem = _entry_problem(place)
        if problem:
            yield "wav.scp", line, f"the audio of {recording!r} {problem}", None
    seconds: dict[str, float] = {}
    for line, value in enumerate(tables.get("segments", {}).values(), 1):
        recording, start, end = parse_segment(value, path / "segments", line)
        if recording_seconds is None:
            continue
        if recording not in seconds:
            seconds[recording] = recording_seconds(tables["wav.scp"][recording])
        if start >= seconds[recording] or end > seconds[recording] + MAX_OVERSHOOT:
            within = f"{recording!r} of {seconds[recording]:.2f} s"
            yield "segments", line, f"{start} to {end} s is not within {within}", None


def _entry_problem(place: AudioPlace) -> str:
    """Return the reason why there is no audio at a place in an ark; "" if there is."""
    try:
        open_entry(place)[0].close()
    except UserError as error:
        return f"cannot be read: {error}"
    return ""


def _feature_faults(tables: Tables, values: bool) -> Faults:
    """Yield damaged matrices, different dimensions, and frame counts unlike utt2num_frames.

    With `values`, matrices are read whole, so that all that `FeatureReader` refuses is found.
    """
    scp, counts = tables.get("feats.scp", {}), tables.get("utt2num_frames", {})
    reader = FeatureReader(scp)
    dimension = None
    for line, utt in enumerate(scp, 1):
        try:
            frames, columns = reader.read(utt).shape if values else reader.shape(utt)
        except UserError as error:
            yield "feats.scp", line, str(error), None
            return
        if columns != (dimension := dimension or columns):
            problem = f"{utt!r} has {columns} filters, earlier utterances {dimension}"
            remedy = "extract all features again with the same options"
            yield "feats.scp", line, problem, remedy
        if utt in counts and int(counts[utt]) != frames:
            problem = f"{utt!r} has {counts[utt]} frames, its matrix {frames}"
            yield "utt2num_frames", _lines(counts)[utt], problem, None
