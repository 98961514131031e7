"""Common Voice: sets of speakers and their sentences; releases without accents."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import prepared
import pytest
import scripts
from fakes import Clip, common_voice, some_clips, speaker_id
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import checked, folder

from fedtools.data.datadir import DataDir

ACCENTS = ("--accents", prepared.ACCENTS)
ANY = ("--accents", "any", "--server-fraction", "0.4")
TRAINING = ("train", "server_train")
prepare = partial(scripts.prepare, "commonvoice")


def told(result) -> tuple[int, Counter]:
    """Return N of `kept N, dropped M (...)`, and the reasons, which sum to M."""
    kept, dropped, listed = re.search(
        r"^kept (\d+), dropped (\d+)(.*)$", result.out, re.MULTILINE
    ).groups()
    reasons = {why: int(count) for why, count in re.findall(r"([a-z][a-z -]+): (\d+)", listed)}
    assert sum(reasons.values()) == int(dropped)
    return int(kept), Counter(reasons)


def sentences(folder: Path) -> list[str]:
    return list(DataDir.read(folder).text.values())


# --- the same sentence in two sets ----------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 9), min_size=40, max_size=40),
    keep=st.booleans(),
    seed=st.integers(0, 9),
)
def test_no_sentence_of_the_clients_held_out_sets_is_trained_on(numbers, keep, seed):
    """Held-out sentences are removed, checked by hand against a run that keeps the six sets."""
    # The same words with other case and punctuation are the same sentence.
    forms = ("Number {}.", "number {}", "NUMBER, {}!")
    clips = [
        replace(clip, sentence=forms[n % 3].format("abcdefghij"[number]))
        for n, (clip, number) in enumerate(zip(some_clips(5, 2), numbers, strict=True))
    ]
    with folder() as path:
        language = common_voice(path, clips)
        options = [language, path / "data", *ACCENTS, "--seed", str(seed), "--common-sentences"]
        kept, none = told(prepare(*options, "keep").ok())
        assert (kept, none.total()) == (40, 0)
        before = {name: data.text for name, data in checked(path / "data").items()}
        held = {text for name in ("valid", "test") for text in before[name].values()}
        left = {n: {k: t for k, t in before[n].items() if t not in held} for n in TRAINING}
        result = prepare(*options, "keep" if keep else "drop")
        clients = {key.partition("-")[0] for key in left["train"]}
        if keep:
            result.ok()
            assert {n: d.text for n, d in checked(path / "data").items()} == before
        elif clients < {"au", "en", "in"} or not left["server_train"]:
            result.fails(1, "has nothing to train on", "give --common-sentences keep")
        else:
            after = {name: data.text for name, data in checked(path / "data").items()}
            assert after == {**before, **left}
            count = sum(len(before[name]) - len(left[name]) for name in TRAINING)
            expected = {"sentence is in valid or test": count} if count else {}
            assert told(result.ok()) == (40 - count, Counter(expected))


def test_common_sentences_are_no_faults_and_other_rows_take_their_hours(tmp_path):
    # Each speaker reads one shared sentence, and four of their own; 60 s each.
    clips = [
        replace(clip, seconds=60.0, sentence="We all read this." if n % 5 == 0 else clip.sentence)
        for n, clip in enumerate(some_clips(30, 5))
    ]
    language = common_voice(tmp_path, clips)
    hours = ("--hours", "3,0.6,0.6", "--server-hours", "1,0.2,0.2")
    result = prepare(language, tmp_path / "a", *ACCENTS, *hours, "--max-drop", "0.01").ok()
    kept, reasons = told(result)
    assert reasons.keys() == {"sentence is in valid or test", "beyond the hours asked for"}
    assert kept + reasons.total() == len(clips)
    found = checked(tmp_path / "a")
    sharing = {name for name in found if "we all read this" in sentences(tmp_path / "a" / name)}
    assert sharing == found.keys() - set(TRAINING)
    for name, asked in (("train", 3), ("server_train", 1)):
        got = sum(map(float, found[name].utt2dur.values())) / 3600
        assert got == pytest.approx(asked, abs=0.06)


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "fits", "reason"),
    [
        (("--min-seconds", "3"), lambda s, c: s >= 3, "too short to train on"),
        (("--max-seconds", "8"), lambda s, c: s <= 8, "too long to train on"),
        (("--min-chars-per-second", "4"), lambda s, c: c / s >= 4, "too few characters a second"),
        (("--max-chars-per-second", "5"), lambda s, c: c / s <= 5, "too many characters a second"),
    ],
)
def test_limits_are_of_training_alone(tmp_path, limits, fits, reason):
    clips = [replace(clip, seconds=1.0 + n % 10) for n, clip in enumerate(some_clips(6, 10))]
    language = common_voice(tmp_path, clips)
    prepare(language, tmp_path / "all", *ACCENTS).ok()
    before = checked(tmp_path / "all")
    result = prepare(language, tmp_path / "some", *ACCENTS, *limits, "--max-drop", "0.01").ok()
    after = checked(tmp_path / "some")
    expected = {
        name: {
            key
            for key, text in data.text.items()
            if name not in TRAINING or fits(float(data.utt2dur[key]), len(text))
        }
        for name, data in before.items()
    }
    assert {name: set(data.text) for name, data in after.items()} == expected
    kept, reasons = told(result)
    assert kept == sum(map(len, expected.values())) < len(clips)
    assert reasons == {reason: len(clips) - kept}


def test_without_limits_odd_clips_are_told_of_and_kept(tmp_path):
    for seconds in (10.0, 31.0, 0.5):
        clips = [replace(clip, seconds=seconds) for clip in some_clips(6, 3)]
        where = tmp_path / str(seconds)
        result = prepare(common_voice(where, clips), where / "data", *ACCENTS).ok()
        trained = [text for name in TRAINING for text in sentences(where / "data" / name)]
        long = len(trained) if seconds > 30 else 0
        fast = sum(len(text) / seconds > 25 for text in trained)
        assert bool(fast) == (seconds == 0.5) and fast < len(trained)
        said = f"training: {long} clips of more than 30 s (see --max-seconds), {fast} of more than"
        assert (said in result.err) if long or fast else not result.err
        assert "kept 72, dropped 0" in result.out


# --- accents --------------------------------------------------------------------------------------


def mixed_up() -> list[Clip]:
    """Make four accents of three speakers, and speakers with no accent, or several."""
    clips = some_clips(3, 2)
    accents = {
        "silent": ["", ""],
        "both": ["England English,Scottish English", "England English|Scottish English"],
        "later": ["", "us"],
        "more": ["us", "us|canada"],
        "english": ["england", ""],
        "moved": ["england", "England English,Scottish English"],
        "torn": ["england", "us"],
        "torn too": ["us", "scotland", ""],
    }
    for name, own in accents.items():
        for accent in own:
            number = 3000 + len(clips)
            who = Clip(speaker_id(name), number, f"{name} {'a ' * len(clips)}", accent)
            clips.append(who)
    return clips


def of(name: str) -> str:
    return speaker_id(name)[:8]


def test_who_names_no_accent_of_the_clients_is_the_servers(tmp_path):
    language = common_voice(tmp_path, mixed_up())
    result = prepare(language, tmp_path / "data", *ACCENTS).ok()
    found = checked(tmp_path / "data")
    rows = Counter(
        speaker
        for name, data in found.items()
        if name.startswith("server_")
        for speaker in data.utt2spk.values()
    )
    american = {f"us-{of(f'us {n}')}": 2 for n in range(3)}
    unclear = {f"unclear-{of(name)}": 2 for name in ("silent", "both")}
    assert rows == Counter({**american, **unclear, f"us-{of('later')}": 2, f"us-{of('more')}": 2})
    # A client's speaker is in no other client, also if another row has no accent.
    clients = {speaker for name in ("train", "valid", "test")
               for speaker in found[name].utt2spk.values()}  # fmt: skip
    assert {f"en-{of('english')}", f"en-{of('moved')}"} < clients and len(clients) == 11
    assert told(result) == (
        34,
        Counter({"contradictory accents of one speaker": 4, "no accent": 2, "several accents": 1}),
    )


@pytest.mark.parametrize("options", [("--unclear", "drop"), ("--server", "us=us")])
def test_unclear_accents_are_left_out_where_nobody_asked_for_them(tmp_path, options):
    language = common_voice(tmp_path, mixed_up())
    result = prepare(language, tmp_path / "data", *ACCENTS, *options).ok()
    found = checked(tmp_path / "data")
    speakers = {who for data in found.values() for who in data.utt2spk.values()}
    assert {who.partition("-")[0] for who in speakers} == {"au", "en", "in", "us"}
    reasons = told(result)[1]
    assert (reasons["no accent"], reasons["several accents"]) == (5, 4)


def test_several_accents_of_one_client_are_that_clients(tmp_path):
    language = common_voice(tmp_path, mixed_up())
    accents = ("--accents", "uk=england|scotland,in=indian")
    prepare(language, tmp_path / "data", *accents).ok()
    found = checked(tmp_path / "data")
    british = {who for name in ("train", "valid", "test") for who in found[name].utt2spk.values()}
    assert {f"uk-{of('both')}", f"uk-{of('moved')}"} < british


@pytest.mark.parametrize("release", [5, 12, 22])
def test_speakers_of_any_accent_and_of_none(tmp_path, release):
    clips = mixed_up()
    language = common_voice(tmp_path, clips, release)
    result = prepare(language, tmp_path / "data", *ANY).ok()
    assert told(result) == (len(clips), Counter())
    found = checked(tmp_path / "data")
    sets = [set(data.utt2spk.values()) for data in found.values()]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 20
    assert set.union(*sets) == {f"any-{clip.speaker[:8]}" for clip in clips}
    assert set(found["train"].utt2client.values()) == {"any"}
    assert not found["server_train"].utt2client


def test_a_release_that_lacks_what_is_asked_for_says_what_to_do(tmp_path):
    out = tmp_path / "data"
    everybody = "make speakers the clients: --accents any --server-fraction 0.4 (run.sh: --clients"
    language = common_voice(tmp_path, some_clips(), 12)
    said = "no accent in any of 32 rows, as in release 12; take another release, or"
    prepare(language, out, *ACCENTS).fails(1, f"{said} {everybody} speaker)")
    german = common_voice(tmp_path / "de", some_clips(3, 1, ["germany", "austria"]))
    said = "no row has the accent 'au'; accents there: germany (3); austria (3); or"
    prepare(german, out, *ACCENTS).fails(1, said, everybody)
    prepare(german, out, "--accents", "any").fails(1, "no speaker of another", "--server-fraction")
    few = common_voice(tmp_path / "few", some_clips(1, 9))
    prepare(few, out, *ANY).fails(1, "usable clips of 2 speakers, but train, valid and test need")
    digits = [replace(clip, sentence="In 1999.") for clip in some_clips()]
    numbers = common_voice(tmp_path / "digits", digits)
    prepare(numbers, out, *ANY).fails(1, "usable clips of 0 speakers", "(dropped: digits: 32)")
    assert not out.exists()
