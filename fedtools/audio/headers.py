"""Checks of the audio length in a file's header against the audio in the file.

One rule holds for all formats: less audio than the header reports is "cut off", more means that the
header belongs to other audio, and both are refused. A header without a length, because it was
written to a pipe or its writer was killed, is accepted, and all audio is read: it reports 0
although audio follows, or a length that no file has. What is compared:

WAV, RF64,  bytes of the data chunk; other chunks, a tag, or the file's end have to follow it
BW64
W64         the same
AIFF        the same, and the sample count
AU          bytes of audio
SPHERE      the sample count, with the bytes
FLAC        the sample count, with the number in the last frame
Ogg         the last page is complete, and ends the stream
MP3         see `fedtools.audio.mpeg`
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from typing import BinaryIO

from fedtools.data.audio_files import UNKNOWN_LENGTH

# Block size of SPHERE files in bytes; the last block is padded.
_SPHERE_BLOCK = 1024
# More bytes than the longest FLAC frame: two channels of 65,535 samples of 32 bits.
_FLAC_TAIL = 1 << 20
_FLAC_FRAME = re.compile(rb"\xff[\xf8\xf9]")
# Offset in a FLAC file of five bytes: four bits of another field, and 36 of the sample count.
_FLAC_SAMPLES = 21
# Tags that programs append to a file whose format has no place for them.
_TAGS = (b"TAG", b"ID3", b"APET", b"LYRI")
# First bytes of formats that decode to other samples when the decoder starts in the middle.
LOSSY = {b"OggS"}

Checked = tuple[BinaryIO, int | None]


class LengthError(Exception):
    """A header and its audio differ in length, or the header is damaged."""


def compare(declared: int, there: int, unit: str) -> None:
    """Raise a `LengthError` unless there is as much audio as the header declares."""
    if there < declared:
        raise LengthError(f"cut off: {there} {unit} of {declared}")
    if there > declared:
        raise LengthError(f"its header reports {declared} {unit}, but there are {there}")


# --- chunks ---------------------------------------------------------------------------------------


def _chunk(file: BinaryIO, place: int, order: str) -> tuple[bytes, int]:
    """Return name and length of the chunk at an offset; the name is empty at the file's end."""
    file.seek(place)
    head = file.read(8)
    return (head[:4], int.from_bytes(head[4:], order)) if len(head) == 8 else (b"", 0)


def _check_wav(file: BinaryIO) -> Checked:
    """Check that the data chunk of a WAV or RF64 file is whole, with chunks or the end after it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    order = "big" if file.read(4) == b"RIFX" else "little"
    whole, place, wide, field = 8 + int.from_bytes(file.read(4), order), 12, b"", 0
    while True:
        name, length = _chunk(file, place, order)
        if not name:
            raise LengthError("no data chunk")
        if name == b"data":
            break
        if name == b"ds64":
            wide, field = file.read(16), place + 16
            whole = 8 + int.from_bytes(wide[:8], order)
        place += 8 + length + length % 2
    begin = place + 8
    if wide and length == 0xFFFF_FFFF:
        length = int.from_bytes(wide[8:], order)
    else:
        field = place + 4
    if not length:
        if not _is_audio(file, begin, size, order):
            return file, 0
        amended = (size - begin).to_bytes(8, "little") if field < place else b"\xff" * 4
        return _amended(file, field, amended), None
    if length < UNKNOWN_LENGTH or begin + length <= size:
        _compare_chunk(file, begin, length, whole, size, order)
    return file, None


def _check_bw64(file: BinaryIO) -> Checked:
    """Check a BW64 file (ITU-R BS.2088): libsndfile knows it as RF64, or as WAV."""
    source, frames = _check_wav(file)
    name, _ = _chunk(source, 12, "little")
    return _amended(source, 0, b"RF64" if name == b"ds64" else b"RIFF"), frames


def _check_aiff(file: BinaryIO) -> Checked:
    """Check that the sound chunk of an AIFF file is as long as its own header and COMM report.

    Chunks or the file's end have to follow it.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(4)
    whole, kind, place = 8 + int.from_bytes(file.read(4), "big"), file.read(4), 12
    common, sound = b"", None
    while not (common and sound):
        name, length = _chunk(file, place, "big")
        if name == b"COMM":
            common = file.read(22)
        elif name == b"SSND":
            sound = place + 8, length
        elif not name:
            raise LengthError(f"no {'sound' if common else 'COMM'} chunk")
        place += 8 + length + length % 2
    begin, length = sound
    declared, source = int.from_bytes(common[2:6], "big"), file
    # The samples follow two numbers of four bytes.
    if length in (0, 8) and _is_audio(file, begin + 8, size, "big"):
        length = size - begin
        source = _amended(file, begin - 4, length.to_bytes(4, "big"))
        if not declared:
            return source, None
    _compare_chunk(file, begin, length, whole, size, "big")
    if kind == b"AIFF" or common[18:] in (b"NONE", b"sowt"):
        channels, bits = int.from_bytes(common[:2], "big"), int.from_bytes(common[6:8], "big")
        there = (length - 8) // max(1, channels * -(-bits // 8))
        compare(declared, there, "samples")
    return source, None


def _check_w64(file: BinaryIO) -> Checked:
    """Check a W64 file as `_check_wav` checks WAV (Sony Pictures Digital, Sony Wave64).

    Chunk names have 16 bytes. Lengths have 8 bytes, include name and length, and are padded to a
    multiple of 8.
    """
    size, place, begin, width = file.seek(0, os.SEEK_END), 40, 0, 0
    while place < size:
        file.seek(place)
        name = file.read(16)
        length = int.from_bytes(file.read(8), "little") - 24
        if name.startswith(b"fmt "):
            fields = file.read(14)
            # PCM, floats and the G.711 laws: the formats without blocks of several samples.
            if int.from_bytes(fields[:2], "little") in (1, 3, 6, 7, 0xFFFE):
                width = int.from_bytes(fields[12:], "little")
        if name.startswith(b"data") and not begin:
            declared, begin = length, place + 24
            # ffmpeg writes 2^63 - 1 until it knows the length.
            if length <= 0 or length >> 62:
                return file, None
        if length < 0 or place + 24 + length > size:
            break
        place += 24 + length + -length % 8
    if not begin:
        raise LengthError("no data chunk")
    file.seek(place)
    rest = file.read()
    # As in WAV, zeros may pad the file, and a tag may follow.
    is_whole = not rest.strip(b"\0") or rest.startswith(_TAGS)
    compare(declared, declared if is_whole else size - begin, "bytes of audio")
    # libsndfile would read what follows as audio.
    return file, declared // width if width else None


def _is_audio(file: BinaryIO, begin: int, size: int, order: str) -> bool:
    """Return whether a chunk of length 0 is followed by audio: by bytes that are not chunks."""
    name, _ = _chunk(file, begin, order)
    return begin < size and not (any(name) and _are_chunks(file, begin, 0, size, order))


def _amended(file: BinaryIO, place: int, field: bytes) -> BinaryIO:
    """Return a copy of a file with one field of its header replaced, for libsndfile."""
    file.seek(0)
    raw = bytearray(file.read())
    raw[place : place + len(field)] = field
    return io.BytesIO(raw)


def _compare_chunk(
    file: BinaryIO, begin: int, length: int, whole: int, size: int, order: str
) -> None:
    """Compare the length of an audio chunk with the bytes in the file.

    If no chunk follows where one should, all the rest of the file counts as audio. `whole` is the
    end of the outer chunk according to its header.
    """
    there = min(length, size - begin)
    if there == length and not _are_chunks(file, begin + length, whole, size, order):
        there = size - begin
    compare(length, there, "bytes of audio")


def _are_chunks(file: BinaryIO, place: int, whole: int, size: int, order: str) -> bool:
    """Return whether an offset is followed by chunks up to the file's end, by a tag, or nothing."""
    while place + 8 <= size:
        name, length = _chunk(file, place, order)
        is_name = all(0x20 <= byte < 0x7F for byte in name)
        if name.startswith(_TAGS):
            return True
        if not is_name and place % 2:
            place += 1
            continue
        if not is_name:
            # Zeros may pad the file.
            file.seek(place)
            return not file.read().strip(b"\0")
        if place + 8 + length > size:
            # A chunk may be incomplete if the file is cut off after its audio.
            return whole > size
        place += 8 + length
    return True


# --- other formats --------------------------------------------------------------------------------


def _check_sphere(file: BinaryIO) -> Checked:
    """Check the sample count of a SPHERE file; the padding of the last block is left out."""
    size = file.seek(0, os.SEEK_END)
    file.seek(8)
    begin = file.read(8).strip()
    if not begin.isdigit():
        raise LengthError("a damaged header")
    file.seek(0)
    header = file.read(int(begin)).partition(b"end_head")[0]
    fields = dict(re.findall(rb"^(\w+) -\w+ (.*?)\s*$", header, re.MULTILINE))
    try:
        declared, channels, width = (
            int(fields[name]) if name in fields else None
            for name in (b"sample_count", b"channel_count", b"sample_n_bytes")
        )
    except ValueError:
        raise LengthError("a damaged header") from None
    if not declared or not channels or not width:
        return file, None
    there = (size - int(begin)) // (channels * width)
    if not declared < there < declared + _SPHERE_BLOCK // (channels * width):
        compare(declared, there, "samples")
    return file, declared


def _check_flac(file: BinaryIO) -> Checked:
    """Check the sample count of a FLAC header against the last frame, or add a missing count."""
    size = file.seek(0, os.SEEK_END)
    file.seek(4)
    info = file.read(38)
    if len(info) < 38 or info[0] & 0x7F:
        raise LengthError("no STREAMINFO block")
    info = info[4:]
    declared = int.from_bytes(info[13:18], "big") & 0xF_FFFF_FFFF
    largest = int.from_bytes(info[7:10], "big")
    tail = max(42, size - min(2 * largest + 16 if largest else _FLAC_TAIL, _FLAC_TAIL))
    file.seek(tail)
    there = _last_sample(file.read(), info)
    if there is None:
        raise LengthError("cut off: no frame at its end")
    if declared:
        compare(declared, there, "samples")
        return file, None
    file.seek(_FLAC_SAMPLES)
    field = (file.read(1)[0] << 32) + there
    return _amended(file, _FLAC_SAMPLES, field.to_bytes(5, "big")), None


def _last_sample(raw: bytes, info: bytes) -> int | None:
    """Return the sample count up to the end of the last FLAC frame that begins in `raw`."""
    fixed = int.from_bytes(info[2:4], "big")
    for place in reversed([match.start() for match in _FLAC_FRAME.finditer(raw)]):
        if found := _flac_frame(raw[place : place + 16]):
            number, samples, variable = found
            return (number if variable else number * fixed) + samples
    return None


def _flac_frame(head: bytes) -> tuple[int, int, bool] | None:
    """Return number and length of a FLAC frame, and whether the number counts samples, not frames.

    Returns None if the bytes are not a frame header (RFC 9639, 9.1) or its checksum is wrong.
    """
    if len(head) < 6 or head[3] & 1:
        return None
    size, rate = head[2] >> 4, head[2] & 15
    # The number is coded like a character in UTF-8, in up to seven bytes.
    more = max(0, 8 - (head[4] ^ 0xFF).bit_length() - 1)
    end = 5 + more
    explicit = {6: 1, 7: 2}.get(size, 0)
    check = end + explicit + {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if size == 0 or rate == 15 or check >= len(head) or _crc8(head[:check]) != head[check]:
        return None
    number = head[4] & (0x7F >> more + 1 if more else 0x7F)
    for byte in head[5:end]:
        number = number << 6 | byte & 0x3F
    if explicit:
        samples = int.from_bytes(head[end : end + explicit], "big") + 1
    else:
        samples = 192 if size == 1 else 576 << size - 2 if size < 6 else 256 << size - 8
    return number, samples, bool(head[1] & 1)


def _crc8(raw: bytes) -> int:
    value = 0
    for byte in raw:
        value ^= byte
        for _ in range(8):
            value = value << 1 ^ (0x107 if value & 0x80 else 0)
    return value


def _check_ogg(file: BinaryIO) -> Checked:
    """Check that the last page of an Ogg file is complete and marked as the last (RFC 3533, 6)."""
    file.seek(0)
    raw, place, last = file.read(), 0, 0
    while (place := raw.find(b"OggS", place)) >= 0:
        head = raw[place : place + 27]
        table = raw[place + 27 : place + 27 + head[-1]]
        whole = len(head) == 27 and len(table) == head[-1]
        place += 27 + len(table) + sum(table)
        if not whole or place > len(raw):
            raise LengthError("cut off: the last page is incomplete")
        last = head[5]
    if not last & 4:
        raise LengthError("cut off: no page that ends the stream")
    return file, None


def _check_au(file: BinaryIO) -> Checked:
    """Check the byte count of an AU file; 0xffffffff stands for an unknown length."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    order = "big" if file.read(4) == b".snd" else "little"
    begin, length = (int.from_bytes(file.read(4), order) for _ in range(2))
    if not length and begin < size:
        return _amended(file, 8, b"\xff" * 4), None
    if length != 0xFFFF_FFFF:
        _compare_chunk(file, begin, length, begin + length, size, order)
    return file, None


CHECKS: dict[bytes, Callable[[BinaryIO], Checked]] = {
    b"RIFF": _check_wav,
    b"RIFX": _check_wav,
    b"RF64": _check_wav,
    b"BW64": _check_bw64,
    b"riff": _check_w64,
    b"FORM": _check_aiff,
    b".snd": _check_au,
    b"dns.": _check_au,
    b"fLaC": _check_flac,
    b"NIST": _check_sphere,
    b"OggS": _check_ogg,
}
"""Check of the header's length, by the first four bytes of a format.

A check takes the opened file and returns the source for libsndfile, which is the file itself unless
its header has no length, and the number of samples per channel to read, None for all. It raises a
`LengthError` if the header is wrong.
"""
