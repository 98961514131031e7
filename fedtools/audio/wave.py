"""Reading audio, whole or a segment, as mono: WAV, W64, AIFF, AU, FLAC, MP3, SPHERE and Ogg.

libsndfile decodes. The length is checked before, by one rule for every format (see
`fedtools.audio.headers` and `fedtools.audio.mpeg`). Two channels are averaged, and the result
reports their number, so that the caller can count such recordings. A recording of more than two
channels (microphone arrays, surround sound) is refused: only the corpus' owner knows which of them
has the speech, and a mean of all would blur it.
"""

from __future__ import annotations

import functools
import io
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import soundfile
import soxr

from fedtools.audio.foreign import foreign_format
from fedtools.audio.headers import CHECKS, LOSSY, LengthError
from fedtools.audio.mpeg import MpegError, after_id3, read_stream
from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input
from fedtools.data.audio_files import AudioPlace, audio_place, open_entry
from fedtools.data.datadir import MAX_OVERSHOOT

# A damaged header must not cause an allocation of more than 2 GiB (9 hours at 16 kHz).
MAX_SAMPLES = 1 << 29
# Nor must a file that is read completely before it is decoded.
MAX_BYTES = 1 << 31
SAMPLE_RATES = range(4_000, 384_001)
# Floats may overshoot full scale, by up to 20 dB after a recorder of 32-bit floats; a sample beyond
# 40 dB is in the units of 16-bit integers.
LOUDEST = 100.0


class AudioError(UserError):
    """A recording or segment cannot be used; `reason` is the name under which it is counted."""

    def __init__(self, reason: str, problem: str, *, path: str | Path | AudioPlace | None = None):
        super().__init__(problem, path=path)
        self.reason = reason


_unreadable = functools.partial(AudioError, "unreadable audio")


class Wave(NamedTuple):
    """Audio as it was recorded, mixed down to one channel.

    Attributes:
        samples: float32 (N,), in [-1, 1) except where a lossy format overshoots.
        rate: sample rate in Hz.
        channels: number of recorded channels, 1 or 2.
    """

    samples: np.ndarray
    rate: int
    channels: int


class Recording(NamedTuple):
    """Length and channels of a recording that is not decoded."""

    seconds: float
    channels: int


def read_wave(spec: str, start: float | None = None, end: float | None = None) -> Wave:
    """Read a recording, or a segment of it, at its own sample rate.

    Args:
        spec: the value in wav.scp: a file name, relative to the current directory if not absolute,
            or an offset in an ark.
        start: the segment's start in seconds; None for the whole recording.
        end: the segment's end in seconds; None or -1 for the recording's end. An end up to
            `MAX_OVERSHOOT` beyond the recording is taken as its end.

    Raises:
        AudioError: if the recording is missing, empty, unreadable, cut off or has more than two
            channels, or the segment is not within it.
        UserError: if `spec` is a pipe, or otherwise not a place of audio.
    """
    place = audio_place(spec)
    if start is None:
        return _read_whole(place)
    if _seeks(place):
        with _opened(place) as (sound, frames):
            # Within a WAV, codecs such as GSM 6.10 have no seek.
            if sound.seekable():
                return _read(sound, place, *_interval(place, start, end, sound.samplerate, frames))
    # A decoder that seeks in an MP3 lacks the bits stored in earlier frames, and reports that on
    # stderr for every segment: decode the recording once, from the start, for all segments.
    wave = _last_whole(place)
    first, last = _interval(place, start, end, wave.rate, len(wave.samples))
    return wave._replace(samples=wave.samples[first:last].copy())


def describe_recording(spec: str) -> Recording:
    """Return length and channels of a recording without decoding it; errors as in `read_wave`."""
    with _opened(audio_place(spec)) as (sound, frames):
        return Recording(frames / sound.samplerate, sound.channels)


def recording_seconds(spec: str) -> float:
    """Return the length of a recording in seconds; errors as in `describe_recording`."""
    return describe_recording(spec).seconds


def resample(samples: np.ndarray, rate: float, target: int) -> np.ndarray:
    """Resample (N,) at `rate` Hz to about N * target / rate float32 samples at `target` Hz."""
    return samples if rate == target else soxr.resample(samples, rate, target, quality="HQ")


def _interval(
    place: AudioPlace, start: float, end: float | None, rate: int, frames: int
) -> tuple[int, int]:
    """Return the first sample of a segment, and the one after its last."""
    # Truncation towards zero, as in Kaldi's extract-segments.
    first = int(start * rate)
    last = frames if end is None or end == -1 else int(end * rate)
    if not 0 <= first < last or first >= frames or last > frames + MAX_OVERSHOOT * rate:
        raise AudioError(
            "segment outside of its recording",
            f"the segment {start} to {end} is not within {frames / rate:.2f} s of audio",
            path=place,
        )
    return first, min(last, frames)


def _seeks(place: AudioPlace) -> bool:
    """Return whether the format lets a segment be read without decoding the audio before it."""
    if place.offset is not None:
        return False
    with _file(place) as file:
        return file.read(4) in CHECKS.keys() - LOSSY


@contextmanager
def _file(place: AudioPlace) -> Iterator[BinaryIO]:
    """Open an audio file, or an entry of an ark."""
    try:
        if place.offset is None:
            file = open_input(place.path)
        else:
            ark, begin, length = open_entry(place)
            with ark:
                file = io.BytesIO(os.pread(ark.fileno(), length, begin))
    except OSError as error:
        raise _unreadable(f"cannot be read: {error.strerror}", path=place) from None
    except UserError as error:
        reason = "unreadable audio" if place.path.is_file() else "no such file"
        raise AudioError(reason, str(error)) from None
    try:
        with file:
            yield file
    except OSError as error:
        raise _unreadable(f"cannot be read: {error.strerror or error}", path=place) from None


@contextmanager
def _opened(place: AudioPlace) -> Iterator[tuple[soundfile.SoundFile, int]]:
    """Open a recording, and return it with its number of samples per channel."""
    with _file(place) as file:
        if not file.read(1):
            raise AudioError("empty file", "the audio file has no bytes", path=place)
        try:
            source, frames = _source(file, place)
            sound = soundfile.SoundFile(source, closefd=False)
        except (LengthError, MpegError) as error:
            raise _unreadable(str(error), path=place) from None
        except soundfile.LibsndfileError as error:
            raise _unreadable(f"not audio: {error.error_string}", path=place) from None
        with sound:
            if sound.samplerate not in SAMPLE_RATES:
                raise _unreadable(f"a sample rate of {sound.samplerate} Hz", path=place)
            if sound.channels > 2:
                problem = f"{sound.channels} channels of audio"
                raise AudioError("more than two channels", problem, path=place)
            yield sound, sound.frames if frames is None else frames


def _source(file: BinaryIO, place: AudioPlace) -> tuple[int | BinaryIO, int | None]:
    """Return the source for libsndfile and the number of samples per channel, None for all.

    The source is the opened file itself if its header is right.

    Raises:
        LengthError, MpegError: if the header's length is wrong, or the file is not audio.
    """
    file.seek(0)
    check = CHECKS.get(file.read(4))
    if check is None:
        file.seek(0)
        raw = file.read(MAX_BYTES)
        # Some programs write an MP3's tag before other formats, too.
        begin = after_id3(raw)
        check = CHECKS.get(raw[begin : begin + 4])
        if check is None:
            if name := foreign_format(raw[begin:]):
                quoted = shlex.quote(str(place.path))
                remedy = f"convert it, as with: ffmpeg -i {quoted} {quoted}.flac"
                raise LengthError(f"{name}, which is not read; {remedy}")
            return io.BytesIO(read_stream(raw).raw), None
        file = io.BytesIO(raw[begin:])
    source, frames = check(file)
    if isinstance(source, io.BytesIO):
        source.seek(0)
        return source, frames
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    return file.fileno(), frames


def _read_whole(place: AudioPlace) -> Wave:
    with _opened(place) as (sound, frames):
        return _read(sound, place, 0, frames)


_last_whole = functools.lru_cache(maxsize=1)(_read_whole)


def _read(sound: soundfile.SoundFile, place: AudioPlace, first: int, last: int) -> Wave:
    """Decode a range of samples of each channel, and mix the channels."""
    count = last - first
    if count * sound.channels > MAX_SAMPLES:
        raise _unreadable(f"{count} samples are too many", path=place)
    try:
        # Seek to the start, too: after a seek an MP3's samples differ by 1e-7, so always seek.
        if first or sound.seekable():
            sound.seek(first)
        samples = sound.read(count, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise _unreadable(f"damaged: {error.error_string}", path=place) from None
    if len(samples) < count:
        raise _unreadable(f"cut off: {len(samples)} samples of {count}", path=place)
    if not np.isfinite(samples).all():
        raise _unreadable("some samples are not finite", path=place)
    if (peak := np.abs(samples).max(initial=0.0)) > LOUDEST:
        problem = (
            f"a sample of {peak:.6g}; samples are -1 to 1: divide floats in 16-bit units by 32768"
        )
        raise AudioError("samples far outside of -1 to 1", problem, path=place)
    mixed = samples[:, 0] if sound.channels == 1 else samples.mean(axis=1)
    return Wave(mixed, sound.samplerate, sound.channels)
