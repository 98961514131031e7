"""Common Voice: clips whose length differs from clip_durations.tsv, and many jobs."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scripts
import soundfile
from fakes import common_voice, some_clips
from mp3s import ID3, TINY_SECONDS, silent_mp3, tiny_mp3
from prepared import ACCENTS, content

from fedtools.data.datadir import DataDir

SETS = [prefix + name for prefix in ("", "server_") for name in ("train", "valid", "test")]
prepare = partial(scripts.prepare, "commonvoice")


def clip_of(language: Path, index: int) -> Path:
    return sorted((language / "clips").iterdir())[index]


def reasons(said: str) -> dict[str, int]:
    """Return the reasons of `kept N, dropped M (reason: count, ...)`."""
    listed = re.search(r"dropped \d+ \((.*)\)", said)
    parts = [part.rpartition(": ") for part in listed[1].split(", ")] if listed else []
    return {reason: int(count) for reason, _, count in parts}


@pytest.mark.parametrize("durations", [True, False])
def test_every_clip_that_is_not_what_the_table_tells_is_dropped(tmp_path, durations):
    language = common_voice(tmp_path, some_clips(6, 2), durations=durations)
    channels = np.zeros((16_000, 5))
    frames = tiny_mp3()[len(ID3) :]
    five = io.BytesIO()
    soundfile.write(five, channels, 16_000, format="WAV")
    new = [
        # Cut off between two frames: only the table shows it.
        (ID3 + frames[: 6 * 144], "clip shorter than in clip_durations.tsv", True),
        (ID3 + frames + frames, "clip longer than in clip_durations.tsv", True),
        (ID3 + frames[: 9 * 144 + 5], "unreadable clip", False),
        (five.getvalue(), "clip of more than two channels", False),
        # Tools for measuring lengths never differ by a quarter of a second.
        (silent_mp3(TINY_SECONDS + 0.25), "", False),
    ]
    expected = Counter()
    for index, (raw, reason, table) in enumerate(new):
        clip_of(language, 7 * index).write_bytes(raw)
        expected.update([reason] * bool(reason and (durations or not table)))
    result = prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    assert reasons(result.out) == expected
    assert f"kept {48 - expected.total()}, " in result.out


def test_any_number_of_jobs_gives_the_same(tmp_path):
    clips = [replace(clip, seconds=0.3 + n % 9 / 10) for n, clip in enumerate(some_clips(52, 2))]
    language = common_voice(tmp_path, clips, durations=False)
    clip_of(language, 3).write_bytes(b"no clip")
    said = []
    for jobs in (1, 3):
        out = tmp_path / str(jobs)
        result = prepare(language, out, "--accents", ACCENTS, "--nj", jobs).ok()
        assert "unreadable clip: 1" in result.out
        said.append(result.out)
    assert said[0] == said[1] and content(tmp_path / "1") == content(tmp_path / "3")
    told = {f"{0.072 * round((0.3 + n % 9 / 10) / 0.072):.3f}" for n in range(9)}
    found = [DataDir.read(tmp_path / "3" / name).utt2dur.values() for name in SETS]
    assert set().union(*found) == told


def test_a_partial_table_is_filled_up_from_the_clips(tmp_path):
    clips = [replace(clip, seconds=1.44) for clip in some_clips(6, 2)]
    language = common_voice(tmp_path, clips)
    table = language / "clip_durations.tsv"
    lines = table.read_text().splitlines()
    # A table written by pandas has floats.
    told = ("1440", "0", "1440.0", "0.0")
    rest = [line.replace("1440", told[n % 4]) for n, line in enumerate(lines[1:20])]
    table.write_text("\n".join([lines[0], *rest]) + "\n")
    prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    for name in SETS:
        assert set(DataDir.read(tmp_path / "data" / name).utt2dur.values()) == {"1.440"}
