"""Locations of recordings: a file of its own, or a position in a wave ark ("wav.ark:1234").

kaldiio writes wave arks, and so does ESPnet's format_wav_scp with it: each name is followed by a
WAV, or by the word AUDIO, a length, and a whole file in any audio format. Anything else that such
an ark can hold (matrices, NumPy arrays, pickles, a FLAC of unknown length) is refused by name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input

# Programs that write into a pipe put such a value for a length that they do not know yet.
UNKNOWN_LENGTH = 0x7FFF_0000
_ENTRY = re.compile(r"(.+):([0-9]{1,18})")
_RANGE = re.compile(r".+:[0-9]+\[[^\]]*\]")
_LONGEST = (1 << 31) - 1
_NO_AUDIO = {
    b"\0B": "a Kaldi matrix or vector",
    b"NPY": "a NumPy array",
    b"PKL": "a pickle",
    b"fLaC": "a FLAC of unknown length",
}


class AudioPlace(NamedTuple):
    """A file, and the offset of the audio in it; None if the audio is the whole file."""

    path: Path
    offset: int | None

    def __str__(self) -> str:
        return str(self.path) if self.offset is None else f"{self.path}:{self.offset}"


def audio_place(spec: str, path: str | Path | None = None, line: int | None = None) -> AudioPlace:
    """Return the location of the audio that a value in wav.scp names.

    A relative file name is relative to the current directory. "name:12" is byte 12 of an ark,
    unless there is a file with exactly that name.

    Raises:
        UserError: naming `path` and `line`, if the value is a pipe, several files, a range of an
            ark, or begins with "~".
    """

    def refused(problem: str, remedy: str) -> UserError:
        return UserError(problem, path=path, line=line, remedy=remedy)

    if spec.endswith("|") or spec.startswith("|"):
        # Commands in a data file would run with the permissions of the user who reads it.
        remedy = (
            "write the file's name: WAV, W64, AIFF, AU, FLAC, MP3, SPHERE and Ogg are read directly"
        )
        raise refused(f"a pipe, {spec!r}, which is not run", remedy)
    if spec.startswith("~"):
        remedy = "write the whole path: no program expands '~' within a file"
        raise refused(f"the file name {spec!r}", remedy)
    if (entry := _ENTRY.fullmatch(spec)) and not Path(spec).exists():
        place = AudioPlace(Path(entry[1]), int(entry[2]))
    elif _RANGE.fullmatch(spec) and not Path(spec).exists():
        raise refused(f"a range of an ark, {spec!r}", "name the utterance's part in segments")
    else:
        place = AudioPlace(Path(spec), None)
    if " " in spec and not place.path.exists():
        parts = [_ENTRY.fullmatch(part) or (part, part) for part in spec.split()]
        if all(Path(part[1]).is_file() for part in parts):
            remedy = "write one file with the channels in it, or name one of them"
            raise refused(f"{len(parts)} files, one for each channel, in one line", remedy)
    return place


def open_entry(place: AudioPlace) -> tuple[BinaryIO, int, int]:
    """Open a wave ark for reading bytes, and find the audio at a position in it.

    Returns:
        The opened file, the offset of the audio's own bytes, and their number.

    Raises:
        UserError: if the ark cannot be read, or the position holds no audio or truncated audio.
        ValueError: if the place is a whole file.
    """
    if place.offset is None:
        raise ValueError(f"{place} is a whole file")
    file = open_input(place.path)
    try:
        return file, *_extent(file, place.offset)
    except UserError as error:
        file.close()
        raise UserError(str(error), path=str(place)) from None


def _extent(file: BinaryIO, offset: int) -> tuple[int, int]:
    """Return the offset and the size of the audio at a byte of an ark."""
    size = os.fstat(file.fileno()).st_size
    head = os.pread(file.fileno(), 16, offset)
    if not head:
        raise UserError(f"the file has {size} bytes")
    begin = offset
    if head[:4] == b"RIFF":
        length = int.from_bytes(head[4:8], "little") + 8
        if length == 8 or length >= UNKNOWN_LENGTH:
            raise UserError("a WAV of unknown length", remedy=_REMEDY)
    elif head[:5] == b"AUDIO":
        digits = head[5] if len(head) > 5 else 0
        length = int.from_bytes(head[6 : 6 + digits], "little")
        begin = offset + 6 + digits
        if not 1 <= digits <= 8 or length > _LONGEST:
            raise UserError("a damaged header")
    else:
        kinds = (kind for start, kind in _NO_AUDIO.items() if head.startswith(start))
        raise UserError(f"{next(kinds, 'no audio')} is there, not a WAV", remedy=_REMEDY)
    if begin + length > size:
        raise UserError(f"cut off: {max(size - begin, 0)} bytes of {length}")
    return begin, length


_REMEDY = "write WAV files, or a wave ark as ESPnet's format_wav_scp does"
