"""Clips of one second, as the keyword engine reads them: all waveforms in one file, and a table.

    clips.npy    int16 (clips, 16000) at 16 kHz: shorter clips end in zeros, longer ones were cut
    clips.tsv    utterance client label samples: a row for each clip; samples is its true length
    classes.txt  the labels, one a line; the line of a label, from 0, is its index
    noise.npy    int16 (samples,): all recordings of background noise end to end, or none
    sha256sums   of the four, as sha256sum -c reads them: what tells these data from others

Clips are in C order of client and utterance, so that the data of one client are one read. The
table is written last: without it there are no clips.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fedtools.files.atomic import atomic_path, sha256, write_text
from fedtools.files.datadir import check_id
from fedtools.files.errors import UserError
from fedtools.files.lines import open_input, read_lines
from fedtools.files.tables import count, read_tsv, write_tsv

RATE = 16_000
CLIP_SAMPLES = 16_000
COLUMNS = ("utterance", "client", "label", "samples")

_REMEDY = "run fedtools pack-clips again"
# What numpy.save writes for little-endian int16 in C order, and nothing else: numpy's own reader
# evaluates the header as Python, and fails in many ways on a damaged one.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '<i2', 'fortran_order': False, "
    rb"'shape': \((\d{1,15}), ?(\d{0,15})\), \} *\n",
    re.DOTALL,
)
_HEADER_BYTES = 128


class Clip(NamedTuple):
    """One clip to be written; `wave` is int16 (N,) at 16 kHz, of any length above 0."""

    utterance: str
    client: str
    label: str
    wave: np.ndarray


@dataclass(frozen=True)
class Clips:
    """All clips of a folder; the waveforms stay on disk until they are indexed.

    Attributes:
        path: the folder.
        utterances: the clips' utterance ids, in the order of the file.
        clients: the client ids, in C order.
        classes: the labels, in the order of their indices.
        labels: int64 (clips,), class indices.
        waves: int16 (clips, 16000), memory-mapped.
        noise: int16 (samples,), memory-mapped; no samples where there is no noise.
    """

    path: Path
    utterances: list[str]
    clients: list[str]
    classes: list[str]
    labels: np.ndarray
    waves: np.ndarray
    noise: np.ndarray
    _rows: dict[str, slice]

    @classmethod
    def read(cls, folder: str | Path) -> Clips:
        """Read a folder that `write_clips` has written.

        Raises:
            UserError: naming file and line, if a file is missing, damaged or of another size than
                the table says, a row is out of order, a label is no class, or the table or the
                classes are not those that sha256sums has.
        """
        folder = Path(folder)
        table = folder / "clips.tsv"
        if not table.exists():
            raise UserError("no packed clips", path=table, remedy="run fedtools pack-clips")
        classes = read_classes(folder / "classes.txt")
        waves = _map_npy(folder / "clips.npy", (CLIP_SAMPLES,))
        noise = _map_npy(folder / "noise.npy", ())
        check_noise(len(noise), folder / "noise.npy")
        rows = read_tsv(table, COLUMNS)
        if len(rows) != len(waves) or not rows:
            problem = f"{len(rows)} clips, but {len(waves)} in clips.npy"
            raise UserError(problem, path=table, remedy=_REMEDY)
        _check_rows(rows, table)
        index = {label: number for number, label in enumerate(classes)}
        for line, row in enumerate(rows, 2):
            if row["label"] not in index:
                problem = f"the label {row['label']!r} is not in classes.txt"
                raise UserError(problem, path=table, line=line, remedy=_REMEDY)
        _check_sums(folder, ("classes.txt", "clips.tsv"))
        labels = np.array([index[row["label"]] for row in rows], dtype=np.int64)
        slices = _client_slices([row["client"] for row in rows])
        utterances = [row["utterance"] for row in rows]
        return cls(folder, utterances, list(slices), classes, labels, waves, noise, slices)

    def rows(self, client: str) -> slice:
        """The rows of one client's clips; a `UserError` if there is no such client."""
        if client not in self._rows:
            raise UserError(f"no clip of client {client!r}", remedy="pack the data that has it")
        return self._rows[client]


def read_classes(path: str | Path) -> list[str]:
    """The labels of a keyword task, one a line; the line of a label, from 0, is its index.

    Raises:
        UserError: naming file and line, if there is none, or one is empty, has a blank, or comes
            twice.
    """
    classes = read_lines(path)
    if not classes:
        raise UserError("no classes", path=path, remedy="write one label a line")
    seen: set[str] = set()
    for line, label in enumerate(classes, 1):
        if label.split() != [label]:
            problem = f"{label!r} is not one label"
            raise UserError(problem, path=path, line=line, remedy="write one word a line")
        if label in seen:
            raise UserError(f"{label!r} comes twice", path=path, line=line, remedy="remove one")
        seen.add(label)
    return classes


def write_clips(
    folder: str | Path,
    clips: Iterable[Clip],
    classes: Iterable[str],
    noise: Iterable[np.ndarray] = (),
) -> None:
    """Write clips one after the other; the files appear when all are written.

    Args:
        folder: receives clips.npy, clips.tsv, classes.txt, noise.npy and sha256sums.
        clips: in C order of client and utterance; consumed one by one.
        classes: the labels, in the order of their indices.
        noise: recordings of background noise, int16 (N,) at 16 kHz.
    """
    folder = Path(folder)
    rows: list[dict[str, object]] = []

    def waves() -> Iterable[np.ndarray]:
        for clip in clips:
            wave = np.zeros((1, CLIP_SAMPLES), dtype="<i2")
            wave[0, : len(clip.wave)] = clip.wave[:CLIP_SAMPLES]
            fields = (clip.utterance, clip.client, clip.label, len(clip.wave))
            rows.append(dict(zip(COLUMNS, fields, strict=True)))
            yield wave

    with (
        atomic_path(folder / "noise.npy") as noise_path,
        atomic_path(folder / "clips.npy") as clips_path,
    ):
        _write_npy(noise_path, noise, ())
        _write_npy(clips_path, waves(), (CLIP_SAMPLES,))
        # The old table must not be taken for that of the new waveforms, should we be killed.
        (folder / "clips.tsv").unlink(missing_ok=True)
    write_text(folder / "classes.txt", "".join(f"{label}\n" for label in classes))
    with atomic_path(folder / "clips.tsv") as table:
        write_tsv(table, COLUMNS, rows)
        files = {name: folder / name for name in ("classes.txt", "clips.npy", "noise.npy")}
        lines = [sum_line(path, name) for name, path in (files | {"clips.tsv": table}).items()]
        write_text(folder / "sha256sums", "".join(f"{line}\n" for line in lines))


def sum_line(path: Path, name: str) -> str:
    """What sha256sums says of a file that is called `name` there, without a line end."""
    return f"{sha256(path)}  {name}"


def check_noise(samples: int, path: str | Path) -> None:
    """Refuse background noise, `samples` in all, that is there but too short to fill a clip."""
    if 0 < samples < CLIP_SAMPLES:
        raise UserError(
            f"{samples} samples of noise, a clip has {CLIP_SAMPLES}",
            path=path,
            remedy="give longer recordings, or none",
        )


def _check_rows(rows: list[dict[str, str]], path: Path) -> None:
    """Ids and lengths are usable, and rows in C order of client and utterance."""
    previous, seen = ("", ""), set()
    for line, row in enumerate(rows, 2):
        utterance = check_id(row["utterance"], "utterance", path, line)
        client = check_id(row["client"], "client", path, line)
        if utterance in seen:
            problem = f"{utterance!r} comes twice"
            raise UserError(problem, path=path, line=line, remedy=_REMEDY)
        # Ids are ASCII, so that this is the C locale's order.
        if (client, utterance) < previous:
            problem = f"{utterance!r} of client {client!r} is not in order"
            raise UserError(problem, path=path, line=line, remedy=_REMEDY)
        if not count(row, "samples", path, line):
            raise UserError("a clip of 0 samples", path=path, line=line, remedy=_REMEDY)
        previous = client, utterance
        seen.add(utterance)


def _check_sums(folder: Path, names: Iterable[str]) -> None:
    """The files are as they were packed: it is by their sums that experiments know their data.

    For those that an editor opens; to read all waveforms each time would be for nothing.
    """
    known = read_lines(folder / "sha256sums", _REMEDY)
    for name in names:
        if sum_line(folder / name, name) not in known:
            problem = f"not the file that was packed: {name} has another sum"
            raise UserError(problem, path=folder / "sha256sums", remedy=_REMEDY)


def _client_slices(owners: list[str]) -> dict[str, slice]:
    """client -> its rows, from the clients of all rows."""
    starts = [row for row, owner in enumerate(owners) if row == 0 or owner != owners[row - 1]]
    ends = [*starts[1:], len(owners)]
    return {owners[start]: slice(start, end) for start, end in zip(starts, ends, strict=True)}


def _write_npy(path: Path, arrays: Iterable[np.ndarray], columns: tuple[int, ...]) -> None:
    """Write arrays (n, *columns) end to end as one int16 array in numpy's format."""
    with open(path, "wb") as file:
        _write_header(file, (0, *columns))
        rows = 0
        for array in arrays:
            file.write(np.ascontiguousarray(array, dtype="<i2"))
            rows += len(array)
        # numpy leaves room for a first dimension that grows: the header keeps its length.
        file.seek(0)
        _write_header(file, (rows, *columns))


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    description = {"descr": "<i2", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, description)


def _map_npy(path: Path, columns: tuple[int, ...]) -> np.ndarray:
    """Map an int16 array (n, *columns) in numpy's format, after its size has been checked."""
    with open_input(path, remedy=_REMEDY) as file:
        header = _HEADER.match(file.read(_HEADER_BYTES))
    size = path.stat().st_size
    if not header:
        raise UserError("damaged: no header of 16-bit samples", path=path, remedy=_REMEDY)
    shape = tuple(int(number) for number in header.groups() if number)
    if shape[1:] != columns:
        wanted = " x ".join(["n", *map(str, columns)])
        problem = f"{' x '.join(map(str, shape))} samples, {wanted} are expected"
        raise UserError(problem, path=path, remedy=_REMEDY)
    if size != header.end() + 2 * math.prod(shape):
        problem = f"damaged: {size} bytes, {header.end() + 2 * math.prod(shape)} are expected"
        raise UserError(problem, path=path, remedy=_REMEDY)
    return np.memmap(path, "<i2", "r", header.end(), shape)
