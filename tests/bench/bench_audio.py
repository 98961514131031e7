#!/usr/bin/env python3
"""How fast audio is read, of every format, against libsndfile's own reading of the same samples.

    python tests/bench/bench_audio.py [--turns 5] [--clips 200] [--package DIR]

MP3 is read as Common Voice has it, with a tag and without an Info frame; libsndfile, which cannot
read that, reads the same clips with an Info frame. --package measures another version's package,
whose folder it names, where it can read the format.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "tests"))

from mp3s import ID3, frames_of  # noqa: E402

FORMATS = {"mp3": "MP3", "wav": "WAV", "flac": "FLAC", "sphere": "NIST", "aiff": "AIFF"}
RATE = 48_000


def write_clips(folder: Path, count: int) -> dict[str, tuple[list[Path], list[Path]]]:
    """Write 3 to 6 s clips; return format -> the clips that we and that libsndfile read."""
    random = np.random.default_rng(0)
    clips: dict[str, tuple[list[Path], list[Path]]] = {}
    for name, kind in FORMATS.items():
        ours, theirs = [], []
        for number in range(count):
            samples = 0.1 * random.standard_normal(RATE * 3 + number % 4 * RATE)
            samples *= np.sin(np.arange(len(samples)) / 9000) ** 2
            file = io.BytesIO()
            soundfile.write(file, samples.astype(np.float32), RATE, format=kind)
            path = folder / f"{number}.{name}"
            path.write_bytes(file.getvalue())
            theirs.append(path)
            if name == "mp3":
                path = folder / f"{number}-bare.mp3"
                path.write_bytes(ID3 + b"".join(frames_of(file.getvalue())[1:]))
            ours.append(path)
        clips[name] = ours, theirs
    return clips


def seconds(read: Callable[[str], object], paths: list[Path]) -> float:
    """Return the processor time of reading files."""
    begun = time.process_time()
    for path in paths:
        read(str(path))
    return time.process_time() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--package", type=Path, default=ROOT)
    options = parser.parse_args()
    sys.path.insert(0, str(options.package))
    from fedtools.audio.wave import read_wave, recording_seconds

    def bare(path: str) -> object:
        return soundfile.read(path, dtype="float32")

    with tempfile.TemporaryDirectory() as folder:
        for name, (ours, theirs) in write_clips(Path(folder), options.clips).items():
            whole, opened, audio = [], [], sum(soundfile.info(path).duration for path in theirs)
            try:
                read_wave(str(ours[0]))
            except Exception as error:
                print(f"{name}: cannot be read: {error}")
                continue
            for _ in range(options.turns):
                reference = seconds(bare, theirs)
                whole.append(seconds(read_wave, ours) / reference)
                opened.append(seconds(recording_seconds, ours) / reference)
            print(
                f"{name}: {audio:.0f} s of audio, libsndfile {reference:.2f} s; read takes "
                f"{statistics.median(whole):.2f} ({min(whole):.2f} to {max(whole):.2f}) times as "
                f"long; the length alone {statistics.median(opened):.2f}"
            )


if __name__ == "__main__":
    main()
