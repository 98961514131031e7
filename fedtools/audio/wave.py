"""Reading audio, whole or a segment, as mono: WAV, W64, AIFF, AU, FLAC, MP3, SPHERE and Ogg.

libsndfile decodes; how much there is to decode is checked first, for every format by one rule (see
`fedtools.audio.headers` and `fedtools.audio.mpeg`). Two channels become their mean, and the caller
is told, to count them. A recording of more than two (microphone arrays, surround sound) is refused:
in which of them the speech is, only the corpus' owner knows, and a mean of all would blur it.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import soundfile
import soxr

from fedtools.audio.headers import CHECKS, LOSSY, LengthError
from fedtools.audio.mpeg import MpegError, after_id3, read_stream
from fedtools.files.audio_files import AudioPlace, audio_place, open_entry
from fedtools.files.datadir import MAX_OVERSHOOT
from fedtools.files.errors import UserError
from fedtools.files.text_files import open_input

# A damaged header must not make us allocate more than 2 GiB (9 hours at 16 kHz).
MAX_SAMPLES = 1 << 29
# Nor a file that is read whole before it is decoded.
MAX_BYTES = 1 << 31
SAMPLE_RATES = range(4_000, 384_001)


class AudioError(UserError):
    """One recording or segment cannot be used; `reason` is the name to count it under."""

    def __init__(self, reason: str, problem: str, *, path: str | Path | AudioPlace | None = None):
        super().__init__(problem, path=path)
        self.reason = reason


_unreadable = functools.partial(AudioError, "unreadable audio")


class Wave(NamedTuple):
    """Audio as it was recorded, mixed down to one channel.

    Attributes:
        samples: float32 (N,); in [-1, 1) but for what a lossy format overshoots.
        rate: in Hz.
        channels: how many there were, 1 or 2.
    """

    samples: np.ndarray
    rate: int
    channels: int


class Recording(NamedTuple):
    """What is known of a recording before it is decoded."""

    seconds: float
    channels: int


def read_wave(spec: str, start: float | None = None, end: float | None = None) -> Wave:
    """Read a recording, or a segment of it, at its own sample rate.

    Args:
        spec: the value in wav.scp: a file name, relative to the current directory if not absolute,
            or a place in an ark.
        start: the segment's start in seconds; None for the whole recording.
        end: the segment's end in seconds; None or -1 for the recording's end. Up to
            `MAX_OVERSHOOT` beyond the recording, it is the recording's end.

    Raises:
        AudioError: if this recording is missing, empty, unreadable, cut off or of more than two
            channels, or the segment is not within it.
        UserError: if `spec` is a pipe, or otherwise no place of audio.
    """
    place = audio_place(spec)
    if start is None:
        return _read_whole(place)
    if not _seeks(place):
        # A decoder that jumps into an MP3 lacks the bits kept in earlier frames, and says so on
        # stderr for every segment: decode from the start, once for the segments of a recording.
        wave = _last_whole(place)
        first, last = _interval(place, start, end, wave.rate, len(wave.samples))
        return wave._replace(samples=wave.samples[first:last].copy())
    with _opened(place) as (sound, frames):
        return _read(sound, place, *_interval(place, start, end, sound.samplerate, frames))


def describe_recording(spec: str) -> Recording:
    """The length and channels of a recording, not decoded; errors as of `read_wave`."""
    with _opened(audio_place(spec)) as (sound, frames):
        return Recording(frames / sound.samplerate, sound.channels)


def recording_seconds(spec: str) -> float:
    """The length of a recording in seconds, as of `describe_recording`."""
    return describe_recording(spec).seconds


def resample(samples: np.ndarray, rate: float, target: int) -> np.ndarray:
    """Samples (N,) at `rate` Hz to about N * target / rate samples at `target` Hz, float32."""
    return samples if rate == target else soxr.resample(samples, rate, target, quality="HQ")


def _interval(
    place: AudioPlace, start: float, end: float | None, rate: int, frames: int
) -> tuple[int, int]:
    """First sample of a segment, and the one after its last."""
    # Truncation towards zero, as Kaldi's extract-segments does it.
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
    """Whether a segment is read without what comes before it."""
    if place.offset is not None:
        return False
    with _file(place) as file:
        return file.read(4) in CHECKS.keys() - LOSSY


@contextmanager
def _file(place: AudioPlace) -> Iterator[BinaryIO]:
    """Open a file of audio, or the content of an ark at a place."""
    try:
        if place.offset is None:
            file = open_input(place.path)
        else:
            ark, begin, length = open_entry(place)
            with ark:
                file = io.BytesIO(os.pread(ark.fileno(), length, begin))
    except UserError as error:
        reason = "unreadable audio" if place.path.is_file() else "no such file"
        raise AudioError(reason, str(error)) from None
    with file:
        yield file


@contextmanager
def _opened(place: AudioPlace) -> Iterator[tuple[soundfile.SoundFile, int]]:
    """Open a recording, and say how many samples of each channel there are."""
    with _file(place) as file:
        if not file.read(1):
            raise AudioError("empty file", "the audio file has no bytes", path=place)
        try:
            source, frames = _source(file)
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


def _source(file: BinaryIO) -> tuple[int | BinaryIO, int | None]:
    """What libsndfile is to read, and how many samples of it; None for all that it knows of.

    It is the opened file itself wherever the header is right. `LengthError` and `MpegError` are of
    a length that is not, and of what is no audio.
    """
    file.seek(0)
    check = CHECKS.get(file.read(4))
    if check is None:
        file.seek(0)
        raw = file.read(MAX_BYTES)
        # Some programs put an MP3's tag before any format.
        begin = after_id3(raw)
        check = CHECKS.get(raw[begin : begin + 4])
        if check is None:
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
    """Decode some samples of each channel, and mix them."""
    count = last - first
    if count * sound.channels > MAX_SAMPLES:
        raise _unreadable(f"{count} samples are too many", path=place)
    try:
        # To the start, too: an MP3's decoder that was asked to gives samples that differ by 1e-7.
        if first or sound.seekable():
            sound.seek(first)
        samples = sound.read(count, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise _unreadable(f"damaged: {error.error_string}", path=place) from None
    if len(samples) < count:
        raise _unreadable(f"cut off: {len(samples)} samples of {count}", path=place)
    if not np.isfinite(samples).all():
        raise _unreadable("samples that are not finite", path=place)
    mixed = samples[:, 0] if sound.channels == 1 else samples.mean(axis=1)
    return Wave(mixed, sound.samplerate, sound.channels)
