"""Kaldi data directories in Common Voice's layout, as asr1's own stage 1 reads them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from commands import run
from conftest import ROOT

from fedtools.data.datadir import DataDir

RATE, GROUPS = 16000, ("Female", "Male one", "Male two")
SCRIPT = ROOT / "local/commonvoice/from_kaldi.py"


def sentence(number: int) -> str:
    return "sentence of " + "abcdefghij"[number // 10] + " and " + "klmnopqrst"[number % 10]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Make two directories of 18 speakers; one of them cuts utterances out of long recordings."""
    root = tmp_path_factory.mktemp("kaldi")
    rng = np.random.default_rng(0)
    for part, first in (("train", 0), ("test", 15)):
        speakers = [f"s{n:02}" for n in range(first, first + (15 if part == "train" else 3))]
        who = {f"{name}-{u}": name for name in speakers for u in "ab"}
        tables: dict[str, dict[str, str]] = {"utt2spk": who, "wav_scp": {}, "segments": {}}
        tables["text"] = {utt: sentence(2 * int(utt[1:3]) + "ab".index(utt[-1])) for utt in who}
        for name in speakers:
            time = np.arange(2 * RATE) / RATE
            tone = 300 + 40 * int(name[1:]) + 200 * (time >= 1)
            wave = 0.3 * np.sin(2 * np.pi * tone * time) + 0.01 * rng.standard_normal(2 * RATE)
            for number, utt in enumerate(f"{name}-{u}" for u in "ab"):
                piece = wave[number * RATE : (number + 1) * RATE]
                path = root / f"{utt}.wav"
                if part == "test":
                    path, piece = root / f"{name}.wav", wave
                    tables["segments"][utt] = f"{name} {number} {number + 1}"
                soundfile.write(path, piece, RATE)
                tables["wav_scp"][path.stem] = str(path)
        data = DataDir(root / part, **{name: one for name, one in tables.items() if one})
        data.others["spk2gender"] = {name: "fmm"[int(name[1:]) % 3] for name in speakers[1:]}
        data.write()
    lines = [f"s{n:02} {GROUPS[n % 3]}\n" for n in range(18)]
    (root / "spk2accent").write_text("".join(lines))
    return root


def convert(corpus: Path, out: Path, *more: object):
    accents = ("--accents", corpus / "spk2accent")
    return run(sys.executable, SCRIPT, out, corpus / "train", corpus / "test", *accents, *more)


def rows_of(path: Path) -> list[dict[str, str]]:
    head, *lines = path.read_text().splitlines()
    return [dict(zip(head.split("\t"), line.split("\t"), strict=True)) for line in lines]


def test_each_utterance_is_a_clip_with_its_speaker_words_accent_and_audio(corpus, tmp_path):
    assert "36 clips of 18 speakers" in convert(corpus, tmp_path / "cv").ok().out
    top = tmp_path / "cv/en"
    rows = rows_of(top / "validated.tsv")
    lengths = {row["clip"]: int(row["duration[ms]"]) for row in rows_of(top / "clip_durations.tsv")}
    assert lengths == {row["path"]: 1000 for row in rows}
    of_client: dict[str, set[int]] = {}
    for row in rows:
        number = next(n for n in range(36) if sentence(n) == row["sentence"])
        speaker, second = divmod(number, 2)
        of_client.setdefault(row["client_id"], set()).add(speaker)
        assert row["accents"] == GROUPS[speaker % 3]
        sex = ["female_feminine", "male_masculine", "male_masculine"][speaker % 3]
        assert row["gender"] == ("" if speaker in (0, 15) else sex)
        wave, rate = soundfile.read(top / "clips" / row["path"])
        # The loudest tone; MP3 adds a delay, which does not change it.
        loudest = np.abs(np.fft.rfft(wave)).argmax() * rate / len(wave)
        assert loudest == pytest.approx(300 + 40 * speaker + 200 * second, abs=5)
    assert sorted(map(len, of_client.values())) == [1] * 18


def test_the_recipe_reads_it(corpus, tmp_path):
    convert(corpus, tmp_path / "cv").ok()
    accents = "female=Female,male1=Male one,male2=Male two"
    options = ("--accents", accents, "--server-fraction", "0.5", "--hours", "2,1,1")
    prepare = ROOT / "local/commonvoice/prepare.py"
    run(sys.executable, prepare, tmp_path / "cv/en", tmp_path / "data", *options).ok()
    names = ("train", "valid", "test", "server_train", "server_valid", "server_test")
    sets = [DataDir.read(tmp_path / "data" / name) for name in names]
    assert sum(len(one.utterances) for one in sets) == 36
    assert {name for one in sets[:3] for name in one.utt2client.values()} == {
        "female", "male1", "male2",
    }  # fmt: skip


def test_a_speaker_without_accent_is_an_error_and_leaves_no_table(corpus, tmp_path):
    accents = tmp_path / "spk2accent"
    accents.write_text("".join((corpus / "spk2accent").read_text().splitlines(True)[:-1]))
    words = (sys.executable, SCRIPT, tmp_path / "cv", corpus / "train", corpus / "test")
    done = run(*words, "--accents", accents)
    done.fails(1, "spk2accent: no accent of 's17'", "add a line 's17 ACCENT'")
    assert not (tmp_path / "cv").exists()
    convert(corpus, tmp_path / "cv", "--language", "xx").fails(1, "--language 'xx': unknown code")
