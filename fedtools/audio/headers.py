"""How much audio a file's header tells, against how much there is.

One rule for all formats: less than the header tells is "cut off", more is a header of other audio,
and both are refused. A header that does not know, because it was written into a pipe or its writer
was killed, is no fault: all that is there is read. It tells a length of 0, with audio behind it, or
one that no file has. What is compared:

WAV, RF64   bytes of the data chunk; other chunks, a tag, or the file's end have to follow it
W64         the same
AIFF        the same, and its count of samples
AU          bytes of the audio
SPHERE      its count of samples, with the bytes
FLAC        its count of samples, with the number that the last frame has
Ogg         the last page is whole, and ends the stream
MP3         see `fedtools.audio.mpeg`
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from typing import BinaryIO

from fedtools.files.audio_files import UNKNOWN_LENGTH

# SPHERE files consist of blocks of so many bytes: what fills the last one is no audio.
_SPHERE_BLOCK = 1024
# More than the longest frame of two channels has, of 65,535 samples of 32 bits.
_FLAC_TAIL = 1 << 20
_FLAC_FRAME = re.compile(rb"\xff[\xf8\xf9]")
# Where a FLAC's header has the last four bits of something else, and 36 of the number of samples.
_FLAC_SAMPLES = 21
# What programs put behind a file that has no place for it.
_TAGS = (b"TAG", b"ID3", b"APET", b"LYRI")
# By its first bytes: a decoder that begins in the middle gives other samples.
LOSSY = {b"OggS"}

Checked = tuple[BinaryIO, int | None]


class LengthError(Exception):
    """A header and its audio differ in length, or the header is damaged."""


def compare(told: int, there: int, unit: str) -> None:
    """Raise a `LengthError` unless as much is there as the header tells."""
    if there < told:
        raise LengthError(f"cut off: {there} {unit} of {told}")
    if there > told:
        raise LengthError(f"its header tells {told} {unit}, and there are {there}")


# --- chunks ---------------------------------------------------------------------------------------


def _chunk(file: BinaryIO, place: int, order: str) -> tuple[bytes, int]:
    """Name and length of the chunk at a place; the name is short at the end of the file."""
    file.seek(place)
    head = file.read(8)
    return (head[:4], int.from_bytes(head[4:], order)) if len(head) == 8 else (b"", 0)


def _check_wav(file: BinaryIO) -> Checked:
    """WAV and RF64: the data chunk is whole, and what follows it are chunks or the end."""
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
        told = (size - begin).to_bytes(8, "little") if field < place else b"\xff" * 4
        return _amended(file, field, told), None
    if length < UNKNOWN_LENGTH or begin + length <= size:
        _compare_chunk(file, begin, length, whole, size, order)
    return file, None


def _check_aiff(file: BinaryIO) -> Checked:
    """AIFF: the sound chunk is as long as it and COMM tell; what follows are chunks or the end."""
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
    told, source = int.from_bytes(common[2:6], "big"), file
    # The samples follow two numbers of four bytes.
    if length in (0, 8) and _is_audio(file, begin + 8, size, "big"):
        length = size - begin
        source = _amended(file, begin - 4, length.to_bytes(4, "big"))
        if not told:
            return source, None
    _compare_chunk(file, begin, length, whole, size, "big")
    if kind == b"AIFF" or common[18:] in (b"NONE", b"sowt"):
        channels, bits = int.from_bytes(common[:2], "big"), int.from_bytes(common[6:8], "big")
        there = (length - 8) // max(1, channels * -(-bits // 8))
        compare(told, there, "samples")
    return source, None


def _check_w64(file: BinaryIO) -> Checked:
    """W64: as of WAV. Names have 16 bytes, and lengths 8, count themselves, and are filled up to 8.

    (Sony Pictures Digital, Sony Wave64.)
    """
    size, place, begin, width = file.seek(0, os.SEEK_END), 40, 0, 0
    while place < size:
        file.seek(place)
        name = file.read(16)
        length = int.from_bytes(file.read(8), "little") - 24
        if name.startswith(b"fmt "):
            fields = file.read(14)
            # Of PCM, floats and the G.711 laws: what has no blocks of several samples.
            if int.from_bytes(fields[:2], "little") in (1, 3, 6, 7, 0xFFFE):
                width = int.from_bytes(fields[12:], "little")
        if name.startswith(b"data") and not begin:
            told, begin = length, place + 24
            # ffmpeg tells 2^63 - 1 before it knows.
            if length <= 0 or length >> 62:
                return file, None
        if length < 0 or place + 24 + length > size:
            break
        place += 24 + length + -length % 8
    if not begin:
        raise LengthError("no data chunk")
    file.seek(place)
    rest = file.read()
    # As of WAV: zeros fill up a file, and a tag may follow.
    is_whole = not rest.strip(b"\0") or rest.startswith(_TAGS)
    compare(told, told if is_whole else size - begin, "bytes of audio")
    # libsndfile takes what follows for audio.
    return file, told // width if width else None


def _is_audio(file: BinaryIO, begin: int, size: int, order: str) -> bool:
    """Whether what follows the head of a chunk of length 0 is audio: some bytes, and no chunks."""
    name, _ = _chunk(file, begin, order)
    return begin < size and not (any(name) and _are_chunks(file, begin, 0, size, order))


def _amended(file: BinaryIO, place: int, field: bytes) -> BinaryIO:
    """The content of a file with another field in its header: where libsndfile needs one."""
    file.seek(0)
    raw = bytearray(file.read())
    raw[place : place + len(field)] = field
    return io.BytesIO(raw)


def _compare_chunk(
    file: BinaryIO, begin: int, length: int, whole: int, size: int, order: str
) -> None:
    """Compare the length of a chunk of audio with what is there.

    If no chunk follows where one should, all the rest of the file is audio. `whole` is where the
    outer chunk ends by its header.
    """
    there = min(length, size - begin)
    if there == length and not _are_chunks(file, begin + length, whole, size, order):
        there = size - begin
    compare(length, there, "bytes of audio")


def _are_chunks(file: BinaryIO, place: int, whole: int, size: int, order: str) -> bool:
    """Whether chunks follow each other from a place to the file's end, or a tag, or nothing."""
    while place + 8 <= size:
        name, length = _chunk(file, place, order)
        is_name = all(0x20 <= byte < 0x7F for byte in name)
        if name.startswith(_TAGS):
            return True
        if not is_name and place % 2:
            place += 1
            continue
        if not is_name:
            # Zeros fill up a file.
            file.seek(place)
            return not file.read().strip(b"\0")
        if place + 8 + length > size:
            # The end of a file that is cut off after its audio is not there.
            return whole > size
        place += 8 + length
    return True


# --- other formats --------------------------------------------------------------------------------


def _check_sphere(file: BinaryIO) -> Checked:
    """SPHERE: as many samples as are told; what fills the last block is left out."""
    size = file.seek(0, os.SEEK_END)
    file.seek(8)
    begin = file.read(8).strip()
    if not begin.isdigit():
        raise LengthError("a damaged header")
    file.seek(0)
    header = file.read(int(begin)).partition(b"end_head")[0]
    fields = dict(re.findall(rb"^(\w+) -\w+ (.*?)\s*$", header, re.MULTILINE))
    try:
        told, channels, width = (
            int(fields[name]) if name in fields else None
            for name in (b"sample_count", b"channel_count", b"sample_n_bytes")
        )
    except ValueError:
        raise LengthError("a damaged header") from None
    if not told or not channels or not width:
        return file, None
    there = (size - int(begin)) // (channels * width)
    if not told < there < told + _SPHERE_BLOCK // (channels * width):
        compare(told, there, "samples")
    return file, told


def _check_flac(file: BinaryIO) -> Checked:
    """FLAC: the samples told are those up to the last frame's end, or libsndfile is told them."""
    size = file.seek(0, os.SEEK_END)
    file.seek(4)
    info = file.read(38)
    if len(info) < 38 or info[0] & 0x7F:
        raise LengthError("no STREAMINFO block")
    info = info[4:]
    told = int.from_bytes(info[13:18], "big") & 0xF_FFFF_FFFF
    largest = int.from_bytes(info[7:10], "big")
    tail = max(42, size - min(2 * largest + 16 if largest else _FLAC_TAIL, _FLAC_TAIL))
    file.seek(tail)
    there = _last_sample(file.read(), info)
    if there is None:
        raise LengthError("cut off: no frame at its end")
    if told:
        compare(told, there, "samples")
        return file, None
    file.seek(_FLAC_SAMPLES)
    field = (file.read(1)[0] << 32) + there
    return _amended(file, _FLAC_SAMPLES, field.to_bytes(5, "big")), None


def _last_sample(raw: bytes, info: bytes) -> int | None:
    """The number of samples up to the end of the last FLAC frame that begins in `raw`."""
    fixed = int.from_bytes(info[2:4], "big")
    for place in reversed([match.start() for match in _FLAC_FRAME.finditer(raw)]):
        if found := _flac_frame(raw[place : place + 16]):
            number, samples, variable = found
            return (number if variable else number * fixed) + samples
    return None


def _flac_frame(head: bytes) -> tuple[int, int, bool] | None:
    """Number and length of a FLAC frame, and whether it is the first sample's number that is told.

    None is of what is no header (RFC 9639, 9.1), as its checksum tells.
    """
    if len(head) < 6 or head[3] & 1:
        return None
    size, rate = head[2] >> 4, head[2] & 15
    # The number is written as UTF-8 writes characters, in up to seven bytes.
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
    """Ogg: the last page is whole, and is told to be the last (RFC 3533, 6)."""
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
    """AU: as many bytes as are told follow its header; 0xffffffff is of what is not known."""
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
    b"riff": _check_w64,
    b"FORM": _check_aiff,
    b".snd": _check_au,
    b"dns.": _check_au,
    b"fLaC": _check_flac,
    b"NIST": _check_sphere,
    b"OggS": _check_ogg,
}
"""A format's first four bytes -> what compares the length that an opened file's header tells.

It returns what libsndfile is to read, which is the file itself unless the header does not know, and
how many samples of each channel, None for all. A `LengthError` is of a header that is wrong.
"""
