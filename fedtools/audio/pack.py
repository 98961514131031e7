"""Packing of data directories of short clips into the files of `fedtools.data.clips`."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedtools.audio.features import (
    INT16_SCALE,
    MESSAGES_SHOWN,
    Extraction,
    audio_places,
    client_order,
)
from fedtools.audio.perturb import SPEED_TABLE
from fedtools.audio.speech_end import end_of_speech
from fedtools.audio.wave import AudioError, Wave, read_wave, resample
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.data.audio_files import audio_place
from fedtools.data.clips import (
    RATE,
    Clip,
    check_noise,
    read_classes,
    write_clips,
)
from fedtools.data.datadir import DataDir, read_table

# With a suitable clip length, at most this share of a corpus' clips is longer.
MAY_LOSE = 0.1


@dataclass
class Packing:
    """The result of `pack_clips`: counts of clips, and samples of noise and of a clip.

    `ends` has, for each clip that lost speech when it was cut, the sample at which its speech ends.
    """

    length: int

    clips: int = 0
    clients: int = 0
    classes: int = 0
    mixed: int = 0
    padded: int = 0
    cut: int = 0
    noise_samples: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ends: list[int] = field(default_factory=list)

    def warn(self, path: Path) -> None:
        """Warn on stderr, with a remedy, if more than `MAY_LOSE` of the clips lose speech."""
        allowed = int(MAY_LOSE * self.clips)
        if len(self.ends) > allowed:
            needed = sorted(self.ends)[len(self.ends) - allowed - 1]
            lost = f"{len(self.ends)} of {self.clips} clips lose speech beyond"
            seconds = math.ceil(10 * needed / RATE) / 10
            remedy = f"give --clip-seconds {seconds:g} (run.sh: --clip_seconds)"
            print(f"warning: {path}: {lost} {self.length / RATE:g} s; {remedy}", file=sys.stderr)

    @property
    def extraction(self) -> Extraction:
        """Return the counts of clips: kept, mixed down, and dropped by reason."""
        return Extraction(self.clips, self.mixed, self.dropped)


def pack_clips(
    data_dir: str | Path,
    folder: str | Path,
    classes: str | Path,
    noise: str | Path | None = None,
    *,
    max_drop: float = 0.02,
    clip_seconds: float = 1.0,
) -> Packing:
    """Pack a data directory of one-word utterances as clips of equal length.

    Longer ones are cut, shorter ones padded with zeros. If more than `MAY_LOSE` of the clips lose
    speech when cut (see `fedtools.audio.speech_end`), a warning goes to stderr.

    Clips whose audio cannot be used are dropped and counted. Other sample rates are resampled.

    Args:
        data_dir: needs utt2spk, wav.scp and text, whose words are the labels; segments are used
            if they exist. Clients are those of utt2client, or the speakers without it.
        folder: receives the files that `fedtools.data.clips` describes.
        classes: file of the labels, one per line; the line is the class index.
        noise: a Kaldi table, name and path, of recordings of background noise.
        max_drop: largest share of clips that may be dropped, 0 to 1.
        clip_seconds: length of a clip in seconds.

    Raises:
        UserError: if the tables do not fit together, a label is no class, noise cannot be read or
            is shorter than a clip, or more than `max_drop` or all clips were dropped. `folder` then
            stays unchanged.
    """
    data, names = DataDir.read(data_dir), read_classes(classes)
    data.utt2client = data.utt2client or data.utt2spk
    if SPEED_TABLE in data.others:
        problem, remedy = "clips cannot be packed at another speed", "pack the data without it"
        raise UserError(problem, path=data.path / SPEED_TABLE, remedy=remedy)
    if not data.utterances:
        raise UserError("no utterances", path=data.path / "utt2spk")
    _check_labels(data, names, classes)
    length = round(clip_seconds * RATE)
    waves = _noise(noise, length)
    recordings = [wave.samples for wave in waves]
    done = Packing(length, classes=len(names), noise_samples=sum(map(len, recordings)))
    done.mixed = sum(wave.channels > 1 for wave in waves)

    def clips() -> Iterator[Clip]:
        yield from _clips(data, done)
        if not done.clips or done.dropped.total() > max_drop * len(data.utterances):
            problem = f"{done.extraction}: over {max_drop:.1%}"
            remedy = "mend the audio or raise --max-drop"
            raise UserError(problem, path=data.path, remedy=remedy)

    write_clips(folder, clips(), names, recordings, length)
    done.warn(data.path)
    return done


def _clips(data: DataDir, done: Packing) -> Iterator[Clip]:
    """Yield the clips of all usable utterances, client by client, and count them in `done`."""
    order = client_order(data)
    places = audio_places(data, order)
    upsampled, clients = 0, set()
    for utt in counted(order, f"pack {data.path.name}", "clips"):
        try:
            wave, rate, channels = clip_wave(*places[utt])
        except AudioError as error:
            done.dropped[error.reason] += 1
            if done.dropped.total() <= MESSAGES_SHOWN:
                print(f"dropped {utt}: {error}", file=sys.stderr)
            continue
        upsampled += rate < RATE
        done.clips += 1
        done.mixed += channels > 1
        done.padded += len(wave) < done.length
        if len(wave) > done.length:
            done.cut += 1
            if end := end_of_speech(wave, done.length):
                done.ends.append(end)
        clients.add(data.utt2client[utt])
        yield Clip(utt, data.utt2client[utt], data.text[utt], wave)
    done.clients = len(clients)
    if upsampled:
        below = f"recorded below {RATE} Hz, so their upper filters are empty"
        print(f"{data.path}: warning: {upsampled} clips were {below}", file=sys.stderr)


def _check_labels(data: DataDir, classes: list[str], path: str | Path) -> None:
    """Raise a `UserError` unless every utterance has a label that is a class."""
    known = set(classes)
    for utt in data.utterances:
        if utt not in data.text:
            raise UserError(f"{utt!r} has no label", path=data.path / "text", remedy="add it")
        if data.text[utt] not in known:
            problem = f"the label {data.text[utt]!r} of {utt!r} is not in {path}"
            line, remedy = list(data.text).index(utt) + 1, "add it there, or remove the utterance"
            raise UserError(problem, path=data.path / "text", line=line, remedy=remedy)


def _noise(table: str | Path | None, length: int) -> list[Wave]:
    """Read all recordings of background noise, a few minutes in total, by `clip_wave`."""
    recordings = []
    for line, spec in enumerate(read_table(table).values() if table else (), 1):
        audio_place(spec, table, line)
        recordings.append(clip_wave(spec))
    check_noise(sum(len(wave.samples) for wave in recordings), table or "", length)
    return recordings


def clip_wave(spec: str, *interval: float) -> Wave:
    """Read audio as int16 (N,) at `RATE`, N > 0, with the file's own rate and channels.

    Errors are those of `read_wave`.
    """
    wave = read_wave(spec, *interval)
    samples, rate = wave.samples, wave.rate
    samples = np.rint(resample(samples, rate, RATE) * INT16_SCALE)
    if not len(samples):
        raise AudioError("no samples", "the recording has no samples", path=spec)
    # Resampling can overshoot full scale.
    return wave._replace(samples=samples.clip(-32768, 32767).astype("<i2"))
