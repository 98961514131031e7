"""Speech Commands: every quirk of the corpus through prepare.py, and the mini corpus."""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import prepared
import pytest
import scripts
from commands import inside
from fakes import (
    KEYWORDS,
    OTHER_WORDS,
    Word,
    google_set,
    hex_id,
    some_words,
    speech_commands,
    speech_commands_test_set,
    tiny_wav,
)
from hypothesis import given
from hypothesis import strategies as st
from prepared import content
from scipy.stats import kstest

from fedtools.audio.wave import read_wave, recording_seconds
from fedtools.core.errors import UserError
from fedtools.data.clips import Clips
from fedtools.data.datadir import DataDir, byte_order, read_table
from fedtools.data.validate import validate_data_dir

SETS = ["train", "valid", "test"]
prepare = partial(scripts.prepare, "speechcommands")


def read(out: Path, task: str) -> dict[str, DataDir]:
    """Read the three sets of a task, each of which passes validate_data_dir.py."""
    for name in SETS:
        validate_data_dir(out / task / name, feats=False, recording_seconds=recording_seconds)
    return {name: DataDir.read(out / task / name) for name in SETS}


def labels(data: DataDir) -> Counter:
    return Counter(data.text.values())


def ids(clips: list[Word], part: str) -> set[str]:
    return {f"{clip.speaker}-{clip.word}-{clip.number}" for clip in clips if clip.part == part}


def table(out: str) -> dict[tuple[str, str], list[str]]:
    """Return (task, set) -> the other cells of the printed table."""
    rows = [line.split() for line in out.splitlines() if re.match(r"(keywords|words) ", line)]
    return {(row[0], row[1]): row[2:] for row in rows}


# --- the tasks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_every_word_is_a_class_and_the_lists_are_the_split(tmp_path, version):
    words = [*KEYWORDS, *OTHER_WORDS[: 20 if version == 1 else 25]]
    clips = some_words(2, 1, 1, words)
    again = replace(clips[0], number=1, seconds=0.21)
    corpus = speech_commands(tmp_path, [*clips, again])
    result = prepare(corpus, tmp_path / "data", "--task", "words").ok()
    assert f"kept {len(clips) + 3}, dropped 0" in result.out
    classes = (tmp_path / "data/words/classes.txt").read_text().split("\n")
    assert classes == [*byte_order(words), ""] and len(words) == 25 + 5 * version
    sets = read(tmp_path / "data", "words")
    for name, data in sets.items():
        assert set(data.text) == ids([*clips, again], name)
        assert data.utt2spk == data.utt2client
        for utterance, label in data.text.items():
            speaker, word, _ = utterance.split("-")
            assert (speaker, word) == (data.utt2spk[utterance], label)
            assert data.wav_scp[utterance].startswith(f"{corpus}/{word}/{speaker}_nohash_")
    short = f"{again.speaker}-{again.word}-1"
    assert sets["train"].utt2dur[short] == "0.210"
    assert not (tmp_path / "data/keywords").exists()


def test_the_twelve_classes_have_silence_and_unknown_by_tenths(tmp_path):
    clips = some_words(5, 2, 3)
    # 51 keywords: a tenth is 5.1, rounded up to 6
    clips.append(Word(clips[0].speaker, "yes", 7))
    corpus = speech_commands(tmp_path, clips)
    prepare(corpus, tmp_path / "data").ok()
    classes = (tmp_path / "data/keywords/classes.txt").read_text().split()
    assert classes == ["_silence_", "_unknown_", *KEYWORDS]
    noise = read_table(tmp_path / "data/noise.scp")
    assert list(noise) == ["noise_0", "noise_1"]
    sets = read(tmp_path / "data", "keywords")
    cuts = [value for data in sets.values() for value in data.segments.values() if "noise" in value]
    assert len(set(cuts)) == len(cuts) == 11
    for (name, data), count in zip(sets.items(), (6, 2, 3), strict=True):
        found = labels(data)
        assert found.pop("_silence_") == found.pop("_unknown_") == count
        assert set(found) == set(KEYWORDS)
        speakers = {clip.speaker for clip in clips if clip.part == name}
        assert set(data.utt2client.values()) == speakers
        for utterance, label in data.text.items():
            recording, start, end = data.segments[utterance].split()
            if label == "_silence_":
                assert data.wav_scp[recording] == noise[recording.split("-")[1]]
                wave = read_wave(data.wav_scp[recording], float(start), float(end)).samples
                assert len(wave) == pytest.approx(16000, abs=2)
            else:
                assert (recording, start, end) == (utterance, "0", "-1")
                assert utterance in ids(clips, name)
                assert label == (utterance.split("-")[1] if label != "_unknown_" else label)
                assert (label == "_unknown_") == (utterance.split("-")[1] not in KEYWORDS)


def test_silence_comes_from_all_of_the_noise_and_goes_where_the_keywords_are(tmp_path):
    clips = some_words(1, 1, 1)
    much, little, none = (hex_id(name) for name in ("much", "little", "none"))
    clips += [Word(much, word, number) for word in KEYWORDS for number in range(36)]
    clips += [Word(little, word, number) for word in KEYWORDS for number in range(4)]
    clips += [Word(none, "bed", number) for number in range(40)]
    corpus = speech_commands(tmp_path, clips, noise=(40.0, 20.0, 0.9))
    prepare(corpus, tmp_path / "data").ok()
    data = read(tmp_path / "data", "keywords")["train"]
    silence = [utterance for utterance, label in data.text.items() if label == "_silence_"]
    assert len(silence) == 41
    owners = Counter(data.utt2client[utterance] for utterance in silence)
    assert owners[much] > 25 and owners[none] == 0
    recordings = Counter(data.segments[utterance].split()[0][-1] for utterance in silence)
    # 12 of 18 pieces are of the first; the second has none where no further one fits.
    assert 24 <= recordings["0"] <= 29 and recordings["2"] == 0
    starts = sorted(float(data.segments[utterance].split()[1]) for utterance in silence)
    assert starts[0] < 7 and starts[-1] > 32
    assert "noise_2" in read_table(tmp_path / "data/noise.scp")


@pytest.mark.parametrize("noise", [(61.3, 10.0), (1.5,) * 12, (5.0, 2.0)], ids=str)
def test_no_silence_of_a_set_is_heard_in_another(tmp_path, noise):
    corpus = speech_commands(tmp_path, some_words(40, 40, 40, KEYWORDS), noise=noise)
    prepare(corpus, tmp_path / "data", "--task", "keywords", "--unknown", "false").ok()
    heard = []
    for name, data in read(tmp_path / "data", "keywords").items():
        for utterance, label in data.text.items():
            if label == "_silence_":
                recording, start, end = data.segments[utterance].split()
                number = int(recording.rpartition("_")[2])
                assert float(start) >= 0 and float(end) <= noise[number] + 1e-9
                heard.append((recording, float(start), float(end), name))
    assert len(heard) == 3 * 40
    for recording, start, end, name in heard:
        for other, begin, finish, another in heard:
            apart = recording != other or end <= begin + 1e-9 or finish <= start + 1e-9
            assert name == another or apart


def test_every_set_has_silence_of_every_recording(tmp_path):
    corpus = speech_commands(tmp_path, some_words(40, 40, 40, KEYWORDS), noise=(20.0,) * 4)
    prepare(corpus, tmp_path / "data", "--task", "keywords", "--unknown", "false").ok()
    for name, data in read(tmp_path / "data", "keywords").items():
        places = [place.split()[:2] for utt, place in data.segments.items() if "_silence_" in utt]
        of = Counter(recording for recording, _ in places)
        # Of the 40 pieces, valid and test have two of each recording, and use each five times.
        assert len(of) == 4 and sum(of.values()) == 40
        assert name == "train" or set(of.values()) == {10}
        pieces = {(recording, int(float(start) / 2)) for recording, start in places}
        assert len(pieces) == (24 if name == "train" else 8)


@pytest.mark.parametrize("seconds", [1.0, 1.5])
def test_made_noise_is_as_loud_as_its_rule_says_and_no_clip_is_asked(tmp_path, seconds):
    """White and pink noise have an RMS uniform in decibels, whatever the corpus has."""
    options = ["--noise", "made", "--clip-seconds", str(seconds), "--task", "keywords"]
    made = {}
    for name, words in (("one", KEYWORDS), ("other", [*KEYWORDS, "bed"])):
        corpus = speech_commands(tmp_path / name, some_words(40, 3, 3, words), noise=())
        unknown = str(name == "other").lower()
        prepare(corpus, tmp_path / name / "data", *options, "--unknown", unknown).ok()
        table = read_table(tmp_path / name / "data/noise.scp")
        made[name] = {place: read_wave(path).samples for place, path in table.items()}
    assert made["one"].keys() == made["other"].keys()
    assert all(np.array_equal(made["other"][name], wave) for name, wave in made["one"].items())
    levels = {"white": [], "pink": []}
    for name, wave in made["one"].items():
        pieces = wave.reshape(-1, round(2 * seconds * 16000))
        power = np.abs(np.fft.rfft(pieces)) ** 2
        half = power.shape[1] // 2
        low, high = power[:, 1:half].sum(1), power[:, half:].sum(1)
        colour = name.partition("_")[0]
        # Equal power in equal bands, or in equal octaves: of ten, nine are in the lower half.
        assert (np.median(high / low) > 0.9) == (colour == "white")
        levels[colour] += (20 * np.log10(np.sqrt((pieces**2).mean(1)))).tolist()
    for found in levels.values():
        assert len(found) == 150
        assert kstest(found, "uniform", (-60, 45)).pvalue > 0.01
    # Silence is cut from one piece each: no clip has two levels.
    data = read(tmp_path / "one/data", "keywords")["train"]
    silence = [utt for utt, label in data.text.items() if label == "_silence_"]
    assert len(silence) == 40
    for utterance in silence:
        recording, start, end = data.segments[utterance].split()
        wave = read_wave(data.wav_scp[recording], float(start), float(end)).samples
        halves = [np.sqrt((part**2).mean()) for part in np.array_split(wave, 2)]
        assert max(halves) < 1.5 * min(halves)


def test_what_is_to_be_said_of_the_data_is_kept(tmp_path):
    clips = [*some_words(5, 2, 2, KEYWORDS), *some_words(2, 2, 2, OTHER_WORDS[:3])]
    corpus = speech_commands(tmp_path, clips)
    options = ["--task", "keywords", "--noise", "made", "--unknown", "false"]
    out = prepare(corpus, tmp_path / "data", *options).ok().out
    notes = (tmp_path / "data/notes.txt").read_text().splitlines()
    assert len(notes) == 2 and all(note in out.splitlines() for note in notes)
    assert "drawn log-uniformly from -60 to -15 dB" in notes[0]
    # A tenth of 5 x 10.
    said = "no class _unknown_, which would need 5 clips: training has 6 clips of other words, at 2"
    assert notes[1] == f"keywords: {said} of 5 clients"
    prepare(corpus, tmp_path / "data", "--task", "words").ok()
    assert (tmp_path / "data/notes.txt").read_text() == ""


def test_tasks_are_made_together_or_apart_and_a_seed_is_of_the_keywords(tmp_path):
    corpus = speech_commands(tmp_path, some_words())
    prepare(corpus, tmp_path / "a").ok()
    first = content(tmp_path / "a")
    prepare(corpus, tmp_path / "b", "--task", "keywords").ok()
    prepare(corpus, tmp_path / "b", "--task", "words").ok()
    assert content(tmp_path / "b") == first
    prepare(corpus, tmp_path / "c", "--seed", "1").ok()
    other = content(tmp_path / "c")
    changed = {name.rpartition("/")[0] for name in first if other[name] != first[name]}
    assert changed == {"keywords/train", "keywords/valid", "keywords/test"}


def test_another_corpus_has_its_own_words_and_numbers_for_speakers(tmp_path):
    words = [f"zodis_{letter}" for letter in "abcdefghijkl"]
    clips = [
        Word(f"{speaker:02}", word, part=part)
        for speaker, part in enumerate(["train"] * 10 + ["valid", "test"], 1)
        for word in words
    ]
    corpus = speech_commands(tmp_path, clips)
    said = "no clip of yes, no, up, down, left, right, on, off, stop, go"
    remedy = "choose others with --keywords (zodis_a, zodis_b"
    prepare(corpus, tmp_path / "data").fails(1, said, remedy, "or make only --task words")
    assert not (tmp_path / "data").exists()
    prepare(corpus, tmp_path / "data", "--keywords", ",".join(words[2:])).ok()
    assert (tmp_path / "data/keywords/classes.txt").read_text().split()[2:] == words[2:]
    assert (tmp_path / "data/words/classes.txt").read_text().split() == words
    sets = read(tmp_path / "data", "keywords")
    assert labels(sets["train"]) == {
        "_silence_": 10,
        "_unknown_": 10,
        **dict.fromkeys(words[2:], 10),
    }
    assert sets["train"].utt2client["01-zodis_c-0"] == "01"
    assert set(read(tmp_path / "data", "words")["test"].text) == {f"12-{word}-0" for word in words}


def test_too_few_other_words_are_all_unknown(tmp_path):
    clips = some_words(5, 2, 2, KEYWORDS)
    clips += [replace(clips[0], word="bed"), replace(clips[-1], word="bed")]
    corpus = speech_commands(tmp_path, clips)
    result = prepare(corpus, tmp_path / "data").ok()
    assert "keywords, train: 1 unknown clips instead of 5, for lack of other words" in result.out
    counts = [labels(data)["_unknown_"] for data in read(tmp_path / "data", "keywords").values()]
    assert counts == [1, 0, 1]
    assert "keywords, test: 1 unknown clips instead of 2, for lack of other words" in result.out
    # Unless the archive is the test set.
    archive = speech_commands_test_set(tmp_path, clips)
    result = prepare(corpus, tmp_path / "archive", "--test-archive", archive).ok()
    assert "keywords, train: 1 unknown clips" in result.out and "keywords, test: " not in result.out


@pytest.mark.parametrize("silence", [True, False])
@pytest.mark.parametrize("unknown", [True, False])
def test_any_keywords_with_or_without_silence_and_unknown(tmp_path, silence, unknown):
    clips = some_words()
    corpus, archive = speech_commands(tmp_path, clips), speech_commands_test_set(tmp_path, clips)
    options = ["--keywords", "stop,yes,go", "--silence", str(silence).lower()]
    options += ["--unknown", str(unknown).lower(), "--task", "keywords"]
    prepare(corpus, tmp_path / "data", *options).ok()
    negative = ["_silence_"] * silence + ["_unknown_"] * unknown
    # The order of the class indices is that of the option.
    classes = (tmp_path / "data/keywords/classes.txt").read_text().split()
    assert classes == [*negative, "stop", "yes", "go"]
    sets = read(tmp_path / "data", "keywords")
    for (name, data), speakers in zip(sets.items(), (5, 2, 2), strict=True):
        tenth = -(-3 * speakers // 10)
        of_keywords = dict.fromkeys(("stop", "yes", "go"), speakers)
        assert labels(data) == of_keywords | dict.fromkeys(negative, tenth), name
        others = {utt.split("-")[1] for utt, label in data.text.items() if label == "_unknown_"}
        assert not others & {"stop", "yes", "go"}
    assert not (tmp_path / "data/words").exists()
    # The folders of the task's labels in the test archive, and no others.
    result = prepare(corpus, tmp_path / "archive", *options, "--test-archive", archive).ok()
    found = labels(read(tmp_path / "archive", "keywords")["test"])
    assert found == {"stop": 2, "yes": 2, "go": 2} | dict.fromkeys(negative, 3)
    left = [label for label in ("_silence_", "_unknown_") if label not in negative]
    left = ", ".join([*left, "down, left, no, off, on, right, up"])
    assert f"keywords: the test archive's {left} are left out" in result.out


def test_keywords_that_are_all_words_leave_none_unknown(tmp_path):
    corpus = speech_commands(tmp_path, some_words(2, 1, 1, ["a", "b"]), noise=())
    command = [corpus, tmp_path / "data", "--keywords", "b,a", "--silence", "false"]
    prepare(*command).fails(1, "no clip of another word in train", "give --unknown false")
    prepare(*command, "--unknown", "false").ok()
    assert (tmp_path / "data/keywords/classes.txt").read_text() == "b\na\n"
    assert labels(read(tmp_path / "data", "keywords")["train"]) == {"a": 2, "b": 2}


def test_googles_names_of_the_tasks(tmp_path):
    corpus = speech_commands(tmp_path, some_words())
    for name, old in (("keywords", "12"), ("words", "35")):
        prepare(corpus, tmp_path / name, "--task", name).ok()
        prepare(corpus, tmp_path / old, "--task", old).ok()
        assert content(tmp_path / name) == content(tmp_path / old)
        made = {path.name for path in (tmp_path / old).iterdir()}
        assert made == {name, "noise.scp", "notes.txt"}


# --- the constructions ---------------------------------------------------------------------------


def test_official_trains_on_no_test_clip_and_paper_on_all(tmp_path):
    clips = some_words(6, 2, 3)
    clips += [Word(hex_id("five"), word) for word in KEYWORDS[:5]]
    small = [Word(hex_id("small"), word) for word in ("yes", "no", "up", "cat")]
    corpus = speech_commands(tmp_path, clips + small)
    official = prepare(corpus, tmp_path / "official").ok()
    paper = prepare(corpus, tmp_path / "paper", "--split", "paper").ok()
    for task in ("keywords", "words"):
        ours, theirs = read(tmp_path / "official", task), read(tmp_path / "paper", task)
        for name in ("valid", "test"):
            assert ours[name].text == theirs[name].text and ours[name].wav_scp
            assert not set(ours[name].text) & set(ours["train"].text)
            assert not set(ours[name].utt2spk.values()) & set(ours["train"].utt2spk.values())
            assert set(theirs[name].text) < set(theirs["train"].text)
            cells = table(official.out)[task, name]
            assert cells[-2:] == ["0", "0"]
            cells = table(paper.out)[task, name]
            assert cells[-2:] == cells[:2] and int(cells[0]) == len(theirs[name].text)
        everything = {**ours["train"].text, **ours["valid"].text, **ours["test"].text}
        assert small[0].speaker in ours["train"].utt2client.values()
        assert theirs["train"].text == {
            utterance: label
            for utterance, label in everything.items()
            if not utterance.startswith(small[0].speaker)
        }
        assert f"{task}: 1 clients of under 5 clips are left out of train" in paper.out
    again = prepare(corpus, tmp_path / "again", "--split", "paper", "--min-clips", "1").ok()
    assert len(read(tmp_path / "again", "words")["train"].text) == len(clips) + 4
    assert "left out" not in again.out + official.out
    assert "in training too" not in official.out + paper.out


def test_the_table_says_what_came_out(tmp_path):
    clips = some_words(4, 1, 1, [*KEYWORDS, "bed"])
    clips += [Word(clips[0].speaker, "yes", number) for number in range(1, 8)]
    # the lists of this corpus split a speaker
    clips.append(replace(clips[0], number=9, part="test"))
    result = prepare(speech_commands(tmp_path, clips), tmp_path / "data").ok()
    rows = table(result.out)
    assert rows["words", "train"] == ["51", "4", "12.8", "18", "-", "-"]
    assert rows["words", "valid"] == ["11", "1", "11.0", "11", "0", "0"]
    assert rows["words", "test"] == ["12", "2", "6.0", "11", "0", "1"]
    assert "words, test: 1 of its clients are in training too" in result.out
    assert "words, valid: " not in result.out
    for (task, name), row in rows.items():
        sizes = Counter(read(tmp_path / "data", task)[name].utt2client.values())
        average = f"{sizes.total() / len(sizes):.1f}"
        assert row[:4] == [str(sizes.total()), str(len(sizes)), average, str(max(sizes.values()))]
    widths = {len(line) for line in result.out.splitlines()[:7]}
    assert len(widths) == 1, result.out


# --- the test archive ----------------------------------------------------------------------------


def test_the_test_archive_is_the_test_set_of_the_twelve_classes(tmp_path):
    clips = some_words()
    corpus = speech_commands(tmp_path, clips)
    archive = speech_commands_test_set(tmp_path, clips)
    prepare(corpus, tmp_path / "lists").ok()
    for split in ("official", "paper"):
        out = tmp_path / split
        prepare(corpus, out, "--split", split, "--test-archive", archive).ok()
        test = read(out, "keywords")["test"]
        found = labels(test)
        assert (found.pop("_silence_"), found.pop("_unknown_")) == (3, 3)
        assert found == dict.fromkeys(KEYWORDS, 2)
        speaker = clips[-1].speaker
        first = next(clip.speaker for clip in clips if clip.part == "test")
        assert f"{first}-bed-1" in test.text and f"{hex_id('unknown')}-_unknown_-0" in test.text
        assert test.utt2spk["_silence_-noise_2"] == "_silence_"
        assert test.wav_scp[f"{speaker}-yes-0"] == str(archive / f"yes/{speaker}_nohash_0.wav")
        assert not test.segments
        assert (
            read(out, "words")["test"].wav_scp == read(tmp_path / "lists", "words")["test"].wav_scp
        )
        in_training = set(test.text) & set(read(out, "keywords")["train"].text)
        assert len(in_training) == (20 if split == "paper" else 0)
    official = content(tmp_path / "official")
    assert {
        name for name, here in content(tmp_path / "lists").items() if official.get(name) != here
    } == {f"keywords/test/{name}" for name in (
        "client2utt segments spk2utt text utt2client utt2dur utt2spk wav.scp").split()}  # fmt: skip


def test_a_test_archive_with_other_folders_is_refused(tmp_path):
    clips = some_words()
    corpus, archive = speech_commands(tmp_path, clips), speech_commands_test_set(tmp_path, clips)
    said = ["with _unknown_, this is a test archive", "--test-archive"]
    prepare(archive, tmp_path / "data").fails(1, *said)
    command = [corpus, tmp_path / "data", "--test-archive", archive]
    (archive / "_silence_").rename(archive / "visual")
    said = "no clips of '_silence_'; it has _unknown_, down, go"
    prepare(*command).fails(1, said, "see --keywords, --silence, --unknown")
    prepare(*command, "--keywords", "yes,bed").fails(1, "no clips of '_silence_'")
    prepare(*command, "--keywords", "yes,bed", "--silence", "false").fails(1, "no clips of 'bed'")
    prepare(*command[:3], tmp_path / "nowhere").fails(1, "nowhere: no such folder")
    assert not (tmp_path / "data").exists()


# --- layouts of others ---------------------------------------------------------------------------


def test_without_its_lists_a_corpus_is_split_by_googles_hash(tmp_path):
    """Google's rule is that of its README, with which test_own_corpus.py checks its real lists."""
    clips = some_words()
    corpus, out = speech_commands(tmp_path, clips), tmp_path / "data"
    # Enough speakers for every set; a name in the lists of Google's corpus has a known set.
    for number in range(60):
        shutil.copy(corpus / clips[0].path, corpus / f"yes/{number:08x}_nohash_0.wav")
    for name in ("validation_list.txt", "testing_list.txt"):
        (corpus / name).unlink()
    result = prepare(corpus, out, "--task", "words", "--min-clips", 1).ok()
    said = "no validation_list.txt and testing_list.txt: split by a hash of the speaker"
    assert said in result.out and said in (out / "notes.txt").read_text()
    found = read(out, "words")
    seen = {name: set(data.utt2spk.values()) for name, data in found.items()}
    assert all(google_set(who) == name for name, people in seen.items() for who in people)
    assert sum(map(len, seen.values())) == len({clip.speaker for clip in clips}) + 60


@pytest.mark.parametrize("left", ["validation_list.txt", "testing_list.txt"])
def test_one_list_of_two_is_no_split(tmp_path, left):
    corpus = speech_commands(tmp_path, some_words())
    (corpus / left).unlink()
    prepare(corpus, tmp_path / "data").fails(1, f"no {left}", "put it back")
    assert not (tmp_path / "data").exists()


LAYOUTS = {
    "hugging face": (
        ("train/yes/1a_nohash_0.wav", "validation/yes/1b_nohash_0.wav", "test/no/1c_nohash_0.wav"),
        "put the words of test, train, validation into one folder",
    ),
    "above": (("v2/yes/1a_nohash_0.wav", "v2/no/1a_nohash_0.wav"), "name the folder of the words"),
    "mswc": (
        ("en_splits.csv", "clips/yes/common_voice_en_1.opus"),
        "Multilingual Spoken Words has its speakers in *_splits.csv",
    ),
    "archives": (("data/train.tar.gz", "data/test.tar.gz"), "unpack the archives"),
    "tables": (("v0.02/train-00000.parquet",), "take Google's own archive"),
    "names": (("yes/1.wav", "no/2.wav"), "a folder of such clips for each word"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_get_the_remedy_that_fits(tmp_path, name):
    files, said = LAYOUTS[name]
    for file in files:
        (tmp_path / "corpus" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / file).write_bytes(tiny_wav("x"))
    problem = "no <word>/<speaker>_nohash_<number>.wav"
    prepare(tmp_path / "corpus", tmp_path / "data").fails(1, problem, said)


def test_names_that_end_twice_in_wav_have_a_speaker(tmp_path):
    """Google's test archive has such names, and a speaker of each clip of a word."""
    clips = some_words()
    corpus, archive = speech_commands(tmp_path, clips), speech_commands_test_set(tmp_path, clips)
    before = prepare(corpus, tmp_path / "one", "--test-archive", archive).ok()
    for label in ("yes", "_unknown_"):
        for path in sorted((archive / label).glob("*.wav")):
            path.rename(f"{path}.wav")
    after = prepare(corpus, tmp_path / "two", "--test-archive", archive).ok()
    for table in ("utt2spk", "text", "utt2client"):
        one, two = (tmp_path / name / "keywords/test" / table for name in ("one", "two"))
        assert one.read_text() == two.read_text()
    assert "have no speaker" not in before.out + after.out
    (archive / "yes/anything.wav").write_bytes(tiny_wav("x"))
    result = prepare(corpus, tmp_path / "three", "--test-archive", archive).ok()
    assert "names of 1 clips of the test archive have no speaker: their label is it" in result.out


ACCENTED = {"yes": "où", "no": "oui", "up": "дом", "down": "d\u00e9j\u00e0"}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_words_of_any_letters_are_classes(tmp_path, form):
    """Labels are as they are written, composed; ids are ASCII. Some systems store names as NFD."""
    corpus, out = speech_commands(tmp_path, some_words()), tmp_path / "data"
    for word, other in ACCENTED.items():
        written = unicodedata.normalize(form, other)
        (corpus / word).rename(corpus / written)
        for name in ("validation_list.txt", "testing_list.txt"):
            listed = (corpus / name).read_text()
            (corpus / name).write_text(listed.replace(f"{word}/", f"{written}/"))
    keywords = unicodedata.normalize(form, ",".join(ACCENTED.values()))
    prepare(corpus, out, "--keywords", keywords).ok()
    lines = (out / "keywords/classes.txt").read_text().splitlines()
    assert lines == ["_silence_", "_unknown_", *ACCENTED.values()]
    found = read(out, "keywords")
    assert set(ACCENTED.values()) <= labels(found["test"]).keys()
    assert all(name.isascii() for data in found.values() for name in data.text)
    classes = out / "keywords/classes.txt"
    inside("pack-clips", out / "keywords/test", out / "clips", "--classes", classes).ok()
    packed = Clips.read(out / "clips")
    assert Counter(packed.classes[label] for label in packed.labels) == labels(found["test"])
    sizes = [len(data.text) for data in read(out, "words").values()]
    plain = tmp_path / "plain"
    speech_commands(plain, some_words())
    prepare(next(plain.iterdir()), tmp_path / "other").ok()
    assert sizes == [len(data.text) for data in read(tmp_path / "other", "words").values()]


def test_two_folders_of_one_word_are_told(tmp_path):
    corpus = speech_commands(tmp_path, some_words())
    (corpus / "yes").rename(corpus / "d\u00e9j\u00e0")
    (corpus / "no").rename(corpus / "de\u0301ja\u0300")
    prepare(corpus, tmp_path / "data").fails(1, "a second folder of 'déjà'", "join the two")


# --- dropped clips -------------------------------------------------------------------------------

TRAPS = [
    ({"audio": "empty"}, "empty file"),
    ({"audio": "damaged"}, "unreadable audio"),
    ({"audio": "cut"}, "unreadable audio"),
    ({"audio": "silent"}, "no samples"),
    ({"audio": "missing", "part": "test"}, "on a list, but missing"),
    ({"audio": "empty", "part": "valid"}, "empty file"),
    ({"file": "yes.wav"}, "not the name of a clip"),
    ({"file": "._0a2b400e_nohash_1.wav"}, "not the name of a clip"),
    ({"file": "0a2b400e_nohash_.wav"}, "not the name of a clip"),
    ({"word": "_background_noise_", "file": "tap.wav", "audio": "damaged"}, "unreadable audio"),
]


def test_every_fault_is_dropped_and_counted(tmp_path):
    clips = some_words()
    expected: Counter = Counter()
    for number, (fault, reason) in enumerate(TRAPS):
        clips.append(replace(Word(hex_id("faulty"), "yes", number + 1), **fault))
        expected[reason] += 1
    corpus = speech_commands(tmp_path, clips)
    (corpus / "yes" / "notes.txt").write_text("no clip, and nobody says so")
    for folder in ("empty folder", ".git"):
        (corpus / folder).mkdir()
    (corpus / ".git" / "0a2b400e_nohash_1.wav").write_bytes(b"")
    prepare(corpus, tmp_path / "clean", "--max-drop", "0.1").ok()
    result = prepare(corpus, tmp_path / "data", "--max-drop", "0.1").ok()
    good = len(clips) - len(TRAPS)
    last = result.out.splitlines()[-1]
    assert last.startswith(f"kept {good + 2}, dropped {len(TRAPS)} (")
    found = re.findall(r"[(,] ?([a-z][a-z ,]+): (\d+), the first (\S+\.wav)(?=[,)])", last)
    assert {reason: int(count) for reason, count, _ in found} == expected
    sets = read(tmp_path / "data", "words")
    assert sum(len(data.text) for data in sets.values()) == good
    assert len((tmp_path / "data/words/classes.txt").read_text().split()) == 14


def test_lost_clips_are_told_with_the_first(tmp_path):
    clips = some_words()
    corpus = speech_commands(tmp_path, clips)
    for clip in clips[:8]:
        (corpus / clip.path).write_bytes(b"")
    first = min(str(clip.path) for clip in clips[:8])
    said = f"kept 120, dropped 8 (empty file: 8, the first {corpus / first}): over 2.0%"
    prepare(corpus, tmp_path / "data").fails(1, said)
    for clip in clips:
        (corpus / clip.path).write_bytes(b"")
    prepare(corpus, tmp_path / "data", "--max-drop", "1").fails(1, "no usable clip")


def test_stereo_clips_are_used(tmp_path):
    clips = some_words()
    clips.append(Word(hex_id("a"), "yes", audio="stereo"))
    result = prepare(speech_commands(tmp_path, clips), tmp_path / "data").ok()
    assert f"{hex_id('a')}" in "".join(map(str, content(tmp_path / "data").values()))
    assert "dropped 0" in result.out


# --- bad input ----------------------------------------------------------------------------------


def test_bad_lists_are_told_with_their_line(tmp_path):
    clips = some_words()
    corpus, out = speech_commands(tmp_path, clips), tmp_path / "data"
    valid, test = corpus / "validation_list.txt", corpus / "testing_list.txt"
    prepare(corpus, out).ok()
    before = content(out)
    # Windows line ends, or no line end at the end, are equivalent
    test.write_bytes(test.read_bytes().replace(b"\n", b"\r\n"))
    valid.write_bytes(valid.read_bytes()[:-1])
    prepare(corpus, out).ok()
    assert content(out) == before

    whole = valid.read_bytes()
    valid.write_bytes(whole[:-5])
    prepare(corpus, out).fails(1, "validation_list.txt:28: ", "is not the name of a clip")
    valid.write_bytes(b"\x1f\x8b\x08\xff" + whole)
    prepare(corpus, out).fails(1, "validation_list.txt:1: ", "is not the name of a clip")
    valid.write_bytes(b"")
    prepare(corpus, out).fails(1, "validation_list.txt: an empty list", "unpack")
    valid.write_bytes(whole + b"\n" + test.read_bytes().splitlines(True)[2])
    said = "is in line 29 of validation_list.txt too"
    prepare(corpus, out).fails(1, "testing_list.txt:3: ", said)
    valid.unlink()
    prepare(corpus, out).fails(1, "speech_commands: no validation_list.txt", "put it back")
    assert content(out) == before


def test_bad_input_is_told_in_one_line(tmp_path):
    clips = some_words()
    corpus, out = speech_commands(tmp_path, clips, noise=()), tmp_path / "data"
    said = [
        "_background_noise_: too little noise for each set to have its own",
        "give --silence false",
    ]
    prepare(corpus, out).fails(1, *said)
    assert not out.exists()
    prepare(corpus, out, "--task", "words").ok()
    assert (out / "noise.scp").read_bytes() == b""
    (corpus / "_background_noise_" / "short.wav").write_bytes(tiny_wav("noise", 0.9))
    prepare(corpus, out).fails(1, *said)
    few = "task words has no clip in train"
    prepare(corpus, out, "--task", "words", "--min-clips", "50").fails(1, few, "lower --min-clips")
    (corpus / "dvi rankos").mkdir()
    shutil.copy(corpus / clips[0].path, corpus / "dvi rankos")
    prepare(corpus, out).fails(1, "'dvi rankos' is not one word; rename the folder")


# --- parsers -------------------------------------------------------------------------------------


corpus_module, mini = scripts.load("speechcommands", "corpus", "mini")
names = st.from_regex(r"[a-z]{1,5}/[0-9a-f]{1,8}_nohash_[0-9]{1,2}\.wav", fullmatch=True)


@given(st.lists(names, min_size=1), st.sampled_from(["\n", "\r\n"]))
def test_a_list_is_read_as_it_was_written(tmp_path_factory, clips, end):
    path = tmp_path_factory.getbasetemp() / "list.txt"
    path.write_text("".join(f"{clip}{end}" for clip in clips), newline="")
    assert corpus_module.read_list(path) == {clip: line for line, clip in enumerate(clips, 1)}


@given(st.binary(max_size=60))
def test_no_bytes_are_a_traceback(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "list.txt"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"list\.txt:"):
        corpus_module.read_list(path)


@given(st.text("0123456789abcdef", min_size=1), st.integers(0, 999))
def test_the_name_of_a_clip_is_a_speaker_and_a_number(speaker, number):
    found = corpus_module.CLIP_NAME.fullmatch(f"{speaker}_nohash_{number}.wav")
    assert found.groups() == (None, speaker, str(number))
    found = corpus_module.CLIP_NAME.fullmatch(f"i_virsu_{speaker}_nohash_{number}.wav")
    assert found.groups() == ("i_virsu", speaker, str(number))


# --- the mini corpus -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Return the mini corpus, with two clips of each speaker."""
    return prepared.mini_corpus("speechcommands", tmp_path_factory)


def test_mini_corpus_can_be_prepared(corpus, tmp_path):
    import soundfile

    clips = sorted(corpus.glob("[a-z]*/*.wav"))
    assert len(clips) == 2 * 88
    headers = [soundfile.info(clip) for clip in clips]
    assert {(h.frames, h.samplerate, h.channels, h.subtype) for h in headers} == {
        (16000, 16000, 1, "PCM_16")
    }
    assert len({clip.read_bytes() for clip in clips}) == len(clips)
    result = prepare(corpus, tmp_path / "data").ok()
    assert f"kept {2 * 88 + 4}, dropped 0" in result.out
    rows = table(result.out)
    assert [rows["words", name][1] for name in SETS] == ["64", "8", "16"]
    assert all(rows[task, name][-1] == "0" for task in ("keywords", "words") for name in SETS[1:])
    assert labels(read(tmp_path / "data", "keywords")["train"])["_silence_"] >= 2
    assert list(read_table(tmp_path / "data/noise.scp")) == [
        "babble", "hum", "pink_noise", "white_noise"
    ]  # fmt: skip


def test_mini_corpus_is_as_skewed_as_the_real_one():
    whole = mini.plan(0, 1000)
    assert 2500 <= len(whole) <= 3000
    assert {clip.word for clip in whole} == {*KEYWORDS, *OTHER_WORDS}
    parts: dict[str, set[str]] = {}
    sizes: dict[str, Counter] = {}
    for clip in whole:
        parts.setdefault(clip.part, set()).add(clip.speaker.client_id[:8])
        if clip.part == "train":
            sizes.setdefault(clip.speaker.client_id, Counter())[clip.word] += 1
    assert [len(parts[name]) for name in SETS] == [64, 8, 16]
    assert len(set.union(*parts.values())) == 88
    counts = sorted(words.total() for words in sizes.values())
    assert (
        counts[0] < 5 and counts[-1] > 4 * np.mean(counts) and np.median(counts) < np.mean(counts)
    )

    def entropy(words: Counter) -> float:
        shares = np.array(list(words.values())) / words.total()
        return -float(np.sum(shares * np.log(shares))) / np.log(35)

    order = sorted(sizes.values(), key=Counter.total)
    assert max(map(entropy, order[:16])) < 0.6 and min(map(entropy, order[-8:])) > 0.85
    assert np.std([entropy(words) for words in order[32:48]]) > 0.03
