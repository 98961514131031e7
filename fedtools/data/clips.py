"""Clips of equal length for keyword spotting: all waveforms in one file, and an index.

    clips.npy    int16 (clips, samples) at 16 kHz: short clips are zero-padded, long ones were cut
    clip_samples number of samples of a clip; if the file is missing, 16000, one second
    labels.npy   int64 (clips,): the class index of each clip
    clients.tsv  client clips: the clients in C order, and how many clips each has
    classes.txt  the labels, one per line; the line of a label, from 0, is its index
    noise.npy    int16 (samples,): all recordings of background noise end to end, or none
    clips.tsv    utterance client label samples: a row for each clip; samples is its true length
    sha256sums   sums of all these files, for sha256sum -c: the fingerprint of the data

Clips are in C order of client and utterance, so that the data of one client are one read. Arrays
are memory-mapped, so that processes share them. clips.tsv repeats the index for human readers; it
is slow to read and large in memory with millions of clips, so only utterance ids are read from it,
and only when they are needed. It is written last: without it there are no clips.
"""

from __future__ import annotations

import operator
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

import numpy as np

from fedtools.core.atomic import atomic_path, atomic_write, sha256, write_text
from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input, read_lines, read_words
from fedtools.data.datadir import ID_PATTERN, check_id, check_label

RATE = 16_000
CLIP_SAMPLES = 16_000
# One minute: a clip of a word cannot be longer.
MOST_SAMPLES = 60 * RATE
COLUMNS = ("utterance", "client", "label", "samples")
CLIENT_COLUMNS = ("client", "clips")
LENGTH = "clip_samples"
INDEX = ("classes.txt", "clients.tsv", "labels.npy")
"""The files that are compared with sha256sums at every opening; all others are too large."""

_REMEDY = "run fedtools pack-clips again"
_CLIENT = re.compile(rf"({ID_PATTERN.pattern})\t([1-9][0-9]{{0,11}})")
# The label counts of this many clients take a few megabytes.
_CLIENTS_AT_ONCE = 4096


class Clip(NamedTuple):
    """One clip to write; `wave` is int16 (N,) at 16 kHz, of any length above 0."""

    utterance: str
    client: str
    label: str
    wave: np.ndarray


@dataclass(frozen=True)
class Clips:
    """All clips of a folder; waveforms and labels stay on disk until they are indexed.

    Attributes:
        path: the folder.
        clients: the client ids, in C order.
        edges: int64 (clients + 1,), the first clip of each client, and the total number of clips.
        classes: the labels, in the order of their indices.
        labels: int64 (clips,), class indices, memory-mapped; writes are private to the process.
        waves: int16 (clips, samples), memory-mapped.
        noise: int16 (samples,), memory-mapped; empty if there is no noise.
    """

    path: Path
    clients: list[str]
    edges: np.ndarray
    classes: list[str]
    labels: np.ndarray
    waves: np.ndarray
    noise: np.ndarray

    @classmethod
    def read(cls, folder: str | Path) -> Clips:
        """Read a folder that `write_clips` has written.

        Raises:
            UserError: naming the file, if a file is missing, damaged, or of a size that does not
                fit the others, clients are out of order, a label is no class, or the index does not
                match sha256sums.
        """
        folder = Path(folder)
        if not (folder / "clips.tsv").exists():
            remedy = "run fedtools pack-clips"
            raise UserError("no packed clips", path=folder / "clips.tsv", remedy=remedy)
        classes = read_classes(folder / "classes.txt")
        samples = read_length(folder)
        waves = _map_npy(folder / "clips.npy", (samples,))
        noise = _map_npy(folder / "noise.npy", ())
        check_noise(len(noise), folder / "noise.npy", samples)
        # Mapped as writable (copy on write), so that torch takes it without a copy or a warning.
        labels = _map_npy(folder / "labels.npy", (), "<i8", "c")
        clients, edges = _read_clients(folder / "clients.tsv")
        for name, clips in (("labels.npy", len(labels)), ("clients.tsv", int(edges[-1]))):
            if clips != len(waves):
                problem = f"{clips} clips, but {len(waves)} in clips.npy"
                raise UserError(problem, path=folder / name, remedy=_REMEDY)
        # Viewed as unsigned, a negative number is a large one.
        worst = int(labels.view("<u8").argmax())
        if not 0 <= labels[worst] < len(classes):
            problem = f"clip {worst} has label {labels[worst]} of {len(classes)} classes"
            raise UserError(problem, path=folder / "labels.npy", remedy=_REMEDY)
        check_sums(folder, (*INDEX, LENGTH) if samples != CLIP_SAMPLES else INDEX)
        return cls(folder, clients, edges, classes, labels, waves, noise)

    @property
    def samples(self) -> int:
        """Return the number of samples of a clip."""
        return int(self.waves.shape[1])

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of clips of each client: int64 (clients,)."""
        return np.diff(self.edges)

    @cached_property
    def utterances(self) -> list[str]:
        """Read the clips' utterance ids from clips.tsv, in the order of the file.

        Raises:
            UserError: if clips.tsv is not the table that was packed.
        """
        table = self.path / "clips.tsv"
        check_sums(self.path, (table.name,))
        with open(table, encoding="ascii", errors="replace", newline="\n") as rows:
            next(rows, "")
            return [row.partition("\t")[0] for row in rows]

    def rows(self, client: str) -> slice:
        """Return the rows of one client's clips; raise a `UserError` if there is no such client."""
        index = bisect_left(self.clients, client)
        if self.clients[index : index + 1] != [client]:
            raise UserError(f"no clip of client {client!r}", remedy="pack data that include it")
        return slice(int(self.edges[index]), int(self.edges[index + 1]))

    def taken(self, rows: Sequence[tuple[Clips, int]], client: str) -> Clips:
        """Return a selection of clips, from these and similar data, in memory, as one client's."""
        waves = np.stack([clips.waves[row] for clips, row in rows])
        labels = np.array([clips.labels[row] for clips, row in rows])
        edges = np.array([0, len(rows)])
        return replace(self, clients=[client], edges=edges, labels=labels, waves=waves)

    def entropies(self) -> np.ndarray:
        """Return each client's label entropy over log(classes), 0 to 1: float64 (clients,)."""
        # With a single class, the entropy is 0.
        classes, most = len(self.classes), np.log(max(len(self.classes), 2))
        found = []
        for first in range(0, len(self.clients), _CLIENTS_AT_ONCE):
            edges = self.edges[first : first + _CLIENTS_AT_ONCE + 1]
            sizes = np.diff(edges)
            cells = np.repeat(np.arange(len(sizes)) * classes, sizes)
            cells += self.labels[edges[0] : edges[-1]]
            counts = np.bincount(cells, minlength=len(sizes) * classes).reshape(-1, classes)
            share = counts / sizes[:, None]
            # 0 log 0 is 0.
            found.append(abs((share * np.log(share + (counts == 0))).sum(1)) / most)
        return np.concatenate(found)


def read_classes(path: str | Path) -> list[str]:
    """Read the labels of a keyword task; the line of a label, from 0, is its index."""
    classes = read_words(path, "write one label per line")
    for line, label in enumerate(classes, 1):
        check_label(label, "class", path, line)
    return classes


def read_length(folder: str | Path) -> int:
    """Read the number of samples of the clips of a folder, or of an experiment's data.

    Raises:
        UserError: if the file with the number is damaged.
    """
    path = Path(folder) / LENGTH
    if not path.exists():
        return CLIP_SAMPLES
    (text, *more) = read_lines(path, _REMEDY) or [""]
    if more or not re.fullmatch("[1-9][0-9]{0,6}", text) or int(text) > MOST_SAMPLES:
        raise UserError("not a number of samples", path=path, remedy=_REMEDY)
    return int(text)


def write_clips(
    folder: str | Path,
    clips: Iterable[Clip],
    classes: Iterable[str],
    noise: Iterable[np.ndarray] = (),
    length: int = CLIP_SAMPLES,
) -> None:
    """Write clips one by one; the files appear when all clips are written.

    Args:
        folder: the folder for the files that the module docstring lists.
        clips: the clips in C order of client and utterance; consumed lazily.
        classes: the labels, in the order of their indices.
        noise: recordings of background noise, int16 (N,) at 16 kHz.
        length: samples of each clip; longer clips are cut, and shorter ones zero-padded.

    Raises:
        UserError: if an id or a class cannot be used.
        ValueError: if a clip is out of order, empty, or of no class.
    """
    folder = Path(folder)
    classes = [check_label(label, "class") for label in classes]
    labels, sizes = array("q"), dict[str, int]()
    with atomic_path(folder / "clips.tsv") as table:
        with (
            atomic_path(folder / "noise.npy") as noise_path,
            atomic_path(folder / "clips.npy") as clips_path,
            open(table, "w", encoding="utf-8", newline="\n") as rows,
        ):
            _write_npy(noise_path, noise, ())
            waves = _take_down(clips, classes, rows, labels, sizes, length)
            _write_npy(clips_path, waves, (length,))
            # After a kill here, the old table must not be taken for that of the new waveforms.
            (folder / "clips.tsv").unlink(missing_ok=True)
        (folder / LENGTH).unlink(missing_ok=True)
        if length != CLIP_SAMPLES:
            write_text(folder / LENGTH, f"{length}\n")
        write_text(folder / "classes.txt", "".join(f"{label}\n" for label in classes))
        with atomic_write(folder / "clients.tsv") as file:
            file.write("\t".join(CLIENT_COLUMNS) + "\n")
            file.writelines(f"{client}\t{size}\n" for client, size in sizes.items())
        with atomic_write(folder / "labels.npy", "wb") as file:
            np.save(file, np.array(labels, "<i8"))
        names = [*INDEX, "clips.npy", "noise.npy", *([LENGTH] if length != CLIP_SAMPLES else [])]
        files = {name: folder / name for name in names}
        lines = [sum_line(path, name) for name, path in (files | {"clips.tsv": table}).items()]
        write_text(folder / "sha256sums", "".join(f"{line}\n" for line in lines))


def _take_down(
    clips: Iterable[Clip],
    classes: list[str],
    table: TextIO,
    labels: array[int],
    sizes: dict[str, int],
    length: int,
) -> Iterator[np.ndarray]:
    """Yield padded or cut waveforms, int16 (1, length), and record the clips' metadata."""
    numbers = {label: number for number, label in enumerate(classes)}
    previous = ("", "")
    table.write("\t".join(COLUMNS) + "\n")
    for clip in clips:
        utterance = check_id(clip.utterance, "utterance")
        client, samples = check_id(clip.client, "client"), len(clip.wave)
        # Ids are ASCII, so that this is the C locale's order.
        if previous >= (client, utterance) or clip.label not in numbers or not samples:
            problem = "out of order, empty, or of no class"
            raise ValueError(f"{problem}: {utterance} {client} {clip.label!r} {samples}")
        previous = client, utterance
        sizes[client] = sizes.get(client, 0) + 1
        labels.append(numbers[clip.label])
        table.write(f"{utterance}\t{client}\t{clip.label}\t{samples}\n")
        wave = np.zeros((1, length), dtype="<i2")
        wave[0, :samples] = clip.wave[:length]
        yield wave


def sum_line(path: Path, name: str) -> str:
    """Return the line of sha256sums for a file that is called `name` there, without a line end."""
    return f"{sha256(path)}  {name}"


def check_sums(folder: Path, names: Iterable[str]) -> None:
    """Raise a `UserError` if a file is not as it was packed, by its sum in sha256sums."""
    known = read_lines(folder / "sha256sums", _REMEDY)
    for name in names:
        if sum_line(folder / name, name) not in known:
            problem = f"not the file that was packed: {name} has another sum"
            raise UserError(problem, path=folder / "sha256sums", remedy=_REMEDY)


def check_noise(samples: int, path: str | Path, length: int = CLIP_SAMPLES) -> None:
    """Raise a `UserError` if there is background noise, but too little of it to fill a clip."""
    if 0 < samples < length:
        problem = f"{samples} samples of noise, a clip has {length}"
        remedy = "give longer recordings, or none"
        raise UserError(problem, path=path, remedy=remedy)


def _read_clients(path: Path) -> tuple[list[str], np.ndarray]:
    """Read the client ids and their `edges`; raise a `UserError` naming a malformed line."""
    header, *lines = read_lines(path, _REMEDY) or [""]
    if header != "\t".join(CLIENT_COLUMNS) or not lines:
        problem = "no clients" if not lines else f"the header is {header[:80]!r}"
        raise UserError(problem, path=path, line=1, remedy=_REMEDY)
    clients, sizes = [], array("q", [0])
    for number, line in enumerate(lines, 2):
        match = _CLIENT.fullmatch(line)
        if not match:
            problem = f"{line[:80]!r} is not a client and its number of clips"
            raise UserError(problem, path=path, line=number, remedy=_REMEDY)
        clients.append(match[1])
        sizes.append(int(match[2]))
    # Ids are ASCII, so that this is the C locale's order.
    rises = map(operator.lt, clients, clients[1:])
    if number := next((n for n, rise in enumerate(rises, 3) if not rise), 0):
        problem = f"client {clients[number - 2]!r} is not in order"
        raise UserError(problem, path=path, line=number, remedy=_REMEDY)
    return clients, np.cumsum(sizes)


def _write_npy(path: Path, arrays: Iterable[np.ndarray], columns: tuple[int, ...]) -> None:
    """Write arrays (n, *columns) end to end as one int16 array in numpy's format."""
    with open(path, "wb") as file:
        _write_header(file, (0, *columns))
        rows = 0
        for array in arrays:
            file.write(np.ascontiguousarray(array, dtype="<i2"))
            rows += len(array)
        # numpy reserves room for a growing first dimension, so the header's length stays the same.
        file.seek(0)
        _write_header(file, (rows, *columns))


def _write_header(file: BinaryIO, shape: tuple[int, ...]) -> None:
    description = {"descr": "<i2", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, description)


def _map_npy(
    path: Path, columns: tuple[int, ...], dtype: str = "<i2", mode: str = "r"
) -> np.ndarray:
    """Map an array (n, *columns) in numpy's format, after its size has been checked."""
    with open_input(path, remedy=_REMEDY) as file:
        size = os.fstat(file.fileno()).st_size
    try:
        found: np.memmap | None = np.lib.format.open_memmap(path, mode)
    except Exception:
        # numpy raises many kinds of errors for a damaged header.
        found = None
    if found is None or found.dtype.str != dtype or not found.flags.c_contiguous:
        problem = f"damaged: no header of {8 * np.dtype(dtype).itemsize}-bit integers"
        raise UserError(problem, path=path, remedy=_REMEDY)
    if found.shape[1:] != columns:
        wanted = " x ".join(["n", *map(str, columns)])
        problem = f"{' x '.join(map(str, found.shape))} integers, {wanted} are expected"
        raise UserError(problem, path=path, remedy=_REMEDY)
    if size != found.offset + found.nbytes:
        problem = f"damaged: {size} bytes, {found.offset + found.nbytes} are expected"
        raise UserError(problem, path=path, remedy=_REMEDY)
    return found
