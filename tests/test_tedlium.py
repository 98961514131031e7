"""TED-LIUM 3: the corpus' quirks and the paper's partitions through prepare.py; the mini corpus."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import prepared
import pytest
import scripts
import soundfile
from commands import Result
from fakes import TED_TRAPS, TedTalk, some_talks, ted_talk, tedlium
from hypothesis import given
from hypothesis import strategies as st
from prepared import checked, content

from fedtools.core.tables import read_tsv
from fedtools.data.datadir import DataDir, read_table
from fedtools.data.dropped import Dropped

MINI = "local/tedlium3/mini.py"
DIRECTORIES = ["train_g", "valid", "part1", "part2", "indicator"]
HELD = ["part1_held", "part2_held"]
# Sizes for `some_talks`, whose talks have 16 seconds of speech.
SMALL = ["--partition", "legacy", "--hours-g", "0.02", "--seconds-per-model", "8"]


prepare = partial(scripts.prepare, "tedlium3")


def validate(out: Path) -> dict[str, DataDir]:
    sets = checked(out)
    assert set(DIRECTORIES) <= sets.keys() <= {*DIRECTORIES, *HELD}
    return sets


def counts(result: Result) -> tuple[int, int]:
    """Return N and M of `kept N, dropped M (...)`."""
    words = result.ok().out.splitlines()[-1].replace(",", " ").split()
    assert words[0] == "kept" and words[2] == "dropped"
    return int(words[1]), int(words[3])


def pieces(data: DataDir, utterances: list[str]) -> list[tuple[str, float, float]]:
    """Return audio, start and end of utterances."""
    fields = (data.segments[utterance].split() for utterance in utterances)
    return [(audio, float(start), float(end)) for audio, start, end in fields]


def overlap(a: tuple[str, float, float], b: tuple[str, float, float]) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


# --- lines ---------------------------------------------------------------------------------------


def test_every_trap_line_by_line(tmp_path):
    lines = tuple(line for line, _ in TED_TRAPS)
    # The name of the stm file is irrelevant: field 1 names the audio.
    trap = TedTalk("Trap_2001", "dev", lines, 15.0, stm="AnotherName_1999")
    corpus = tedlium(tmp_path, [*some_talks(), trap])
    out = tmp_path / "data"
    options = [*SMALL, "--indicator-utterances", "99", "--max-drop", "0.5"]
    result = prepare(corpus, out, *options).ok()
    validate(out)
    data = DataDir.read(out / "indicator")
    found = {
        data.segments[name]: words for name, words in data.text.items() if name.startswith("Trap-")
    }
    expected = [told for _, told in TED_TRAPS if told]
    assert found == {
        f"Trap_2001 {start / 100:.2f} {end / 100:.2f}": words for start, end, words in expected
    }
    assert "Trap-Trap_2001-0000829-0000912" in data.text
    assert data.others["utt2talk"]["Trap-Trap_2001-0000829-0000912"] == "Trap_2001"
    assert data.others["utt2person"]["Trap-Trap_2001-0000829-0000912"] == "Trap"
    for reason in (
        "not scored: 2",
        "no words: 2",
        "ends before it begins: 2",
        "malformed line: 2",
        "outside of its audio: 2",
        "the same segment twice: 1",
        "name with characters other than letters, digits and _: 1",
        "audio: no such file: 1",
        "not UTF-8: 1",
    ):
        assert reason in result.out, reason
    assert "AnotherName_1999.stm:14" in result.err
    kept, dropped = counts(result)
    talks = sum(len(talk.lines) for talk in some_talks())
    assert kept + dropped == talks + len(TED_TRAPS) - 2
    # The share of faults is of the lines that were to be used.
    faults = len(TED_TRAPS) - len(expected) - 4
    assert faults == 12
    usable = talks + len(expected)
    options[-1] = str(faults / (faults + usable) - 0.001)
    result = prepare(corpus, tmp_path / "none", *options)
    assert result.code == 1 and "Traceback" not in result.err
    assert f"12 of {12 + usable} lines cannot be used" in result.err.splitlines()[-1]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("end", [829, 828, 830, 115])
def test_a_segment_ends_with_its_audio(end, tmp_path):
    """8.29 seconds are 828.9999... hundredths in floating point."""
    (tmp_path / "a.sph").touch()
    one = corpus.Utterance("a", 100, end, "A_2001", "m", "word", tmp_path / "a.sph")
    for length, most in ((8.29, 829), (1.15, 115), (8.2999, 829)):
        if end > 100 * (length + corpus.MAX_OVERSHOOT):
            continue
        assert corpus.within_audio(one, tmp_path, {"a": length}).end == min(end, most)


def test_audio_that_is_a_fault(tmp_path):
    talks = some_talks(14)
    for index, audio in enumerate(("missing", "empty", "damaged")):
        talks[index] = replace(talks[index], audio=audio)
    corpus = tedlium(tmp_path, talks)
    result = prepare(corpus, tmp_path / "data", *SMALL)
    assert result.code == 1 and "no such file: 8" in result.err
    result = prepare(corpus, tmp_path / "data", *SMALL, "--max-drop", "0.2").ok()
    for reason in ("audio: no such file: 8", "audio: empty file: 8", "audio: unreadable audio: 8"):
        assert reason in result.out
    validate(tmp_path / "data")


def test_both_partitions_and_a_lost_link(tmp_path):
    talks = some_talks()
    legacy = tedlium(tmp_path / "a", talks)
    adaptation = tedlium(tmp_path / "b", talks, "speaker-adaptation", linked=True)
    (adaptation / "speaker-adaptation" / "train" / "sph" / f"{talks[0].name}.sph").unlink()
    prepare(legacy, tmp_path / "one", *SMALL).ok()
    prepare(adaptation, tmp_path / "two", *SMALL[2:]).ok()
    validate(tmp_path / "two")
    for name in DIRECTORIES:
        one, two = (DataDir.read(tmp_path / out / name) for out in ("one", "two"))
        assert one.segments == two.segments and one.text == two.text
    paths = [DataDir.read(tmp_path / "two" / name).wav_scp for name in DIRECTORIES]
    lost = [wav[talks[0].name] for wav in paths if talks[0].name in wav]
    assert set(lost) == {str(adaptation / "data" / "sph" / f"{talks[0].name}.sph")}
    prepare(adaptation, tmp_path / "data", *SMALL).fails(1, "no *.stm; --partition speaker-adapt")


# --- partitions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["person", "talk"])
def test_speakers_are_disjoint_and_so_is_the_speech_of_models(tmp_path, unit):
    talks = some_talks(15, 3)
    # Every line overlaps a little with the next.
    talks = [
        replace(talk, lines=tuple((start, end + 0.6, words) for start, end, words in talk.lines))
        for talk in talks
    ]
    corpus, out = tedlium(tmp_path, talks), tmp_path / "data"
    result = prepare(corpus, out, *SMALL, "--unit", unit, "--valid", "0.1").ok()
    validate(out)
    # Talks of two models' length leave nothing; each of two talks has a rest.
    names = [*DIRECTORIES, *(name for name in HELD if (out / name).exists())]
    sets = {name: DataDir.read(out / name) for name in names}
    speakers = {name: set(data.utt2spk.values()) for name, data in sets.items()}
    assert speakers["valid"] <= speakers["train_g"]
    for a, b in combinations(["train_g", "part1", "part2", "indicator"], 2):
        assert not speakers[a] & speakers[b]
    used = [(name, utt) for name, data in sets.items() for utt in data.text]
    assert len(used) == len({utt for _, utt in used}) == counts(result)[0]
    assert sum(counts(result)) == sum(len(talk.lines) for talk in talks)
    held, train = (pieces(sets[name], list(sets[name].text)) for name in ("valid", "train_g"))
    assert held and not any(overlap(a, b) for a in held for b in train)

    for name in DIRECTORIES:
        data = sets[name]
        of = data.others["utt2talk"] if unit == "talk" else data.others["utt2person"]
        assert of == data.utt2spk
        for utt, talk in data.others["utt2talk"].items():
            person = talk.partition("_")[0] if name != "indicator" else talk.replace("_", "")
            assert data.others["utt2person"][utt] == person
    for part in ("part1", "part2"):
        data = sets[part]
        models: dict[str, list[str]] = {}
        for utt, model in data.utt2client.items():
            models.setdefault(model, []).append(utt)
        owners = read_table(out / part / "model2speaker")
        assert owners.keys() == models.keys()
        assert all(data.utt2spk[utt] == owners[m] for m, own in models.items() for utt in own)
        for model, own in models.items():
            assert model in (f"{owners[model]}-m1", f"{owners[model]}-m2")
            assert 6 <= sum(end - start for _, start, end in pieces(data, own)) <= 10
        seconds = [m for m in models if m.endswith("-m2")]
        pairs = [(models[m.removesuffix("2") + "1"], models[m]) for m in seconds]
        assert pairs
        for first, second in pairs:
            a, b = pieces(data, first), pieces(data, second)
            assert not any(overlap(one, other) for one in a for other in b)
            # Every third person has two talks, and then gets one for each model.
            number = int(data.others["utt2person"][first[0]].removeprefix("Person"))
            shares = unit == "talk" or number % 3 != 0
            assert bool({x[0] for x in a} & {x[0] for x in b}) == shares


def test_speech_that_is_in_no_model_is_held_out(tmp_path):
    """It is drawn from the part's own speakers; nothing else changes, and old files are removed."""
    talks = some_talks(15, 3)
    talks = [
        replace(talk, lines=tuple((start, end + 0.6, words) for start, end, words in talk.lines))
        for talk in talks
    ]
    corpus, small = tedlium(tmp_path, talks), [*SMALL[:4], "--seconds-per-model", "4"]
    found = {}
    for seconds in ("0", "3", "99"):
        out = tmp_path / seconds
        found[seconds] = prepare(corpus, out, *small, "--held-seconds", seconds).ok()
        rest = {name: one for name, one in content(out).items() if "_held" not in name}
        assert rest == content(tmp_path / "0")
    assert validate(tmp_path / "3").keys() > set(HELD)
    for part in ("part1", "part2"):
        data, held, most = (
            DataDir.read(tmp_path / path)
            for path in (f"3/{part}", f"3/{part}_held", f"99/{part}_held")
        )
        assert set(held.utt2spk.values()) == set(data.utt2spk.values())
        assert not held.utt2client and held.text.keys() < most.text.keys()
        used = pieces(data, list(data.text))
        assert not any(overlap(a, b) for a in pieces(most, list(most.text)) for b in used)
        for speaker in set(data.utt2spk.values()):
            own = [float(held.utt2dur[u]) for u in held.text if held.utt2spk[u] == speaker]
            # At least this much, and no more than needed.
            assert sum(own) >= 3 > sum(own) - max(own)
    assert counts(found["99"])[0] > counts(found["3"])[0] > counts(found["0"])[0]
    assert sum(counts(found["99"])) == sum(counts(found["0"]))
    prepare(corpus, tmp_path / "99", *small, "--held-seconds", "0").ok()
    assert content(tmp_path / "99") == content(tmp_path / "0")


def test_lists_genders_and_the_report_say_what_is_in_the_data(tmp_path):
    corpus, out = tedlium(tmp_path, some_talks(15, 3)), tmp_path / "data"
    result = prepare(corpus, out, *SMALL).ok()
    assert (out / "partition.txt").read_text() in result.out
    sets = {name: DataDir.read(out / name) for name in DIRECTORIES}
    for row in read_tsv(out / "speakers.tsv", None):
        data = sets[row["set"]]
        own = [utt for utt, speaker in data.utt2spk.items() if speaker == row["speaker"]]
        assert len(own) == int(row["utterances"])
        assert sum(float(data.utt2dur[utt]) for utt in own) == pytest.approx(float(row["seconds"]))
        assert {data.others["utt2talk"][utt] for utt in own} == set(row["talks"].split(","))
        assert len({data.utt2client.get(utt) for utt in own} - {None}) == int(row["models"])
        assert data.others["spk2gender"].get(row["speaker"], "--") == row["gender"]
        number = row["speaker"].removeprefix("Person")
        told = ("m", "f", "--", "f", "m", "--")[int(number) % 6] if number.isdigit() else "f"
        assert row["gender"] == told
    models = read_tsv(out / "models.tsv", None)
    assert [row["model"] for row in models] == [
        client
        for part in ("part1", "part2")
        for client in sorted(set(sets[part].utt2client.values()))
    ]
    lines = {line[:26].strip(): line[26:].split() for line in result.out.splitlines()}
    assert lines["speakers"][1::2] == ["880", "736", "634", "32"]
    assert lines["models"][1::2] == ["--", "1300", "1079", "--"]
    assert lines["speakers"][::2] == [
        str(len(set(sets[name].utt2spk.values())))
        for name in ("train_g", "part1", "part2", "indicator")
    ]
    of = Counter(row["part"] for row in models)
    assert lines["models"][2:6:2] == [str(of["part1"]), str(of["part2"])]
    seconds = sum(float(value) for value in sets["part1"].utt2dur.values())
    assert float(lines["hours"][2]) == pytest.approx(seconds / 3600, abs=0.005)
    assert len(sets["indicator"].text) == 60  # ten of the twelve of each of six speakers


def test_numbers_of_speakers_that_cannot_be_leave_the_older_data_alone(tmp_path):
    corpus, out = tedlium(tmp_path, some_talks()), tmp_path / "data"
    prepare(corpus, out, *SMALL).ok()
    first = content(out)
    prepare(corpus, out, *SMALL[:2], "--hours-g", "99").fails(1, "have the 180 s for a model")
    prepare(corpus, out, *SMALL, "--speakers", "8,3,2").fails(1, "of 12 (", "--speakers")
    assert content(out) == first
    result = prepare(corpus, tmp_path / "counts", *SMALL, "--speakers", "5,4,2").ok()
    assert "speaker not drawn" in result.out
    sizes = Counter(row["set"] for row in read_tsv(tmp_path / "counts" / "speakers.tsv", None))
    assert (sizes["train_g"], sizes["part1"], sizes["part2"]) == (5, 4, 2)


def test_a_person_under_two_names_and_a_person_of_the_indicator(tmp_path):
    talks = some_talks()
    talks += [ted_talk("AlGore_2006"), ted_talk("AlGore_2009", "dev", speaker="Al_Gore")]
    # One talk under two names, and another one of the same person.
    talks += [ted_talk("KRamdas_2009I"), ted_talk("KavitaRamdas_2009I"), ted_talk("KRamdas_2010")]
    corpus, out = tedlium(tmp_path, talks), tmp_path / "data"
    result = prepare(corpus, out, *SMALL).ok()
    assert "person is in the Indicator: 8" in result.out
    assert "talk under another name: 8" in result.out
    sets = {row["speaker"]: row for row in read_tsv(out / "speakers.tsv", None)}
    assert sets["AlGore"]["set"] == "indicator" and sets["AlGore"]["talks"] == "Al_Gore"
    assert "KRamdas" not in sets
    assert set(sets["KavitaRamdas"]["talks"].split(",")) <= {"KRamdas_2009I", "KRamdas_2010"}
    result = prepare(corpus, out, *SMALL, "--unit", "talk").ok()
    assert "person is in the Indicator: 8" in result.out and "another name" not in result.out
    sets = {row["speaker"]: row for row in read_tsv(out / "speakers.tsv", None)}
    assert sets["Al_Gore"]["set"] == "indicator" and "AlGore_2006" not in sets
    assert {"KRamdas_2009I", "KavitaRamdas_2009I"} <= sets.keys()
    where: dict[str, set[str]] = {}
    for row in sets.values():
        where.setdefault(row["person"], set()).add(row["set"].replace("valid", "train_g"))
    assert not [found for found in where.values() if "indicator" in found and len(found) > 1]
    several = sum(len(found) > 1 for found in where.values())
    assert f"{several} persons are in more than one set" in result.out


# --- parsers and choices -------------------------------------------------------------------------


corpus, partition = scripts.load("tedlium3", "corpus", "partition")
WORD = st.from_regex(r"[a-z]{1,6}('[a-z]{1,3})?|'[a-z]{2,5}", fullmatch=True).filter(
    lambda word: word not in (*corpus.SUFFIXES, "'clock", "'all")
)
NO_WORD = st.sampled_from(["<sil>", "<unk>", "{NOISE}", "{SMACK}", "[NOISE]", "(2)", "'", "<s>"])
TIME = st.decimals(0, 99_999, places=3, allow_nan=False)


@given(st.text(st.characters(codec="utf-8")) | st.text("abco'clk <>(){}2unksil\t"))
def test_words_of_any_text_are_words_and_stay_as_they_are(text):
    words = corpus.words_of(text)
    assert words == " ".join(words.split()) and words == words.lower()
    assert corpus.words_of(words) == words
    assert not {"<unk>", "<sil>", "{noise}", "(2)", "'"} & set(words.split())


@given(st.lists(WORD | NO_WORD))
def test_what_is_no_word_goes_and_all_else_stays(tokens):
    words = [word for word in tokens if word[0].isalpha() or (len(word) > 2 and word[0] == "'")]
    assert corpus.words_of(" ".join(tokens)).split() == words


@given(st.lists(st.tuples(WORD.filter(str.isalpha), st.sampled_from([*corpus.SUFFIXES, ""]))))
def test_words_are_joined_again_at_their_apostrophes(pairs):
    text = " ".join(f"{word} {suffix}" for word, suffix in pairs)
    assert corpus.words_of(text).split() == [word + suffix for word, suffix in pairs]


@given(
    TIME, TIME, WORD, st.sampled_from(["<NA>", "<o,f0,female>", "<F0_F>", "<F2_M>", ""]),
    st.sampled_from([" ", "  ", "\t", " \t"]),
)  # fmt: skip
def test_a_line_becomes_rounded_times_the_gender_and_words(start, end, word, label, blank):
    fields = ["Talk_2001", "1", "Ann_Lee_2003X", str(start), str(end), label, word]
    line = blank.join(field for field in fields if field)
    rounded = [int(Fraction(time) * 100 + Fraction(1, 2)) for time in (start, end)]
    if rounded[0] >= rounded[1]:
        with pytest.raises(corpus.LineError, match="ends before it begins"):
            corpus.parse_line(line, Path("sph"))
        return
    utterance = corpus.parse_line(line, Path("sph"))
    assert (utterance.start, utterance.end) == tuple(rounded)
    assert utterance.gender == {"<o,f0,female>": "f", "<F0_F>": "f", "<F2_M>": "m"}.get(label, "")
    assert utterance.text == word and utterance.path == Path("sph/Talk_2001.sph")
    assert (utterance.talk, utterance.person) == ("Ann_Lee_2003X", "Ann_Lee")


@given(st.text(st.characters(codec="utf-8")))
def test_any_line_is_an_utterance_or_nothing_or_a_reason(line):
    try:
        utterance = corpus.parse_line(line, Path("sph"))
    except (corpus.LineError, corpus.NotScored):
        return
    assert utterance is None or utterance.text


@pytest.mark.parametrize(
    ("talk", "person"),
    [
        ("AlGore_2006", "AlGore"),
        ("Al_Gore", "AlGore"),
        ("TomWujec_2009GU", "TomWujec"),
        ("MarisaFickJordan_2007G2", "MarisaFickJordan"),
        ("911Mothers_2010W", "911Mothers"),
        ("NielsDiffrient_2002a", "NielsDiffrient"),
        ("MarcoTempest_Session7_2011G", "MarcoTempest"),
        ("Halla_Tomasdottir_2010W", "HallaTomasdottir"),
        ("RivesTTYL_2008", "Rives"),
    ],
)
def test_persons(talk, person):
    assert corpus.person_of(talk) == person


def test_nobody_is_an_alias_of_an_alias():
    assert not corpus.ALIASES.keys() & set(corpus.ALIASES.values())


def one_talk(name: str, lengths: list[float], begins: float = 0.0):
    """Return consecutive utterances of those lengths in seconds."""
    utterances, clock = [], round(100 * begins)
    for length in lengths:
        end = clock + round(100 * length)
        utterances.append(corpus.Utterance(name, clock, end, name, "m", "so", Path(name)))
        clock = end
    return utterances


WANTED = partition.PartitionOptions("talk", 0, 200.0, 240.0, None, 10, 0.02)


def test_talks_as_many_as_the_corpus_has_give_the_counts_of_table_1():
    """2,268 talks have about 452 hours: twelve minutes on average, from two to twenty-two."""
    train = []
    for number in range(2268):
        minutes = 2 + (number * 7919 % 2000) / 100
        train += one_talk(f"P{number // 2:04}_20{number % 2:02}", [12.0] * round(5 * minutes))
    held_out = [u for n in range(32) for u in one_talk(f"H{n}_2010", [6.0] * 40)]
    dropped = Dropped()
    result = partition.partition(train, held_out, WANTED, dropped)
    names = {part: {u.talk for u in own} for part, own in result.sets.items()}
    assert [len(names[part]) for part in ("train_g", "part1", "part2")] == [880, 736, 634]
    assert len(result.sets["indicator"]) == 320
    in_g = [*result.sets["train_g"], *result.sets["valid"]]
    assert partition.seconds_of(in_g) / 3600 == pytest.approx(200, abs=0.5)
    for models in result.models.values():
        mean = sum(map(partition.seconds_of, models.values())) / len(models)
        assert mean == pytest.approx(240, rel=0.02)
    assert sum(map(len, result.sets.values())) + dropped.total() == len(train) + len(held_out)
    few = partition.partition(train, held_out, replace(WANTED, unit="person"), Dropped())
    persons = {part: {u.person for u in own} for part, own in few.sets.items()}
    assert not persons["part1"] & persons["part2"] and not persons["train_g"] & persons["part1"]
    pairs = [model for model in few.models["part1"] if model.endswith("-m2")]
    shared = [
        {u.talk for u in few.models["part1"][m]}
        & {u.talk for u in few.models["part1"][m[:-1] + "1"]}
        for m in pairs
    ]
    assert sum(map(bool, shared)) < 0.5 * len(pairs)


@given(
    st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), max_size=4),
    st.integers(10, 100), st.integers(0, 300),
)  # fmt: skip
def test_adaptation_sets_are_disjoint_and_as_long_as_asked_for(talks, seconds, more):
    own = [u for n, each in enumerate(talks) for u in one_talk(f"A_200{n}", each)]
    # Segments that overlap the next ones.
    own = sorted(replace(u, end=u.end + more) for u in own)
    wanted = replace(WANTED, unit="person", seconds=float(seconds))
    models = partition.adaptation_sets(own, wanted)
    longest = max((u.seconds for u in own), default=0)
    for model in models:
        assert 0.75 * seconds <= partition.seconds_of(model) <= seconds + longest / 2
    if len(models) == 2:
        audio = [[(u.audio, u.start, u.end) for u in model] for model in models]
        assert not any(overlap(a, b) for a in audio[0] for b in audio[1])
    if not models:
        assert partition.seconds_of(own) < 0.75 * seconds or longest > 0.5 * seconds


# --- bad input -----------------------------------------------------------------------------------


def test_bad_input_is_told_in_one_line(tmp_path):
    corpus, out = tedlium(tmp_path, some_talks()), tmp_path / "data"
    prepare(corpus, out).fails(1, "speaker-adaptation/train/stm: no *.stm; --partition legacy")
    prepare(corpus, out, *SMALL[:2], "--hours-g", "0.001").fails(1, "s for a model; give other")
    for stm in (corpus / "legacy" / "test" / "stm").iterdir():
        stm.unlink()
    prepare(corpus, out, *SMALL).fails(1, "legacy/test/stm: no *.stm")
    assert not out.exists()


LAYOUTS = {
    "above": (lambda corpus: corpus.parent, "legacy/train/stm: no *.stm; name {corpus}"),
    "partition": (lambda corpus: corpus / "legacy", "no *.stm; name the folder above, {corpus}"),
    "archives": (lambda corpus: _packed(corpus), "unpack the archives, such as dev.tar.gz"),
    "archive": (lambda corpus: _archive(corpus), "an archive; unpack it, with tar -xf "),
    "file": (lambda corpus: corpus / "legacy/train/stm/A.txt", "a file, not a folder; name the"),
}


def _packed(corpus: Path) -> Path:
    for folder in sorted((corpus / "legacy").iterdir()):
        folder.rename(corpus.parent / folder.name)
        (corpus / f"legacy/{folder.name}.tar.gz").touch()
    return corpus


def _archive(corpus: Path) -> Path:
    path = corpus.parent / "TEDLIUM release-3.tgz"
    path.touch()
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_folders_get_the_remedy_that_fits(tmp_path, name):
    change, said = LAYOUTS[name]
    corpus = tedlium(tmp_path / "below", some_talks())
    (corpus / "legacy/train/stm/A.txt").touch()
    result = prepare(change(corpus), tmp_path / "data", *SMALL)
    result.fails(1, said.format(corpus=corpus))
    assert not (tmp_path / "data").exists()


def test_release_2_is_read_as_its_message_says(tmp_path):
    """Releases 1 and 2 have the sets without a partition, and are its partition `legacy`."""
    corpus, out = tedlium(tmp_path, some_talks()), tmp_path / "data"
    old = (corpus / "legacy").rename(tmp_path / "TEDLIUM release2")
    told = prepare(old, out, *SMALL)
    told.fails(1, "no *.stm; releases 1 and 2 have one partition: mkdir DIR && ln -s ")
    prepare(tmp_path, out, *SMALL).fails(1, f"have one partition: name {old} for how to use it")
    (tmp_path / "DIR").mkdir()
    (tmp_path / "DIR/legacy").symlink_to(old)
    prepare(tmp_path / "DIR", out, *SMALL).ok()


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_audio_that_was_converted_is_read(tmp_path, suffix):
    corpus = tedlium(tmp_path, some_talks())
    prepare(corpus, tmp_path / "one", *SMALL).ok()
    one = checked(tmp_path / "one")
    for path in corpus.rglob("*.sph"):
        samples, rate = soundfile.read(path)
        soundfile.write(path.with_suffix(suffix), samples, rate)
        path.unlink()
    prepare(corpus, tmp_path / "two", *SMALL).ok()
    two = checked(tmp_path / "two")
    assert {name: data.text for name, data in one.items()} == {
        name: data.text for name, data in two.items()
    }
    assert all(path.endswith(suffix) for data in two.values() for path in data.wav_scp.values())


def test_audio_that_is_missing_is_named(tmp_path):
    corpus = tedlium(tmp_path, some_talks())
    lost = sorted((corpus / "legacy/train/sph").iterdir())[0]
    lost.unlink()
    told = prepare(corpus, tmp_path / "data", *SMALL, "--max-drop", "0.5").ok()
    assert f"audio: no such file: 8, the first in {corpus}/legacy/train/stm/" in told.err
    assert f": {lost}\n" in told.err


# --- the mini corpus -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mini_corpus(tmp_path_factory) -> Path:
    """Return the mini corpus, whose talks have two sentences."""
    return prepared.mini_corpus("tedlium3", tmp_path_factory)


def test_mini_corpus_prepares(mini_corpus, tmp_path):
    options = ["--hours-g", "0.06", "--seconds-per-model", "4"]
    for split, unit in (("legacy", "person"), ("speaker-adaptation", "talk")):
        out = tmp_path / split
        result = prepare(mini_corpus, out, "--partition", split, "--unit", unit, *options).ok()
        validate(out)
        stm = (path.read_text() for path in (mini_corpus / split).glob("*/stm/*.stm"))
        lines = [line for text in stm for line in text.splitlines() if line[:2] != ";;"]
        assert sum(counts(result)) == len(lines)
        rows = read_tsv(out / "models.tsv", None)
        assert {row["part"] for row in rows} == {"part1", "part2"}
        assert {row["gender"] for row in rows} == {"f", "m", "--"}
    for name in ("train", "dev", "test"):
        there = (mini_corpus / "legacy" / name / kind for kind in ("sph", "stm"))
        audio, stm = ({path.stem for path in folder.iterdir()} for folder in there)
        assert {stem.removesuffix("_clean") for stem in stm} == audio
    words = {word for text in DataDir.read(out / "part1").text.values() for word in text.split()}
    assert not any(mark in word for word in words for mark in "<{(") and "'" not in words


def test_mini_corpus_segments_hold_the_sentences(mini_corpus):
    import soundfile

    stm = mini_corpus / "data/stm/EvaNorth_2007.stm"
    lines = [line.split(maxsplit=6) for line in stm.read_text().splitlines()]
    wave, rate = soundfile.read(stm.parents[1] / "sph" / f"{lines[0][0]}.sph", dtype="int16")
    assert rate == 16000 and len(lines) == 2
    for line in lines:
        start, end = (int(Decimal(time) * rate) for time in line[3:5])
        # A tenth of a second of silence, then speech; the same at the end.
        assert not wave[start : start + 1500].any() and not wave[end - 1500 : end].any()
        assert wave[start + 1700 : end - 1700].std() > 30
        wave[start:end] = 0
    assert not wave.any()


def test_mini_corpus_of_other_sizes(tmp_path):
    """Persons, talks and seconds are as requested; two models of each talk have full length."""
    pytest.importorskip("espeakng_loader")
    sizes = ("--speakers", "6", "--talks", "2", "--channels", "2", "--seconds", "16")
    scripts.program(MINI, tmp_path, *sizes).ok()
    talks = [path.stem for path in (tmp_path / "TEDLIUM_release-mini/data/sph").iterdir()]
    persons = Counter(talk.partition("_")[0] for talk in talks)
    assert len(persons) == 6 and set(persons.values()) == {2}
    out = tmp_path / "data"
    options = ("--partition", "legacy", "--seconds-per-model", "16", "--speakers", "2,2,2")
    prepare(tmp_path / "TEDLIUM_release-mini", out, *options, "--models-of", "talk").ok()
    validate(out)
    rows = read_tsv(out / "models.tsv", None)
    by_talk = Counter((row["speaker"], row["talks"]) for row in rows)
    assert len(by_talk) == 8 and set(by_talk.values()) == {2}
    assert {row["model"].rpartition("-")[2] for row in rows} == {"m1", "m2", "m3", "m4"}
    assert all(12 <= float(row["seconds"]) <= 20 for row in rows)
    report = (out / "partition.txt").read_text()
    assert "of 12 target pairs, 4 share a talk" in report
    # By default each speaker has two, of two talks.
    prepare(tmp_path / "TEDLIUM_release-mini", out, *options).ok()
    rows = read_tsv(out / "models.tsv", None)
    assert len({(row["speaker"], row["talks"]) for row in rows}) == len(rows) == 8
    for option, told in (
        ("--speakers", "there are names for only 656"),
        ("--talks", "years for only 80"),
    ):
        scripts.program(MINI, tmp_path, option, 999).fails(1, told)
    scripts.program(MINI, tmp_path, "--channels", -1).fails(2, "--channels must be at least 0")


def test_a_talk_of_the_mini_corpus_goes_through_its_channel():
    """The filter is the one between the talk's audio and the same sentences without it."""
    pytest.importorskip("espeakng_loader")
    (script,) = scripts.load("tedlium3", "mini")
    talks = script.plan(0, 1, script.Layout(speakers=6, talks=3, channels=2))
    first, second, third, other = talks[:4]
    assert first.name != third.name and (first.taps == third.taps).all()
    assert first.speaker == third.speaker != second.speaker
    responses = [20 * np.log10(abs(np.fft.rfft(one.taps, 1024))) for one in (first, second, other)]
    for one, another in combinations(responses, 2):
        assert np.std((one - another)[50:450]) > 2
    # The channel is linear, except for the restored level.
    synthesiser = script.Synthesiser()
    quiet = replace(first, speaker=replace(first.speaker, noise=0.0))
    flat = np.zeros(script.TAPS)
    flat[script.TAPS // 2] = 1.0
    heard, said = (script.wave_of(synthesiser, one) for one in (quiet, replace(quiet, taps=flat)))
    expected = np.convolve(said, first.taps, "same")
    # The ends of a sentence are cut.
    gain = (heard @ expected) / (expected @ expected)
    error = heard - gain * expected
    assert (error @ error) < 1e-3 * (heard @ heard)
    again = script.plan(0, 1, script.Layout(speakers=6, talks=3, channels=1))
    assert (again[0].taps == again[1].taps).all()
    assert all(one.taps is None for one in script.plan(0, 1, script.Layout()))
