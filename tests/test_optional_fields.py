"""Optional fields of a corpus, missing or empty in any row: all four recipes' prepare.py.

The output passes the checks of utils/validate_data_dir.py, and keeps the corpus' speaker fields.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import fakes
import fakes_ami
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared import checked, folder
from scripts import prepare

from fedtools.data.datadir import DataDir, read_table

# Each example is a corpus on disk.
SOME, FEW = settings(max_examples=16, deadline=None), settings(max_examples=8, deadline=None)


def genders(data: dict[str, DataDir]) -> dict[str, str]:
    """Return the contents of spk2gender in all data directories."""
    tables = [one.path / "spk2gender" for one in data.values()]
    return {k: v for table in tables if table.exists() for k, v in read_table(table).items()}


# Changes of a column: a row, by its number, has a value, or is empty.
WHOLE, GONE, EMPTY, THIRD, FIRST = "as it is", "no such column", "empty", "a third empty", "one"
NEEDED = ("client_id", "path", "sentence")


def thinned(lines: list[str], fates: dict[str, str]) -> list[str]:
    """Return a table with the given changes of its columns."""
    header = lines[0].split("\t")
    rows = [dict(zip(header, line.split("\t"), strict=True)) for line in lines[1:]]
    for number, row in enumerate(rows):
        for name, fate in fates.items():
            if fate == EMPTY or (fate == THIRD and number % 3 == 1) or (fate == FIRST and number):
                row[name] = ""
    header = [name for name in header if fates.get(name) != GONE]
    return ["\t".join(line) for line in (header, *([row[name] for name in header] for row in rows))]


@SOME
@given(data=st.data())
def test_common_voice(data):
    release = data.draw(st.sampled_from(sorted(fakes.COMMON_VOICE_COLUMNS)))
    columns = set(fakes.COMMON_VOICE_COLUMNS[release].split()) - set(NEEDED)
    fates = data.draw(
        st.fixed_dictionaries(
            {name: st.sampled_from([WHOLE, GONE, EMPTY, THIRD, FIRST]) for name in sorted(columns)}
        )
    )
    durations = data.draw(st.sampled_from([WHOLE, GONE, EMPTY, THIRD]))
    with folder() as path:
        clips = fakes.some_clips(5, 2)
        language = fakes.common_voice(path, clips, release, durations != GONE)
        table, lengths = language / "validated.tsv", language / "clip_durations.tsv"
        lines = thinned(table.read_text().splitlines(), fates)
        table.write_text("\n".join(lines) + "\n")
        if durations in (EMPTY, THIRD):
            # Clips that are missing in the table of lengths.
            kept = lengths.read_text().splitlines(keepends=True)
            kept = [line for n, line in enumerate(kept) if n == 0 or (durations == THIRD and n % 3)]
            lengths.write_text("".join(kept))
        # Accents are one of the optional fields.
        options = ["--accents", "any", "--server-fraction", "0.4"]
        result = prepare("commonvoice", language, path / "data", *options).ok()
        assert f"kept {len(clips)}, dropped 0" in result.out
        found = checked(path / "data")
        assert len(found) == 6
        rows = [
            dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]
        ]
        told = {row["client_id"][:8]: row["gender"][0] for row in rows if row.get("gender")}
        assert {name.split("-")[1]: sex for name, sex in genders(found).items()} == told


@FEW
@given(
    labels=st.lists(st.sampled_from(["", "<NA>", "<o,f0,male>", "<F0_F>", "<o,,unknown>"]),
                    min_size=12, max_size=12),
    more=st.booleans(),
)  # fmt: skip
def test_tedlium(labels, more):
    talks = [
        replace(talk, label=labels[number % len(labels)])
        for number, talk in enumerate(fakes.some_talks())
    ]
    with folder() as path:
        corpus = fakes.tedlium(path, talks)
        for stm in corpus.rglob("*.stm") if more else ():
            stm.write_text(f";; a comment\n\n{stm.read_text()}")
        options = ["--partition", "legacy", "--hours-g", "0.02", "--seconds-per-model", "8"]
        prepare("tedlium3", corpus, path / "data", *options, "--unit", "talk").ok()
        found = checked(path / "data")
        assert set(found) == {"train_g", "valid", "part1", "part2", "indicator"}
        by_label = {"<o,f0,male>": "m", "<F0_F>": "f"}
        told = {talk.name: by_label[talk.label] for talk in talks if talk.label in by_label}
        told |= {talk.speaker: told[talk.name] for talk in talks if talk.name in told}
        speakers = {speaker for one in found.values() for speaker in one.utt2spk.values()}
        assert genders(found) == {name: told[name] for name in told.keys() & speakers}


@FEW
@given(
    silent=st.booleans(),
    readme=st.booleans(),
    trailing=st.booleans(),
    spk2gender=st.sampled_from(["", None, "part"]),
)
def test_speech_commands(silent, readme, trailing, spk2gender):
    words = fakes.some_words(words=["yes", "no", "bed"])
    with folder() as path:
        corpus = fakes.speech_commands(path, words, () if silent else (5.0, 2.0))
        if silent:
            shutil.rmtree(corpus / "_background_noise_")
        elif not readme:
            (corpus / "_background_noise_" / "README.md").unlink()
        if not readme:
            (corpus / "README.md").unlink()
        if spk2gender is not None:
            text = f"{words[0].speaker} f\n" if spk2gender else ""
            (corpus / "spk2gender").write_text(text)
        for listed in corpus.glob("*_list.txt") if trailing else ():
            listed.write_text(listed.read_text().rstrip("\n"))
        options = ["--keywords", "yes,no", "--silence", str(not silent).lower()]
        prepare("speechcommands", corpus, path / "data", *options).ok()
        assert set(checked(path / "data")) == {"train", "valid", "test"}


@FEW
@given(
    times=st.lists(st.sampled_from(["told", "empty", "missing"]), min_size=5, max_size=5),
    channels=st.lists(st.booleans(), min_size=4, max_size=4),
    names=st.lists(st.sampled_from("FMX"), min_size=4, max_size=4),
    roles=st.booleans(),
)
def test_ami(times, channels, names, roles):
    meetings = {}
    for meeting, speakers in fakes_ami.some_meetings().items():
        meetings[meeting] = []
        for number, speaker in enumerate(speakers):
            words = [
                word if times[place % 5] == "told"
                else re.sub(r' starttime="[^"]*" endtime="[^"]*"',
                            ' starttime="" endtime=""' if times[place % 5] == "empty" else "", word)
                for place, word in enumerate(speaker.words)
            ]  # fmt: skip
            name = names[number] + speaker.name[1:]
            # A speaker without a channel has no recording; one of every meeting has.
            channel = speaker.channel if number == 0 or channels[number] else ""
            own = replace(speaker, words=tuple(words), name=name, channel=channel)
            meetings[meeting].append(own)
    with folder() as path:
        corpus = fakes_ami.ami(path, meetings)
        listed = corpus / "corpusResources" / "meetings.xml"
        if not roles:
            listed.write_bytes(listed.read_bytes().replace(b' role="PM"', b""))
        prepare("ami", corpus, path / "data", "--max-drop", "1").ok()
        found = checked(path / "data")
        assert set(found) == {"train", "dev", "eval"}
        persons = {owner: owner.rpartition("-")[2][0] for one in found.values()
                   for owner in one.utt2client.values()}  # fmt: skip
        told = {owner: letter.lower() for owner, letter in persons.items() if letter in "FM"}
        assert genders(found) == told


def test_an_accent_that_is_asked_for_needs_its_column(tmp_path):
    language = fakes.common_voice(tmp_path, fakes.some_clips())
    table = language / "validated.tsv"
    table.write_text("\n".join(thinned(table.read_text().splitlines(), {"accents": GONE})) + "\n")
    command = ["commonvoice", language, tmp_path / "data", "--accents"]
    said = "no column 'accents' or 'accent'; make speakers the clients: --accents any"
    prepare(*command, "australia").fails(1, "validated.tsv:1: ", said)
    assert not (tmp_path / "data").exists()


RECIPES = {
    "commonvoice": (lambda path: fakes.common_voice(path, fakes.some_clips()).parent, ["--accents",
                    "australia,england,indian"]),
    "tedlium3": (lambda path: fakes.tedlium(path, fakes.some_talks()), ["--partition", "legacy"]),
    "speechcommands": (lambda path: fakes.speech_commands(path, fakes.some_words()), []),
    "ami": (lambda path: fakes_ami.ami(path, fakes_ami.some_meetings()), []),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [b"zero\xe2\x80\x8bwidth", b"latin\xff1", b"no\xc2\xa0break"])
def test_folders_that_no_table_can_name_are_refused(tmp_path, recipe, name):
    make, options = RECIPES[recipe]
    made, where = make(tmp_path), tmp_path / name.decode("utf-8", "surrogateescape")
    where.mkdir()
    made.rename(where / "corpus")
    result = prepare(recipe, where / "corpus", tmp_path / "data", *options)
    result.fails(1, "rename it")
    assert not (tmp_path / "data").exists()
