"""Spoken meetings: choice of utterances and voices, and the remaining background text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import scripts
import soundfile
from fakes_ami import ami, plain
from prepared import checked

from fedtools.data.datadir import DataDir

# Speakers recur in other meetings, on other channels.
MEETINGS = {
    "ES2002a": ("FEE001", "MEE002"), "ES2003a": ("MEE003", "FIE004"), "ES2003b": ("FIE004",),
    "ES2011a": ("FEE005", "MEE006"), "ES2011c": ("MEE006", "FEE005"), "IS1008c": ("MIO007",),
    "ES2004a": ("FEE008", "MEE009"), "ES2004b": ("MEE009", "FEE008"),
}  # fmt: skip


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ami")
    meetings = {
        meeting: [
            plain(meeting, "ABC"[place], place, person,
                  [(1.25 + place + 4 * turn, 2.5 + place + 4 * turn,
                    f"person {place} says turn {turn} of {meeting[2:6]} now") for turn in range(3)])
            for place, person in enumerate(persons)
        ]
        for meeting, persons in MEETINGS.items()
    }  # fmt: skip
    corpus = ami(root, meetings)
    for wav in corpus.glob("*/audio/*.wav"):
        wav.unlink()
    scripts.prepare("ami", corpus, root / "text", "--speech", "synthetic").ok()
    speak(root).ok()
    return root


def speak(root: Path, *more: str):
    few = ("--hours", "0.005", "--nj", "1", "--dev", "ES2011c", "IS1008c")
    return scripts.program("local/ami/speak.py", root / "text", root / "data", *few, *more)


def test_what_is_spoken(spoken):
    for name, data in checked(spoken / "data").items():
        whole = DataDir.read(spoken / "text" / name)
        assert data.text.items() <= whole.text.items()
        for utterance, path in data.wav_scp.items():
            info = soundfile.info(path)
            assert info.samplerate == 16000 and info.channels == 1
            # Eight words need some time to say.
            assert 0.8 < info.duration < 8, utterance
        # Speakers and times as in the annotations; no segments, which would cut these files.
        for table in ("utt2person", "utt2meeting", "utt2start"):
            assert data.others[table].items() <= whole.others[table].items()
            assert data.others[table].keys() == data.text.keys()
        genders = {owner: owner.split("-")[2][0].lower() for owner in data.utt2client.values()}
        assert data.others["spk2gender"] == genders and not data.segments
        if name == "eval":
            assert data.text == whole.text
        if name == "dev":
            wanted = [one for one in whole.text if one[:7] in ("ES2011c", "IS1008c")]
            assert list(data.text) == wanted and len(wanted) == 9
    train = DataDir.read(spoken / "data" / "train", "text").text
    whole = DataDir.read(spoken / "text" / "train", "text").text
    # 45 words, none of whose lines is background text.
    assert len(train) == 6
    background = (spoken / "data" / "background.txt").read_text().splitlines()
    assert sorted(background) == sorted(whole[one] for one in whole.keys() - train.keys())


def test_a_voice_for_each_person():
    voices = scripts.load("ami", "speak")[0].voices_of
    persons = {f"{sex}EE{number:03}" for number in range(95) for sex in "FM"}
    found = voices(persons, 0)
    assert found.keys() == persons
    assert len({voice.voice for voice in found.values()}) == 190
    for person, voice in found.items():
        assert voice.gender == {"F": "female_feminine", "M": "male_masculine"}[person[0]]
    accents = [found[person].accent.text for person in sorted(persons)]
    counts = [accents.count(accent) for accent in set(accents)]
    assert len(counts) == 6 and max(counts) - min(counts) <= 1
    assert voices(persons, 1) != found


def test_the_same_words_by_the_same_voice_are_the_same_bytes(spoken, tmp_path):
    made = {path: path.read_bytes() for path in (spoken / "data").rglob("*") if path.is_file()}
    assert "clips are complete" in speak(spoken).ok().err
    lost = next(path for path in made if path.suffix == ".wav")
    lost.write_bytes(b"damaged")
    speak(spoken).ok()
    assert all(path.read_bytes() == content for path, content in made.items())
    # Another seed has other voices, and other training utterances.
    other = tmp_path / "other"
    shutil.copytree(spoken / "text", other / "text")
    speak(other, "--seed", "1").ok()
    one, two = (DataDir.read(root / "data" / "eval", "wav.scp").wav_scp for root in (spoken, other))
    assert one.keys() == two.keys()
    assert all(Path(one[name]).read_bytes() != Path(two[name]).read_bytes() for name in one)


def test_mistakes_are_told(spoken, tmp_path):
    speak(spoken, "--nj", "0").fails(2, "--nj")
    speak(tmp_path).fails(1, "text/train")
    speak(spoken, "--dev", "ES2004a").fails(1, "no meeting 'ES2004a' in dev")
    # With recordings, there is nothing to speak.
    heard = tmp_path / "heard"
    shutil.copytree(spoken / "data", heard / "text")
    speak(heard).fails(1, "--speech synthetic")
    nameless = tmp_path / "nameless"
    shutil.copytree(spoken / "text", nameless / "text")
    table = nameless / "text" / "eval" / "utt2person"
    table.write_text(table.read_text().replace("MEE009", "XEE009"))
    speak(nameless).fails(1, "'XEE009' does not begin with F or M")
