"""MPEG audio, layer III: its frames, counted and preceded by an Info frame with their number.

An MP3 has no length field. An encoder may write an Info (or Xing, or VBRI) frame before the others
that holds their number; ffmpeg writing to a pipe, and therefore Common Voice, has none. libsndfile
then estimates the length from the first bit rate and the file size, and never reads beyond it. Here
every frame is found by its header (ISO 11172-3, 2.4.1.3 and 2.4.2.3; ISO 13818-3; MPEG 2.5 as
decoders implement it). Only tags, as in joined files, may stand between frames: other bytes mean
lost frames. The decoder receives an Info frame and the frames found, nothing else. If the file's
own Info frame has the right number, the decoded samples are those of the file itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# Bit rates in kbit/s by index, for MPEG 1, and for MPEG 2 and 2.5. Index 0 is "free format".
_BIT_RATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
# The index of 64 kbit/s in each: its frames have room for an Info frame's content at any rate.
_ROOMY = (5, 8)
# Sample rates in Hz by the header's two bits of the version, then by index.
_RATES = {
    0b11: (44_100, 48_000, 32_000),
    0b10: (22_050, 24_000, 16_000),
    0b00: (11_025, 12_000, 8_000),
}
_LAYER_3 = 0b01
_MONO = 0b11
# Decoder delay in samples, which mpg123 adds to the delay in an Info frame.
_DELAY = 529
# Samples of silence that the decoder skips: whole frames, so that mpg123 rounds as at the start.
_SILENCE = 4608
# Valid headers in a row, at the right distances, that count as audio: at the start, after a gap.
_ROW, _ROW_AGAIN = 3, 2
# The start of a possible frame or tag.
_MARK = re.compile(rb"\xff|ID3|TAG(?!EX)")
# Up to this many zeros may pad a file to a disk block; more are a missing part.
_BLOCK = 4096


class MpegError(Exception):
    """The bytes are not a readable MP3, or are cut off."""


@dataclass(frozen=True)
class Stream:
    """The audio of an MP3.

    Attributes:
        raw: an Info frame with the number `frames`, and the frames, nothing else.
        frames: number of audio frames.
        reported: number of frames in the file's own Info, Xing or VBRI frame; None without one.
    """

    raw: bytes
    frames: int
    reported: int | None


@dataclass(frozen=True)
class _Kind:
    """The properties that all frames of a stream share."""

    version: int
    rate: int
    mono: bool

    @property
    def lsf(self) -> bool:
        """Return whether it is MPEG 2 or 2.5 (low sampling frequencies), with half the samples."""
        return self.version != 0b11

    @property
    def samples(self) -> int:
        """Return the number of samples per channel in a frame."""
        return 576 if self.lsf else 1152

    @property
    def side(self) -> int:
        """Return the bytes of header and side information; an Info frame's mark follows them."""
        return 4 + ((32, 17), (17, 9))[self.lsf][self.mono]


def read_stream(raw: bytes) -> Stream:
    """Find the frames of an MP3.

    An Info frame with fewer frames than there are, as in joined files, is ignored, and so are its
    numbers of samples to skip at both ends. After the last frame, up to `_BLOCK` zeros and anything
    shorter than a frame are allowed.

    Args:
        raw: the content of the file, with any tags.

    Raises:
        MpegError: if there is no layer III audio, it has free format, its rate or number of
            channels changes, its last frame is incomplete, bytes between frames are neither frames
            nor tags, or an Info frame reports more frames than there are.
    """
    place, end = after_id3(raw), _before_tags(raw)
    kind, place = _begin(raw, place, end)
    frames: list[bytes] = []
    info, declared, surplus, size = b"", None, 0, 0
    while place + 4 <= end:
        found = _frame_at(raw, place)
        if not found or found[0] != kind or not found[1]:
            if found and (place + found[1] > end or _row(raw, place, end, found[0]) >= _ROW):
                raise MpegError("the sample rate or the number of channels changes")
            place, lost = _gap(raw, place, end, kind)
            # Fewer bytes than a frame needs are not the rest of a lost one.
            if lost >= (size if place == end else kind.side):
                where = "after the last frame" if place == end else "between frames"
                raise MpegError(f"damaged: {lost} bytes {where} are not audio")
            continue
        size = found[1]
        if place + size > end:
            raise MpegError(f"cut off: {end - place} bytes of {size} in the last frame")
        frame = raw[place : place + size]
        place += size
        if not (tag := _tag(frame, kind)):
            frames.append(frame)
        elif not frames and not info:
            info, (declared, surplus) = frame, tag
    if place < end and raw[place] == 0xFF:
        raise MpegError(f"cut off: {end - place} bytes of a header at the end")
    if not frames:
        raise MpegError("no frame of audio")
    if declared is not None and declared > len(frames) + surplus:
        raise MpegError(f"cut off: {len(frames)} frames of {declared}")
    if declared != len(frames) or surplus:
        info = _lead(kind, len(frames))
    return Stream(info + b"".join(frames), len(frames), declared)


@lru_cache(maxsize=4096)
def _parse(second: int, third: int, fourth: int) -> tuple[_Kind, int] | None:
    """Return kind and size in bytes of a frame from the last three bytes of its header.

    The size is 0 in free format, which does not report it. Returns None if the bytes are not a
    header of layer III.
    """
    version, layer = second >> 3 & 3, second >> 1 & 3
    bit_rate, rate = third >> 4, third >> 2 & 3
    valid = second >> 5 == 7 and version in _RATES and layer == _LAYER_3
    if not valid or bit_rate == 15 or rate == 3 or fourth & 3 == 2:
        return None
    kind = _Kind(version, _RATES[version][rate], fourth >> 6 == _MONO)
    bits = 1000 * _BIT_RATES[kind.lsf][bit_rate]
    return kind, bits and kind.samples // 8 * bits // kind.rate + (third >> 1 & 1)


def _frame_at(raw: bytes, place: int) -> tuple[_Kind, int] | None:
    """Return `_parse` of the four bytes at `place`."""
    if raw[place] != 0xFF:
        return None
    return _parse(raw[place + 1], raw[place + 2], raw[place + 3])


def _row(raw: bytes, place: int, end: int, kind: _Kind) -> int:
    """Return the number of successive frames of a kind from `place`, up to `_ROW`.

    It is `_ROW`, too, if the audio ends after at least one whole frame.
    """
    for done in range(_ROW):
        if done and place + 4 > end:
            return _ROW
        found = _frame_at(raw, place) if place + 4 <= end else None
        if not found or found[0] != kind or not found[1]:
            return done
        place += found[1]
        if place > end:
            return _ROW if done else 0
    return _ROW


def _gap(raw: bytes, begin: int, end: int, kind: _Kind) -> tuple[int, int]:
    """Return the place of the next frame after a gap, or `end`, and the number of bytes lost.

    The frame may be of another kind if more of that kind follow. Tags, and zeros next to a tag or
    at the end, do not count as lost.
    """
    place, lost, joined = begin, 0, False
    while found := _MARK.search(raw, place, end):
        place = found.start()
        if size := _leading_tag(raw, place, end):
            lost += _untagged(raw[begin:place], True)
            begin = place = place + size
            joined = True
        elif _again(raw, place, end, kind):
            break
        else:
            place += 1
    else:
        place = end
    return place, lost + _untagged(raw[begin:place], joined or place == end)


def _again(raw: bytes, place: int, end: int, kind: _Kind) -> bool:
    """Return whether frames begin at `place`: two of the stream's kind, or more of another."""
    found = _frame_at(raw, place) if place + 4 <= end else None
    if not found:
        return False
    return _row(raw, place, end, found[0]) >= (_ROW_AGAIN if found[0] == kind else _ROW)


def _leading_tag(raw: bytes, place: int, end: int) -> int:
    """Return the size of the ID3 tag at `place`; 0 if there is none or it is incomplete."""
    size = 128 if raw[place : place + 3] == b"TAG" else _id3_size(raw, place)
    return size if place + size <= end else 0


def _untagged(raw: bytes, padded: bool) -> int:
    """Count the bytes before trailing tags, without padding zeros if `padded` or next to a tag."""
    rest = raw[: _before_tags(raw)]
    bare = rest.strip(b"\0") if padded or len(rest) < len(raw) else rest
    return len(bare if len(rest) - len(bare) <= _BLOCK else rest)


def _begin(raw: bytes, first: int, end: int) -> tuple[_Kind, int]:
    """Return the kind of a file's frames, and the place of the first."""
    place = first
    while (place := raw.find(0xFF, place, max(end - 3, 0))) >= 0:
        found = _frame_at(raw, place)
        if found and _row(raw, place, end, found[0]) == _ROW:
            return found[0], place
        if found and place == first:
            if not found[1]:
                raise MpegError("an MP3 in free format")
            if place + found[1] > end:
                raise MpegError("cut off within its first frame")
        place += 1
    raise MpegError("not audio: neither WAV, W64, AIFF, AU, FLAC, MP3, SPHERE nor Ogg")


def after_id3(raw: bytes) -> int:
    """Return the end of leading ID3v2 tags; for a tag that leaves nothing, that of its header."""
    place = 0
    while size := _id3_size(raw, place):
        place += size if place + size < len(raw) else 10
    return place


def _id3_size(raw: bytes, place: int) -> int:
    """Return the size of the ID3v2 tag at `place` from its header; 0 if there is none."""
    if raw[place : place + 3] != b"ID3" or len(raw) < place + 10:
        return 0
    size = sum(
        byte << shift
        for byte, shift in zip(raw[place + 6 : place + 10], (21, 14, 7, 0), strict=True)
    )
    return 10 + size + (10 if raw[place + 5] & 0x10 else 0)


def _before_tags(raw: bytes) -> int:
    """Return the start of the tags at a file's end: ID3v1, APE and Lyrics3, in any order."""
    end = len(raw)
    while True:
        if raw[max(end - 128, 0) : end][:3] == b"TAG" and end >= 128:
            size = 128
        elif raw[max(end - 32, 0) : end][:8] == b"APETAGEX" and end >= 32:
            # The size does not include the tag's header, whose presence is a flag.
            size = int.from_bytes(raw[end - 20 : end - 16], "little")
            size += 32 * (raw[end - 9] >> 7)
        elif raw[end - 9 : end] == b"LYRICS200" and raw[end - 15 : end - 9].isdigit():
            size = 15 + int(raw[end - 15 : end - 9])
        else:
            return end
        if not 0 < size <= end:
            return end
        end -= size


def _tag(frame: bytes, kind: _Kind) -> tuple[int | None, int] | None:
    """Return the frame count of an Info, Xing or VBRI frame, and by how much it may be too large.

    A VBRI frame may count itself. The count is None if the frame has none; the result is None if
    the frame is audio.
    """
    side = kind.side
    if frame[side : side + 4] in (b"Info", b"Xing") and not any(frame[6:side]):
        flags, number = frame[side + 7 : side + 8], frame[side + 8 : side + 12]
        count = int.from_bytes(number, "big") if flags and flags[0] & 1 else None
        return count, 0
    if frame[36:40] == b"VBRI":
        return int.from_bytes(frame[50:54], "big"), 1
    return None


def _lead(kind: _Kind, frames: int) -> bytes:
    """Return an Info frame and silent frames that make a decoder return all samples that follow.

    With an Info frame, a decoder skips the samples that the encoder reports as padding, and its own
    delay (mpg123 at least the delay). The silent frames are there to be skipped instead of audio.
    """
    index = _ROOMY[kind.lsf] << 4 | _RATES[kind.version].index(kind.rate) << 2
    header = bytes(
        (0xFF, 0xE0 | kind.version << 3 | _LAYER_3 << 1 | 1, index, _MONO * kind.mono << 6)
    )
    _, size = _parse(*header[1:])
    silent = _SILENCE // kind.samples
    count = b"Xing" + (1).to_bytes(4, "big") + (frames + silent).to_bytes(4, "big")
    # LAME's name and other fields, 21 bytes, then two 12-bit numbers: samples to skip at both ends.
    added = (_SILENCE - _DELAY << 12 | _DELAY).to_bytes(3, "big")
    info = header.ljust(kind.side, b"\0") + count + b"LAME".ljust(21, b"\0") + added
    return info.ljust(size, b"\0") + silent * header.ljust(size, b"\0")
