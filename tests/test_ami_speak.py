"""Transcripts of meetings, spoken: which of them, and what is left as background text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import soundfile
from conftest import ROOT, run

from fedtools.files.datadir import DataDir

MEETINGS = {"ES2002a": "train", "ES2003a": "train", "ES2011a": "dev", "ES2004a": "eval"}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ami")
    (root / "tsv").mkdir()
    for number, meeting in enumerate(MEETINGS):
        turns = [
            f"{role}\t{role[0]} says turn {turn} of meeting {number} ."
            for turn in range(4)
            for role in ("Marketing", "Project Manager")
        ]
        (root / "tsv" / f"{meeting}.tsv").write_text("".join(f"{turn}\n" for turn in turns))
    prepare = ROOT / "local" / "ami" / "prepare.py"
    run(prepare, root / "tsv", root / "text", "--transcripts").ok()
    speak(root).ok()
    return root


def speak(root: Path, *more: str):
    command = (ROOT / "local" / "ami" / "speak.py", root / "text", root / "data")
    return run(*command, "--hours", "0.005", "--each", "3", "--nj", "1", *more)


def test_what_is_spoken(spoken):
    for name in ("train", "dev", "eval"):
        whole = DataDir.read(spoken / "text" / name, "text", "utt2client")
        data = DataDir.read(spoken / "data" / name)
        run("utils/validate_data_dir.py", "--no-feats", spoken / "data" / name).ok()
        assert data.text.items() <= whole.text.items()
        for utterance, path in data.wav_scp.items():
            info = soundfile.info(path)
            assert info.samplerate == 16000 and info.channels == 1
            # Seven words take their time.
            assert 0.8 < info.duration < 8, utterance
        if name != "train":
            # The first three utterances of each client.
            for client in set(whole.utt2client.values()):
                own = [one for one in whole.utt2client if whole.utt2client[one] == client]
                assert [one for one in data.text if data.utt2client[one] == client] == own[:3]
    train = DataDir.read(spoken / "data" / "train", "text").text
    whole = DataDir.read(spoken / "text" / "train", "text").text
    # 45 words, and no line of theirs is background text.
    assert len(train) == 7
    background = (spoken / "data" / "background.txt").read_text().splitlines()
    assert sorted(background) == sorted(whole[one] for one in whole.keys() - train.keys())


def test_the_same_words_by_the_same_voice_are_the_same_bytes(spoken, tmp_path):
    made = {path: path.read_bytes() for path in (spoken / "data").rglob("*") if path.is_file()}
    assert "are there and whole" in speak(spoken).ok().err
    lost = next(path for path in made if path.suffix == ".wav")
    lost.write_bytes(b"damaged")
    speak(spoken).ok()
    assert all(path.read_bytes() == content for path, content in made.items())
    # Another seed has other voices, and other utterances of train.
    other = tmp_path / "other"
    shutil.copytree(spoken / "text", other / "text")
    speak(other, "--seed", "1").ok()
    one, two = (DataDir.read(root / "data" / "eval", "wav.scp").wav_scp for root in (spoken, other))
    assert one.keys() == two.keys()
    assert any(Path(one[name]).read_bytes() != Path(two[name]).read_bytes() for name in one)


def test_mistakes_are_told(spoken, tmp_path):
    speak(spoken, "--each", "0").fails(2, "--each")
    speak(tmp_path).fails(1, "text/train")
