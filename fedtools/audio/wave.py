"""Reading audio: WAV, FLAC, MP3 and SPHERE through libsndfile, whole or a segment, mono only."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import soundfile
import soxr

from fedtools.files.datadir import MAX_OVERSHOOT, audio_file
from fedtools.files.errors import UserError
from fedtools.files.lines import open_input

# A damaged header must not make us allocate more than 2 GiB (9 hours at 16 kHz).
MAX_SAMPLES = 1 << 29
SAMPLE_RATES = range(4_000, 384_001)
# What programs that write into a pipe put for a length that they do not know yet.
UNKNOWN_LENGTH = 0x7FFF_0000
_CUT_OFF = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)


class AudioError(UserError):
    """One recording or segment cannot be used; `reason` is the name to count it under."""

    def __init__(self, reason: str, problem: str, *, path: str | Path | None = None):
        super().__init__(problem, path=path)
        self.reason = reason


_unreadable = functools.partial(AudioError, "unreadable audio")


def read_wave(
    spec: str, start: float | None = None, end: float | None = None
) -> tuple[np.ndarray, int]:
    """Read a recording, or a segment of it, at its own sample rate.

    Args:
        spec: the value in wav.scp: a file name, relative to the current directory if not absolute.
        start: the segment's start in seconds; None for the whole recording.
        end: the segment's end in seconds; None or -1 for the recording's end. Up to
            `MAX_OVERSHOOT` beyond the recording, it is the recording's end.

    Returns:
        Samples, float32 in [-1, 1), shape (N,), and the sample rate in Hz.

    Raises:
        AudioError: if this recording is missing, empty, unreadable or cut off, or the segment is
            not within it.
        UserError: if the audio has several channels, or `spec` is a pipe.
    """
    path = audio_file(spec)
    if start is None:
        return _read(path, 0, None)
    with _open(path) as file:
        rate, frames, format_ = file.samplerate, file.frames, file.format
    # Truncation towards zero, as Kaldi's extract-segments does it.
    first = int(start * rate)
    last = frames if end is None or end == -1 else int(end * rate)
    if not 0 <= first < last or first >= frames or last > frames + MAX_OVERSHOOT * rate:
        length = f"{frames / rate:.2f} s"
        raise AudioError(
            "segment outside of its recording",
            f"the segment {start} to {end} is not within {length} of audio",
            path=path,
        )
    last = min(last, frames)
    if format_ == "MP3":
        # A decoder that jumps into an MP3 lacks the bits kept in earlier frames, and says so on
        # stderr for every segment: decode from the start, once for the segments of a recording.
        samples, rate = _whole_recording(path)
        return samples[first:last].copy(), rate
    return _read(path, first, last)


def recording_seconds(spec: str) -> float:
    """The length of a recording in seconds, from its header; errors as of `read_wave`."""
    with _open(audio_file(spec)) as file:
        return file.frames / file.samplerate


def resample(samples: np.ndarray, rate: float, target: int) -> np.ndarray:
    """Samples (N,) at `rate` Hz to about N * target / rate samples at `target` Hz, float32."""
    return samples if rate == target else soxr.resample(samples, rate, target, quality="HQ")


def _open(path: Path) -> soundfile.SoundFile:
    try:
        with open_input(path) as opened:
            if not opened.read(1):
                raise AudioError("empty file", "the audio file has no bytes", path=path)
        file = soundfile.SoundFile(path)
    except AudioError:
        raise
    except UserError as error:
        raise AudioError("no such file", str(error)) from None
    except (soundfile.LibsndfileError, TypeError) as error:
        # soundfile takes *.raw for headerless audio, and raises TypeError for want of its rate.
        reason = getattr(error, "error_string", "no header")
        raise _unreadable(f"not audio: {reason}", path=path) from None
    if file.channels != 1:
        problem = f"{file.channels} channels of audio"
        remedy = "make it mono, for example: sox in.wav out.wav remix 1"
        raise UserError(problem, path=path, remedy=remedy)
    if file.samplerate not in SAMPLE_RATES:
        raise _unreadable(f"a sample rate of {file.samplerate} Hz", path=path)
    said = _CUT_OFF.search(file.extra_info)
    if said and int(said[2]) < int(said[1]) < UNKNOWN_LENGTH:
        raise _unreadable(f"cut off: {said[2]} bytes of audio of {said[1]}", path=path)
    return file


def _read(path: Path, first: int, last: int | None) -> tuple[np.ndarray, int]:
    with _open(path) as file:
        count = (file.frames if last is None else last) - first
        if count > MAX_SAMPLES:
            raise _unreadable(f"{count} samples are too many", path=path)
        try:
            file.seek(first)
            samples = file.read(count, dtype="float32")
        except soundfile.LibsndfileError as error:
            raise _unreadable(f"damaged: {error.error_string}", path=path) from None
        if len(samples) < count:
            raise _unreadable(f"cut off: {len(samples)} samples of {count}", path=path)
        if not np.isfinite(samples).all():
            raise _unreadable("samples that are not finite", path=path)
        return samples, file.samplerate


@functools.lru_cache(maxsize=1)
def _whole_recording(path: Path) -> tuple[np.ndarray, int]:
    return _read(path, 0, None)
