"""Data directories: tables, parts, unions, atomic files, and the validator with all its traps."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import soundfile
from conftest import ROOT, run
from damaged import SEEDS, damage, read_or_refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scripts import program

from fedtools.audio.features import FeatureConfig, extract_features
from fedtools.audio.wave import recording_seconds
from fedtools.core.atomic import atomic_path, atomic_write, sha256, write_text
from fedtools.core.errors import UserError
from fedtools.data.ark import write_ark
from fedtools.data.datadir import (
    DataDir,
    byte_order,
    check_id,
    evenly_spread,
    invert,
    parse_segment,
    read_table,
    write_table,
)
from fedtools.data.validate import validate_data_dir

TEXT_CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\0")
VALUES = st.text(TEXT_CHARACTERS, max_size=20).map(lambda s: " ".join(s.split()))
KEYS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\t \0"), min_size=1, max_size=9
)


# Tables


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_what_is_written_is_read_back_and_sorted_as_sort_does(tmp_path, table):
    write_table(tmp_path / "t", table)
    read = read_table(tmp_path / "t", values="optional")
    assert read == table
    assert list(read) == byte_order(table) == sorted(table, key=str.encode)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.binary(max_size=60),
        st.text(st.sampled_from("ab \t\n\r\u00a0\u2028é"), max_size=30).map(str.encode),
    )
)
def test_any_bytes_are_a_clean_table_or_a_user_error(tmp_path, raw):
    path = tmp_path / "t"
    path.write_bytes(raw)
    try:
        table = read_table(path)
    except UserError as error:
        assert str(error).startswith(f"{path}:") and "\n" not in str(error)
        return
    assert all(key and value and value == value.strip() for key, value in table.items())
    # Nothing is lost: the written table differs at most in the blank after the key.
    write_table(tmp_path / "again", table)
    assert (tmp_path / "again").read_bytes() == raw.replace(b"\t", b" ") or b"\t" in raw


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        (b"a 1\nb\n", 2, "'b' has no value"),
        (b"a 1\n\nb 2\n", 2, "empty line"),
        (b" a 1\n", 1, "leading whitespace"),
        (b"a 1 \n", 1, "trailing whitespace"),
        (b"a 1\nb 2  3\n", 2, "doubled"),
        (b"a  1\n", 1, "leading, doubled"),
        (b"a 1\nb \n", 2, "no value"),
        (b"a 1\na 2\n", 2, "'a' is duplicated"),
        (b"b 1\na 2\n", 2, "'a' is not in order"),
        (b"a 1\nB 2\n", 2, "LC_ALL=C"),
        (b"a 1\nb 2", 2, "no end"),
        (b"a 1\r\n", 1, "dos2unix"),
        (b"a 1\nb \xff\n", 2, "not UTF-8"),
    ],
)
def test_the_first_broken_line_is_named(tmp_path, content, line, said):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_table(tmp_path / "t")
    assert str(caught.value).startswith(f"{tmp_path}/t:{line}: ") and said in str(caught.value)


def test_keys_alone_are_read_where_values_are_optional(tmp_path):
    (tmp_path / "t").write_text("a\nb 1\n")
    assert read_table(tmp_path / "t", values="optional") == {"a": "", "b": "1"}
    (tmp_path / "t").write_text("a \n")
    with pytest.raises(UserError, match="trailing whitespace"):
        read_table(tmp_path / "t", values="optional")
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_table(path)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(KEYS, st.sampled_from("xyz"), max_size=12))
def test_inverting_twice_is_the_same(utt2x):
    x2utt = invert(utt2x)
    assert {utt: x for x, utts in x2utt.items() for utt in utts} == utt2x
    assert list(x2utt) == sorted(x2utt) and all(utts == byte_order(utts) for utts in x2utt.values())


@pytest.mark.parametrize("name", ["../x", "", ".", "..", "a/b", "-x", "a b", "é", "a" * 201, "a\n"])
def test_ids_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(UserError, match="t:3: client"):
        check_id(name, "client", "t", 3)


def test_usable_ids_are_returned():
    for name in ("a", "Client_01", "x.y+z-1", "0"):
        assert check_id(name, "client") == name


@pytest.mark.parametrize("value", ["", "r 1", "r 1 2 3", "r a 2", "r nan 2", "r 1 inf", "r -1 2",
                                   "r 2 2", "r 2 1", "r inf -1"])  # fmt: skip
def test_broken_segments_are_refused(value):
    with pytest.raises(UserError, match="segments:4: "):
        parse_segment(value, "segments", 4)
    assert parse_segment("r 1.5 -1", "segments", 4) == ("r", 1.5, -1.0)


# Atomic files


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "f", "old")
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "f") as file:
        file.write("new")
        raise ZeroDivisionError
    assert (tmp_path / "f").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_files_appear_whole_with_the_users_permissions(tmp_path):
    tmp_path.chmod(0o755)
    mask = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "deep/er/f") as temporary:
            assert temporary.parent == tmp_path / "deep/er"
            temporary.write_bytes(b"abc")
            assert not (tmp_path / "deep/er/f").exists()
    finally:
        os.umask(mask)
    assert (tmp_path / "deep/er/f").stat().st_mode & 0o777 == 0o640
    with atomic_write(tmp_path / "b", "wb") as file:
        file.write(b"\r\n\xff")
    assert (tmp_path / "b").read_bytes() == b"\r\n\xff"
    write_text(tmp_path / "empty", "")
    assert sha256(tmp_path / "deep/er/f")[:16] == "ba7816bf8f01cfea"
    assert sha256(tmp_path / "empty")[:16] == "e3b0c44298fc1c14"


def test_an_error_is_one_line_with_place_and_remedy():
    assert str(UserError("bad", path="f", line=3, remedy="mend it")) == "f:3: bad; mend it"
    assert str(UserError("bad", path="f")) == "f: bad"
    assert str(UserError("two\nlines")) == "two lines"


def test_what_the_system_refuses_is_one_line(data, tmp_path, cli):
    (tmp_path / "file").touch()
    cli("subset-data", data, tmp_path / "file", "--utterances", 1).fails(1, f"{tmp_path}/file")


# Data directories


@pytest.fixture
def data(tmp_path) -> Path:
    """Make two recordings in five segments, three speakers, two clients, features, all tables."""
    path = tmp_path / "data"
    wav_scp = {}
    for index, recording in enumerate(("r1", "r2")):
        file = tmp_path / f"{recording}.wav"
        soundfile.write(file, np.full(16_000 * (index + 1), 0.1), 16_000)
        wav_scp[recording] = str(file)
    segments = {
        "a-1": "r1 0.0 0.4", "a-2": "r1 0.4 1.0", "b-1": "r2 0.0 0.5", "b-2": "r2 0.5 2.3",
        "c-1": "r2 1.0 -1",
    }  # fmt: skip
    frames = {utt: 10 + i for i, utt in enumerate(segments)}
    matrices = ((utt, np.zeros((count, 4), np.float32)) for utt, count in frames.items())
    DataDir(
        path,
        wav_scp=wav_scp,
        segments=segments,
        text={utt: f"WORD {utt}" for utt in segments},
        utt2spk={utt: utt[0] for utt in segments},
        utt2dur=dict.fromkeys(segments, "360.0"),
        utt2client={utt: "y" if utt[0] == "c" else "x" for utt in segments},
        utt2num_frames={utt: str(count) for utt, count in frames.items()},
        feats_scp=write_ark(tmp_path / "feats.ark", matrices),
        others={
            "utt2lang": dict.fromkeys(segments, "en"),
            "utt2accent": dict.fromkeys(segments, "Australian English"),
            "spk2gender": {"a": "f", "b": "m", "c": "f"},
            "reco2dur": {"r1": "1.0", "r2": "2.0"},
        },
    ).write()
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_reading_and_writing_a_data_directory_changes_nothing(data, tmp_path):
    tables = DataDir.read(data)
    tables.path = tmp_path / "copy"
    tables.write()
    assert contents(data) == contents(tmp_path / "copy") and len(contents(data)) == 14
    only = DataDir.read(data, "text", "utt2spk")
    assert only.text == tables.text and not only.wav_scp and not only.others
    with pytest.raises(UserError, match=r"no utterance of client 'z'.*known clients: x, y"):
        tables.client_utterances("z")
    assert tables.client_utterances("y") == ["c-1"]


def test_an_empty_text_survives_a_round_trip(tmp_path):
    DataDir(tmp_path / "d", utt2spk={"a": "a"}, text={"a": ""}).write()
    assert (tmp_path / "d/text").read_bytes() == b"a\n"
    assert DataDir.read(tmp_path / "d").text == {"a": ""}


def test_a_part_keeps_what_belongs_to_it(data, tmp_path, cli):
    out = tmp_path / "part"
    result = cli("subset-data", data, out, "--clients", "x").ok()
    assert result.out == f"{out}: 4 of 5 utterances\n"
    cli("subset-data", data, out, "--clients", "y").ok()
    part = DataDir.read(out)
    assert part.utterances == list(part.feats_scp) == list(part.utt2client) == ["c-1"]
    assert list(part.wav_scp) == ["r2"] and list(part.segments) == ["c-1"]
    assert part.others["spk2gender"] == {"c": "f"} and part.others["reco2dur"] == {"r2": "2.0"}
    assert (out / "client2utt").read_text() == "y c-1\n"
    validate(out).ok()


def test_parts_by_number_are_evenly_spread(data, tmp_path, cli):
    cli("subset-data", data, tmp_path / "u", "--utterances", 2).ok()
    assert DataDir.read(tmp_path / "u").utterances == ["a-1", "b-1"]
    cli("subset-data", data, tmp_path / "s", "--speakers", 2).ok()
    assert DataDir.read(tmp_path / "s").utterances == ["a-1", "a-2", "b-1", "b-2"]
    for count in range(1, 8):
        spread = evenly_spread(list("abcdefg"), count, "letters", data)
        assert len(set(spread)) == count and spread == sorted(spread)
    cli("subset-data", data, tmp_path / "n", "--utterances", 6).fails(1, "there are only 5")
    cli("subset-data", data, tmp_path / "n", "--clients", "x,w").fails(1, "no utterance of", "'w'")
    cli("subset-data", data, tmp_path / "n").fails(2)
    cli("subset-data", data, tmp_path / "n", "--speakers", 1, "--utterances", 1).fails(2)
    assert not (tmp_path / "n").exists()


def test_the_rest_of_a_part_is_written_too(data, tmp_path, cli):
    part, rest = tmp_path / "part", tmp_path / "rest"
    cli("subset-data", data, part, "--speakers", 1, "--rest", rest).ok()
    both = [DataDir.read(path).utterances for path in (part, rest)]
    assert sorted(both[0] + both[1]) == DataDir.read(data).utterances
    assert not set(DataDir.read(part).utt2spk.values()) & set(DataDir.read(rest).utt2spk.values())
    validate(rest).ok()
    command = ("subset-data", data, tmp_path / "n", "--utterances", 5, "--rest", tmp_path / "m")
    cli(*command).fails(1, "nothing is left over")
    assert not (tmp_path / "n").exists()


def test_parts_combined_are_the_whole(data, tmp_path, cli):
    cli("subset-data", data, tmp_path / "x", "--clients", "x").ok()
    cli("subset-data", data, tmp_path / "y", "--clients", "y").ok()
    out = tmp_path / "both"
    result = cli("combine-data", out, tmp_path / "y", tmp_path / "x").ok()
    assert result.out == "5 utterances from 2 data directories\n"
    assert contents(out) == contents(data)
    (tmp_path / "x/utt2dur").unlink()
    result = cli("combine-data", out, tmp_path / "y", tmp_path / "x").ok()
    assert "left out, as not every input has it: utt2dur" in result.out
    assert not (out / "utt2dur").exists()


def test_what_a_part_of_the_speakers_tells_goes_wherever_its_speakers_go(data, tmp_path, cli):
    (data / "spk2gender").write_text("a f\nc m\n")
    (data / "spk2age").write_text("b 30\n")
    validate(data).ok()
    cli("subset-data", data, tmp_path / "x", "--clients", "x").ok()
    cli("subset-data", data, tmp_path / "y", "--clients", "y").ok()
    assert (tmp_path / "x/spk2gender").read_text() == "a f\n"
    assert (tmp_path / "y/spk2gender").read_text() == "c m\n"
    # No speaker of y reports an age.
    assert not (tmp_path / "y/spk2age").exists()
    result = cli("combine-data", tmp_path / "both", tmp_path / "x", tmp_path / "y").ok()
    assert result.out == "5 utterances from 2 data directories\n"
    assert contents(tmp_path / "both") == contents(data)
    cli("perturb-speed", data, tmp_path / "sp", "--speeds", "1.0 1.1").ok()
    genders = (tmp_path / "sp/spk2gender").read_text()
    assert genders == "a f\nc m\nsp1.1-a f\nsp1.1-c m\n"
    for out in ("x", "y", "both", "sp"):
        validate(tmp_path / out, "--no-feats").ok()


def test_what_cannot_be_combined_is_told(data, tmp_path, cli):
    out = tmp_path / "both"
    cli("combine-data", out, data, data).fails(1, "'a-1' is in another input too")
    cli("subset-data", data, tmp_path / "x", "--clients", "x").ok()
    cli("subset-data", data, tmp_path / "y", "--clients", "y").ok()
    (tmp_path / "y/wav.scp").write_text("r2 /elsewhere\n")
    cli("combine-data", out, tmp_path / "x", tmp_path / "y").fails(1, "y/wav.scp", "'r2'")
    (tmp_path / "y/segments").unlink()
    cli("combine-data", out, tmp_path / "x", tmp_path / "y").fails(1, "only some", "segments")
    assert not out.exists()


# The validator


validate = partial(program, "utils/validate_data_dir.py")


def test_a_good_data_directory_passes_with_a_summary(data):
    result = validate(data).ok()
    assert result.out == f"{data}: 5 utterances, 3 speakers, 2 clients, 0.50 hours\n"
    validate(data, "--no-nonsense").fails(2)


def test_what_may_be_absent(data):
    options = {"feats": "feats.scp", "text": "text", "wav": "wav.scp"}
    for name in (*options.values(), "segments", "reco2dur"):
        (data / name).unlink()
    for option, name in options.items():
        with pytest.raises(UserError, match=f"{name}: not there; .* --no-{option} "):
            validate_data_dir(data, **{other: other == option for other in options})
    validate(data, "--no-text", "--no-wav", "--no-feats").ok()
    with pytest.raises(UserError, match="no such data directory"):
        validate_data_dir(data / "none")


TABLES = """client2utt feats.scp reco2dur segments spk2gender spk2utt text utt2accent utt2client
utt2dur utt2lang utt2num_frames utt2spk wav.scp""".split()

# Table, line to replace (0: the whole table), replacement, expected message.
TRAPS = [
    ("utt2spk", 1, "a-1 a a", "utt2spk:1: 3 fields"),
    ("utt2spk", 1, "a-1 c", "utt2spk:1: utterance 'a-1' does not begin with its speaker 'c'"),
    ("utt2spk", 5, "", "spk2utt:3: 'c' is not in utt2spk"),
    ("utt2spk", 0, "", "utt2spk: empty"),
    ("spk2utt", 1, "a a-1", "spk2utt:1: the utterances of 'a' are not those of utt2spk"),
    ("spk2utt", 1, "a a-2 a-1", "spk2utt:1: the utterances of 'a'"),
    ("spk2utt", 3, "", "spk2utt: 'c' missing"),
    ("spk2utt", 0, None, "spk2utt: not there"),
    ("text", 2, "a-2", "text:2: 'a-2' has no value"),
    ("text", 2, "a-2 ", "text:2: 'a-2' has no value"),
    ("text", 2, "a-2 WORD ", "text:2: leading, doubled or trailing whitespace"),
    ("text", 2, "a-2 ONE  TWO", "text:2: leading, doubled or trailing whitespace"),
    ("text", 2, "a-2 ONE\tTWO", "text:2: a character that does not print"),
    ("text", 2, "a-2 ONE\u00a0TWO", "text:2: a character that does not print"),
    ("text", 2, "a-2 ONE\u200bTWO", "text:2: a character that does not print"),
    ("text", 2, "a-2 ONE </s>", "text:2: the word </s> is reserved"),
    ("text", 2, "", "text: 'a-2' missing, though in utt2spk"),
    ("text", 2, "a-1x WORD", "text:2: 'a-1x' is not in utt2spk"),
    ("wav.scp", 1, "r1 cat x.wav |", "wav.scp:1: a pipe"),
    ("wav.scp", 1, "r1 ~/x.wav", "wav.scp:1: the file name '~/x.wav'"),
    ("wav.scp", 1, "r1 /none/x.wav", "wav.scp:1: the audio of 'r1' is not there"),
    ("wav.scp", 1, f"r1 {'9' * 300}", "wav.scp:1: the audio of 'r1' is not there"),
    ("wav.scp", 1, "r1 {dir}/zero.wav", "wav.scp:1: the audio of 'r1' is empty"),
    ("wav.scp", 1, "r1 {dir}/data/text", "data/text: not audio"),
    ("wav.scp", 1, "", "wav.scp: 'r1' missing, though in segments:1"),
    ("wav.scp", 2, "r3 {dir}/r2.wav", "wav.scp:2: 'r3' is not in segments"),
    ("segments", 2, "a-2 r1 0.4", "segments:2: 'r1 0.4' is not a segment"),
    ("segments", 2, "a-2 r1 0.4 1.0 1", "segments:2: 'r1 0.4 1.0 1' is not a segment"),
    ("segments", 2, "a-2 r1 1.0 0.4", "segments:2: a segment from 1.0 to 0.4"),
    ("segments", 2, "a-2 r1 0.4 1.6", "segments:2: 0.4 to 1.6 s is not within 'r1' of 1.00 s"),
    ("segments", 2, "a-2 r1 1.0 1.2", "segments:2: 1.0 to 1.2 s is not within"),
    ("segments", 5, "", "segments: 'c-1' missing"),
    ("utt2dur", 3, "b-1 0", "utt2dur:3: '0' is not a positive number"),
    ("utt2dur", 3, "b-1 1_0", "utt2dur:3: '1_0'"),
    ("utt2dur", 5, "", "utt2dur: 'c-1' missing"),
    ("reco2dur", 1, "r1 -1", "reco2dur:1: '-1'"),
    ("reco2dur", 1, "", "reco2dur: 'r1' missing, though in segments"),
    ("utt2num_frames", 3, "b-1 12.5", "utt2num_frames:3: '12.5'"),
    ("utt2num_frames", 3, "b-1 13", "utt2num_frames:3: 'b-1' has 13 frames, its matrix 12"),
    ("feats.scp", 3, "b-1 /none/x.ark:5", "feats.scp:3: /none/x.ark: cannot be read"),
    ("feats.scp", 3, "b-1 {dir}/feats.ark:7", "feats.scp:3: {dir}/feats.ark: the features of"),
    ("feats.scp", 5, "", "feats.scp: 'c-1' missing"),
    ("feats.scp", 2, "a-2 {dir}/other.ark:4", "feats.scp:2: 'a-2' has 9 filters"),
    ("utt2client", 3, "b-1 y", "client2utt:1: the utterances of 'x' are not those of utt2client"),
    ("utt2client", 3, "b-1 ../x", "client2utt: '../x' missing, though in utt2client:3"),
    ("utt2client", 3, "b-1 x y", "utt2client:3: 3 fields"),
    ("utt2client", 5, "", "utt2client: 'c-1' missing, though in utt2spk:5"),
    ("utt2client", 0, None, "utt2client: not there; client2utt is there"),
    ("client2utt", 0, None, "client2utt: not there; utt2client is there"),
    ("client2utt", 2, "y c-1 c-1", "client2utt:2: the utterances of 'y'"),
    ("utt2lang", 3, "b-1 en us", "utt2lang:3: 3 fields"),
    ("utt2accent", 5, "", "utt2accent: 'c-1' missing"),
    ("spk2gender", 2, "b male", "spk2gender:2: 'male' is neither m nor f"),
    ("spk2gender", 3, "d m", "spk2gender:3: 'd' is not in spk2utt"),
    ("spk2gender", 0, "", "spk2gender: empty"),
    ("spk2age", 0, "a 30\nd 40\n", "spk2age:2: 'd' is not in spk2utt"),
    ("spk2dialect", 0, "a north\nb south\n", "spk2dialect: 'c' missing, though in spk2utt"),
    ("cmvn.scp", 0, "a x:1\nb x:2\n", "cmvn.scp: 'c' missing"),
    ("utt2warp", 0, "a-1 1\na-2 1\nb-1 9\nb-2 1\nc-1 1\n", "utt2warp:3: '9' is not between"),
    ("vad.scp", 0, "a-1 x:1\n", "vad.scp: 'a-2' and 3 more missing"),
    ("reco2file_and_channel", 0, "r1 r1 A\nr2 r2 1\n", "reco2file_and_channel:2: 'r2 1'"),
]


@pytest.mark.parametrize(("name", "line", "instead", "said"), TRAPS)
def test_every_trap_is_named_with_file_and_line(data, tmp_path, name, line, instead, said):
    (tmp_path / "zero.wav").touch()
    write_ark(tmp_path / "other.ark", [("a-2", np.zeros((11, 9), np.float32))])
    spoil(data, name, line, instead and instead.format(dir=tmp_path))
    before = contents(data)
    error = fault(data)
    assert said.format(dir=tmp_path) in error and error.startswith(str(tmp_path)), error
    assert contents(data) == before


def test_segments_without_recordings(data):
    (data / "wav.scp").unlink()
    with pytest.raises(UserError, match="segments: there are segments, but no wav"):
        validate_data_dir(data, wav=False)


def test_a_link_to_nowhere_is_no_absent_table(data):
    """Without segments, whole recordings would be utterances."""
    (data / "segments").unlink()
    (data / "segments").symlink_to("nowhere")
    for read in (validate_data_dir, DataDir.read):
        with pytest.raises(UserError, match="segments: cannot be read: No such file"):
            read(data)


def test_features_of_every_utterance_are_asked_for(data):
    with pytest.raises(UserError, match="scp: no features of utterance 'z'; extract them"):
        DataDir.read(data).check_features(["a-1", "z"])


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(TABLES), seed=SEEDS)
def test_a_damaged_table_is_refused_or_is_that_of_another_data_directory(data, name, seed):
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        shutil.copytree(data, folder)
        damage(folder / name, seed, *(folder / other for other in TABLES))
        read = partial(validate_data_dir, folder, recording_seconds=recording_seconds)
        # A file that is named may be audio or an ark, which lie beside the directory.
        if read_or_refused(read, Path("/")) is None:
            return
        # Tables that pass say what they say to every reader: written again, they are the same.
        tables = DataDir.read(folder)
        tables.path = Path(temporary) / "again"
        tables.write()
        left = {path.name: path.read_bytes().replace(b"\t", b" ") for path in folder.iterdir()}
        assert contents(tables.path) == left


def fault(data: Path) -> str:
    """Return the validator's messages, as the script calls it but without a process."""
    with pytest.raises(UserError) as caught:
        validate_data_dir(data, recording_seconds=recording_seconds)
    return str(caught.value)


def spoil(data: Path, name: str, line: int, instead: str | None) -> None:
    path = data / name
    if instead is None:
        path.unlink()
    elif line == 0:
        path.write_text(instead)
    else:
        lines = path.read_text().split("\n")
        lines[line - 1 : line] = [instead] if instead else []
        path.write_text("\n".join(lines))


def test_the_script_says_one_line_and_exits_1(data):
    spoil(data, "text", 4, "b-2")
    validate(data).fails(1, f"validate_data_dir.py: {data}/text:4: 'b-2' has no value")


def test_speakers_out_of_step_with_utterances(data, tmp_path):
    path = tmp_path / "steps"
    DataDir(path, utt2spk={"s1_a": "s1", "s10_a": "s10"}, text={"s1_a": "A", "s10_a": "A"}).write()
    # '0' sorts before '_': the utterances are in order, their speakers are not.
    result = validate(path, "--no-feats", "--no-wav")
    result.fails(1, "utt2spk:2: speaker 's1' is not in order", "'-'")


def test_clients_that_are_no_ids(data):
    spoil(data, "utt2client", 5, "c-1 ../y")
    (data / "client2utt").write_text("../y c-1\nx a-1 a-2 b-1 b-2\n")
    assert "utt2client:5: client '../y' is not usable" in fault(data)


IDS = st.text(st.sampled_from("abAZ09_-.+:/=@é~%\u200b\xa0日 \t\r"), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(speaker=IDS, utterance=IDS, client=IDS)
@example("s", "1", "a:b")
@example("s/1", "u", "c")
@example("José", "u", "c")
def test_the_validator_refuses_the_ids_that_commands_refuse(
    tmp_path_factory, speaker, utterance, client
):
    folder = tmp_path_factory.getbasetemp() / "ids"
    folder.mkdir(exist_ok=True)
    soundfile.write(folder / "a.wav", np.full(800, 0.1), 16_000)
    name = f"{speaker}-{utterance}"
    tables = {"wav.scp": f"{folder / 'a.wav'}", "text": "a", "utt2spk": speaker}
    for file, value in (tables | {"utt2client": client}).items():
        (folder / file).write_text(f"{name} {value}\n")
    (folder / "spk2utt").write_text(f"{speaker} {name}\n")
    (folder / "client2utt").write_text(f"{client} {name}\n")

    def refused(work) -> bool:
        try:
            work()
        except UserError:
            return True
        return False

    commands = refused(lambda: extract_features(folder, folder / "ark", FeatureConfig()))
    assert refused(lambda: validate_data_dir(folder, feats=False)) == commands


def test_joiners_of_other_scripts_are_text(data):
    spoil(data, "text", 2, "a-2 می\u200cخواهم क\u094d\u200dष")
    validate(data).ok()


def test_the_script_works_from_any_directory(data, tmp_path):
    """It finds this repository's package, without being told where."""
    shutil.copytree(data, tmp_path / "elsewhere/data")
    script = ROOT / "utils/validate_data_dir.py"
    run(sys.executable, script, "data", cwd=tmp_path / "elsewhere").ok()
