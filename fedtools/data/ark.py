"""Kaldi's archives of matrices (ark/scp): atomic writing, fast reading, one-line error messages.

An scp entry is "path:offset". Paths are written absolute, as Kaldi's make_fbank.sh writes them, so
that a data directory works from any directory; a relative path in an scp from elsewhere is relative
to the current directory, as in Kaldi. Pipes and ranges ("[0:9]") in an scp are refused.

Arks are not trusted: only Kaldi's binary matrices are read (FM, DM, CM, CM2, CM3), after a check of
their sizes against the file. kaldiio alone would also unpickle objects and run pipes.
"""

from __future__ import annotations

import io
import os
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import kaldiio
import numpy as np

from fedtools.core.atomic import atomic_write
from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input
from fedtools.core.untrusted import Seal, check_seal, open_received

MAX_OPEN_FILES = 32
# A single read returns at most 2 GiB (18 hours of 80 filters), so no matrix may be larger.
MAX_MATRIX_BYTES = (1 << 31) - (1 << 16)
# Matrices at most this far apart are read together: between neighbours lies only a name.
MAX_GAP = 1 << 14
MAX_RUN_BYTES = 1 << 26
MAX_RUN_MATRICES = 256
# kaldiio's codes of Kaldi's compression methods. kAutomaticMethod takes one byte per value, or two
# in very short matrices; kTwoByteAuto and kOneByteAuto quantise evenly from minimum to maximum.
AUTOMATIC, TWO_BYTES, ONE_BYTE = 1, 3, 5
# One frame of filterbanks or MFCC every 10 ms.
FRAMES_PER_HOUR = 360_000

_HEADER_BYTES = 32
_ITEM = {b"FM": ("<f4", 4), b"DM": ("<f8", 8)}


def write_ark(
    path: str | Path, matrices: Iterable[tuple[str, np.ndarray]], *, compress: int | None = None
) -> dict[str, str]:
    """Write a sequence of matrices to a binary ark, atomically.

    Args:
        path: the ark.
        matrices: pairs of utterance and matrix (T, D), or vector (D,), float32; consumed lazily.
        compress: the lossy compression, AUTOMATIC, ONE_BYTE or TWO_BYTES; None for none.

    Returns:
        The scp: utterance -> "absolute path:offset", in the order written.
    """
    final = Path(path).absolute()
    scp = {}
    with atomic_write(final, "wb") as file:
        for utt, matrix in matrices:
            start = file.tell() + len(utt.encode("utf-8")) + 1
            matrix = np.ascontiguousarray(matrix, dtype="<f4")
            kaldiio.save_ark(file, {utt: matrix}, compression_method=compress)
            scp[utt] = f"{final}:{start}"
    return scp


class _Record(NamedTuple):
    """The position of one matrix: its kind, shape, and the bytes of its data [start, end)."""

    path: str
    offset: int
    kind: bytes
    rows: int
    columns: int
    start: int
    end: int


class FeatureReader:
    """Reader of the matrices of an scp, by utterance; safe in forked and spawned data loaders.

    Args:
        scp: utterance -> "path:offset", as `DataDir.feats_scp` holds it.
        seals: path -> seal of an ark that a client wrote; reading fails if the seal has changed.
    """

    def __init__(self, scp: Mapping[str, str], seals: Mapping[str, Seal] | None = None):
        self.scp, self.seals = scp, seals or {}
        self._records: dict[str, _Record] = {}
        self._files: OrderedDict[str, tuple[BinaryIO, int]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def shape(self, utt: str) -> tuple[int, int]:
        """Return (T, D) of one utterance, from the matrix header; errors as in `read`."""
        record = self._record(utt)
        return record.rows, record.columns

    def num_frames(self, utt: str) -> int:
        """Return T of one utterance, from the matrix header; errors as in `read`."""
        return self._record(utt).rows

    def kind(self, utt: str) -> str:
        """Return Kaldi's name of an utterance's format: "FM", "CM2", ...; errors as in `read`."""
        return self._record(utt).kind.decode("ascii")

    def extent(self, utt: str) -> tuple[int, int]:
        """Return the byte range [start, end) of one utterance in its ark; errors as in `read`."""
        record = self._record(utt)
        return record.offset, record.end

    def read(self, utt: str) -> np.ndarray:
        """Read the features of one utterance, float32 (T, D), into a new array.

        Raises:
            UserError: naming the ark and the utterance, if the utterance is not in the scp, the ark
                is missing or truncated, or the matrix is missing or has a NaN or infinite value.
        """
        return self.read_many([utt])[0]

    def read_many(self, utts: Sequence[str]) -> list[np.ndarray]:
        """Read the features of many utterances, in the given order; errors as in `read`.

        Neighbouring matrices in an ark, such as those of one client, are read in one sequential
        read, straight into the returned arrays.
        """
        records = [self._record(utt) for utt in utts]
        matrices: dict[int, np.ndarray] = {}
        order = sorted(range(len(utts)), key=lambda i: (records[i].path, records[i].start))
        with np.errstate(over="ignore", invalid="ignore"):
            for run in _runs(order, records):
                if records[run[0]].kind == b"FM":
                    arrays = self._read_run([records[i] for i in run], utts[run[0]])
                else:
                    arrays = [self._read_other(records[i], utts[i]) for i in run]
                for i, array in zip(run, arrays, strict=True):
                    if not _is_finite(array):
                        raise _damaged(records[i].path, utts[i], "a value is NaN or infinite")
                    matrices[i] = array
        for path in {record.path for record in records} & self.seals.keys():
            check_seal(self._open(path, utts[0])[0], self.seals[path], path)
        return [matrices[i] for i in range(len(utts))]

    def _read_run(self, run: list[_Record], utt: str) -> list[np.ndarray]:
        """Read uncompressed neighbours by one `preadv`: no copies, and no shared file position."""
        arrays: list[np.ndarray] = []
        buffers: list[bytearray | memoryview] = []
        position = run[0].start
        for record in run:
            if record.start > position:
                buffers.append(bytearray(record.start - position))
            arrays.append(np.empty((record.rows, record.columns), dtype="<f4"))
            buffers.append(memoryview(arrays[-1]).cast("B"))
            position = record.end
        file, _ = self._open(run[0].path, utt)
        if os.preadv(file.fileno(), buffers, run[0].start) != position - run[0].start:
            raise _damaged(run[0].path, utt, "the file ends within it")
        return arrays

    def _read_other(self, record: _Record, utt: str) -> np.ndarray:
        file, _ = self._open(record.path, utt)
        size = record.end - record.offset
        data = os.pread(file.fileno(), size, record.offset)
        if len(data) != size:
            raise _damaged(record.path, utt, "the file ends within it")
        if record.kind == b"DM":
            data = data[record.start - record.offset :]
            return np.frombuffer(data, "<f8").astype("<f4").reshape(record.rows, record.columns)
        matrix = kaldiio.matio.read_kaldi(io.BytesIO(data))
        return np.ascontiguousarray(matrix, dtype="<f4")

    def _record(self, utt: str) -> _Record:
        if (record := self._records.get(utt)) is None:
            if (value := self.scp.get(utt)) is None:
                raise UserError(f"no features of utterance {utt!r}", remedy="extract them")
            path, offset = _parse_entry(value, utt)
            file, size = self._open(path, utt)
            header = os.pread(file.fileno(), _HEADER_BYTES, offset)
            record = self._records[utt] = _parse_header(header, path, offset, size, utt)
        return record

    def _open(self, path: str, utt: str) -> tuple[BinaryIO, int]:
        """Return an open file and its size; close the least recently used of too many files."""
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        if path in self.seals:
            file = open_received(path, seal=self.seals[path])
        else:
            remedy = f"extract the features of {utt!r} again, or fix the path in feats.scp"
            file = open_input(path, remedy=remedy)
        while len(self._files) >= MAX_OPEN_FILES:
            self._files.popitem(last=False)[1][0].close()
        self._files[path] = file, os.fstat(file.fileno()).st_size
        return self._files[path]


def _is_finite(matrix: np.ndarray) -> bool:
    # The sum is fast to compute, and finite unless there are very large values.
    return bool(np.isfinite(matrix.sum()) or np.isfinite(matrix).all())


def _runs(order: list[int], records: list[_Record]) -> Iterable[list[int]]:
    """Split indices sorted by place into runs of uncompressed neighbours."""
    run: list[int] = []
    for i in order:
        if run:
            record, last = records[i], records[run[-1]]
            near = record.path == last.path and 0 <= record.start - last.end <= MAX_GAP
            small = record.end - records[run[0]].start <= MAX_RUN_BYTES
            both_plain = record.kind == last.kind == b"FM"
            if not (near and small and both_plain and len(run) < MAX_RUN_MATRICES):
                yield run
                run = []
        run.append(i)
    if run:
        yield run


def _parse_entry(value: str, utt: str) -> tuple[str, int]:
    path, colon, offset = value.rpartition(":")
    if value.endswith(("|", "]")) or value.startswith("|"):
        problem = f"the features of utterance {utt!r} are {value!r}"
        remedy = "pipes and ranges are not read: make a plain ark with copy-feats"
        raise UserError(problem, remedy=remedy)
    if not colon or not (offset.isascii() and offset.isdecimal()):
        return value, 0
    if len(offset) > 18:
        raise _damaged(path, utt, f"no file is {offset} bytes long")
    return path, int(offset)


def _parse_header(header: bytes, path: str, offset: int, size: int, utt: str) -> _Record:
    """Parse a matrix header and check it against the file's size, before anything is allocated."""
    if offset >= size:
        raise _damaged(path, utt, f"it should be at byte {offset}, the file has {size}")
    if not header.startswith(b"\0B"):
        raise _damaged(path, utt, f"no binary matrix at byte {offset}")
    kind = header[2:].split(b" ", 1)[0]
    place = 3 + len(kind)
    try:
        if kind in _ITEM:
            mark_rows, rows, mark_columns, columns = struct.unpack_from("<cici", header, place)
            if not mark_rows == mark_columns == b"\4":
                raise _damaged(path, utt, f"a wrong header at byte {offset}")
            place, data_bytes = place + 10, rows * columns * _ITEM[kind][1]
        elif kind in (b"CM", b"CM2", b"CM3"):
            _, _, rows, columns = struct.unpack_from("<ffii", header, place)
            place, data_bytes = place + 16, rows * columns * (2 if kind == b"CM2" else 1)
            # CM stores four 16-bit percentiles of every column before the data.
            data_bytes += 8 * columns if kind == b"CM" else 0
        else:
            raise _damaged(path, utt, f"{kind[:8]!r} is no kind of matrix, at byte {offset}")
    except struct.error:
        raise _damaged(path, utt, "the file ends within its header") from None
    if rows <= 0 or columns <= 0 or max(data_bytes, 4 * rows * columns) > MAX_MATRIX_BYTES:
        raise _damaged(path, utt, f"a matrix of {rows} x {columns} at byte {offset}")
    start = offset + place
    if start + data_bytes > size:
        raise _damaged(
            path, utt, f"{rows} x {columns} need {data_bytes} bytes, the file has {size - start}"
        )
    return _Record(path, offset, kind, rows, columns, start, start + data_bytes)


def _damaged(path: str, utt: str, problem: str) -> UserError:
    return UserError(
        f"the features of utterance {utt!r} are damaged: {problem}",
        path=path,
        remedy="extract the features again",
    )
