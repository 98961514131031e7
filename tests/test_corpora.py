"""What the preparation scripts and mini corpora of all four recipes have in common."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import ROOT, Result, kill_when
from fakes import (
    common_voice,
    some_clips,
    some_talks,
    some_words,
    speech_commands,
    tedlium,
    tiny_wav,
)
from fakes_ami import ami, some_meetings
from prepared import ACCENTS, SENTENCES, checked, content, make_mini, mini_corpus
from scripts import load, prepare

from fedtools.core.errors import UserError


@dataclass(frozen=True)
class Kind:
    """A recipe's corpus in miniature.

    Attributes:
        make: writes it in a folder, and returns it.
        options: with which it is prepared.
        sets: the number of its data directories.
        lacks: what is said of an empty folder.
        lost: patterns of the clips that `share` of the utterances are from, a binary fraction.
        said: what is said without them.
    """

    make: Callable[[Path], Path]
    options: tuple[str, ...]
    sets: int
    lacks: str
    lost: str
    share: float
    said: str


KINDS = {
    "ami": Kind(
        lambda folder: ami(folder, some_meetings()),
        (), 3, "no segments/*.segments.xml; unpack the annotations there",
        "*/audio/*.Headset-0.wav", 12 / 48,
        "12 of 48 cannot be used (audio: no such file: 12)",
    ),
    "commonvoice": Kind(
        lambda folder: common_voice(folder, some_clips()),
        ("--accents", ACCENTS), 6, "no validated.tsv; name the folder of the language",
        "clips/*[02468].mp3", 16 / 32,
        "16 of 32 rows are faulty (missing clip: 16)",
    ),
    "speechcommands": Kind(
        lambda folder: speech_commands(folder, some_words()),
        (), 6, "_nohash_<number>.wav; name the folder that has",
        "zero/*.wav", 9 / 128,
        "kept 119, dropped 9 (empty file: 9, the first",
    ),
    "tedlium3": Kind(
        lambda folder: tedlium(folder, some_talks(15, 4)),
        ("--partition", "legacy", "--hours-g", "0.02", "--seconds-per-model", "8"),
        6, "no *.stm; unpack the corpus again",
        "legacy/train/sph/Person001_2007.sph", 8 / 256,
        "8 of 256 lines cannot be used (audio: no such file: 8)",
    ),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def recipe(request) -> str:
    """Return each recipe's corpus by name."""
    return request.param


def refused(result: Result, *said: str) -> None:
    """Assert that the last line, below counts of faults, is an error with a remedy."""
    last = result.err.splitlines()[-1]
    Result(result.code, result.out, last).fails(1, "prepare.py: ", "; ", *said)
    assert "Traceback" not in result.err


# --- preparation ----------------------------------------------------------------------------------


def test_a_folder_that_is_no_corpus_is_told_in_one_line(recipe, tmp_path):
    kind, out = KINDS[recipe], tmp_path / "data"
    nowhere = tmp_path / "nowhere"
    prepare(recipe, nowhere, out, *kind.options).fails(1, f"{nowhere}: no such folder; name the ")
    (tmp_path / "empty").mkdir()
    prepare(recipe, tmp_path / "empty", out, *kind.options).fails(1, kind.lacks)
    assert not out.exists()


def test_same_bytes_again_and_nothing_old_is_left(recipe, tmp_path):
    kind, out = KINDS[recipe], tmp_path / "my data"
    # A blank in a path is no matter.
    corpus = kind.make(tmp_path / "my corpora")
    prepare(recipe, corpus, out, *kind.options).ok()
    sets = checked(out)
    assert len(list(out.rglob("utt2spk"))) == kind.sets
    wavs = [Path(path) for data in sets.values() for path in data.wav_scp.values()]
    assert wavs and all(path.is_file() and "my corpora" in str(path) for path in wavs)
    first = content(out)
    for old in out.rglob("utt2spk"):
        old.with_name("feats.scp").write_text("of an older run\n")
    prepare(recipe, corpus, out, *kind.options).ok()
    assert content(out) == first
    # AMI's sets are the owners'.
    if recipe != "ami":
        prepare(recipe, corpus, tmp_path / "other", *kind.options, "--seed", 1).ok()
        assert content(tmp_path / "other") != first


@pytest.mark.parametrize(
    ("name", "said"),
    [("two  blanks", "two  blanks: wav.scp cannot hold doubled spaces"),
     ("a\u200bname", "a\\u200bname' has characters that do not print")],
)  # fmt: skip
def test_a_folder_that_tables_cannot_name_is_to_be_renamed(recipe, tmp_path, name, said):
    corpus = KINDS[recipe].make(tmp_path).rename(tmp_path / name)
    out = tmp_path / "data"
    prepare(recipe, corpus, out, *KINDS[recipe].options).fails(1, said, "; rename it")
    assert not out.exists()


def test_too_many_faults_leave_the_older_data_alone(recipe, tmp_path):
    """As many as --max-drop says are no error, one more is."""
    kind, out = KINDS[recipe], tmp_path / "data"
    corpus = kind.make(tmp_path)
    prepare(recipe, corpus, out, *kind.options).ok()
    before = content(out)
    for path in corpus.glob(kind.lost):
        path.write_bytes(b"") if recipe == "speechcommands" else path.unlink()
    less = prepare(recipe, corpus, out, *kind.options, "--max-drop", kind.share - 1e-9)
    refused(less, f"{corpus}", kind.said, "repair the corpus", "raise --max-drop")
    assert content(out) == before
    prepare(recipe, corpus, out, *kind.options, "--max-drop", kind.share).ok()
    assert content(out) != before


AMI, VOICES, WORDS, TALKS = KINDS
SHARE = "expected a number above 0 and at most 1, such as 0.4"
ANY = ("--accents", "us")


@pytest.mark.parametrize(
    ("which", "options", "said"),
    [
        (AMI, ["--client", "person"], "'person' is not one of"),
        (AMI, ["--speech", "sung"], "'sung' is not one of"),
        (AMI, ["--speech", "synthetic", "--audio", "x"], "--audio: cannot be used with --speech"),
        (AMI, ["--max-drop", "x"], "'--max-drop'"),
        (AMI, ["--max-words", "-1"], "'--max-words'"),
        (VOICES, [], "Missing option '--accents'"),
        (VOICES, ["--accents", ""], "no accent is given"),
        (VOICES, ["--accents", "a/b=us"], "'a/b': a name is letters a-z, digits and '_'"),
        (VOICES, ["--accents", "au="], "'au' has no pattern"),
        (VOICES, ["--accents", "au=us,au=england"], "'au' is given twice"),
        (VOICES, [*ANY, "--server", "us"], "'us' is in --accents and in --server"),
        (VOICES, [*ANY, "--hours", "1,2"], "expected three hours above 0, such as 100,10,10"),
        (VOICES, [*ANY, "--server-fraction", "x"], SHARE),
        (VOICES, [*ANY, "--server-fraction", "0.4", "--server", "scotland"], "not allowed with"),
        (VOICES, [*ANY, "--language", "my data"], "expected the code of a language, such as de"),
        (VOICES, [*ANY, "--min-seconds", "x"], "'--min-seconds'"),
        (VOICES, [*ANY, "--nj", "0"], "'--nj'"),
        (WORDS, ["--task", "11"], "expected keywords or words"),
        (WORDS, ["--split", "mine"], "'mine' is not one of"),
        (WORDS, ["--keywords", "yes"], "expected two or more different words"),
        (WORDS, ["--silence", "no"], "'no' is not one of"),
        (WORDS, ["--max-drop", "x"], "'--max-drop'"),
        (WORDS, ["--min-clips", "few"], "'--min-clips'"),
        (WORDS, ["--clip-seconds", "0"], "expected seconds from 0.1 to 60, such as 1.5"),
        (TALKS, ["--unit", "voice"], "'voice' is not one of"),
        (TALKS, ["--partition", "old"], "'old' is not one of"),
        (TALKS, ["--hours-g", "x"], "expected a number above 0"),
        (TALKS, ["--speakers", "1,2"], "expected three whole numbers, such as 880,736,634"),
        (TALKS, ["--speakers", "1,2,0"], "expected three whole numbers"),
        (TALKS, ["--max-drop", "1.5"], "'--max-drop'"),
        *((name, ["--nonsense"], "No such option") for name in KINDS),
    ],
)  # fmt: skip
def test_wrong_usage_exits_2(tmp_path, which, options, said):
    needed = ANY if which == VOICES and options and options[0] not in ("--accents", "--nj") else ()
    result = prepare(which, tmp_path, tmp_path / "data", *needed, *options)
    assert result.fails(2, "prepare.py: ", said).err.count("\n") == 1
    assert not list(tmp_path.iterdir())


NAN, FAR = "nan", "inf"


@pytest.mark.parametrize(
    ("which", "option", "taken", "refused"),
    [
        (AMI, "--max-drop", "0 1 0.02", f"-0.01 1.01 x {NAN}"),
        (AMI, "--max-words", "0 30", "-1 1.5 x"),
        (VOICES, "--hours", "1,1e-9,2", f"1,2 1,2,3,4 1,2,0 1,2,{NAN} 1,2,{FAR} x"),
        (VOICES, "--min-seconds", f"0 0.5 {FAR}", "-0.1 x"),
        (VOICES, "--nj", "1 9999", "0 10000 1.5 x"),
        (VOICES, "--server-fraction", "1e-9 1", f"0 1.01 {NAN} x"),
        (WORDS, "--keywords", "a,b a,b,c", "a a,b, a,b,a"),
        (WORDS, "--silence", "true false", "True 1"),
        (WORDS, "--server-clips", "25 25,67", "0 25,25 x"),
        (WORDS, "--clip-seconds", "0.1 60 0.0996", f"0.099 60.001 {NAN} {FAR} x"),
        (TALKS, "--hours-g", "1e-9 99", f"0 -1 {NAN} {FAR} x"),
        (TALKS, "--held-seconds", "0 0.0 1", f"-1 {NAN} {FAR} x"),
        (TALKS, "--valid", "0 1", f"-0.01 1.01 {NAN} x"),
        (TALKS, "--indicator-utterances", "1 999999999", "0 1000000000 1.5 x"),
        (TALKS, "--speakers", "1,2,3", "1,2 1,2,0 1,2,3,4 x"),
    ],
)
def test_the_bounds_of_options(tmp_path, which, option, taken, refused):
    needed = ANY if which == VOICES else ()
    command = (which, tmp_path / "nowhere", tmp_path / "data", *needed, option)
    for text in taken.split():
        prepare(*command, text).fails(1, "nowhere: no such folder")
    for text in refused.split():
        prepare(*command, text).fails(2, f"prepare.py: Invalid value for '{option}': ")


# --- mini corpora ---------------------------------------------------------------------------------


# Files to damage, the last of which are not spoken: pattern -> what is left, or None of it; and
# the number of clips to make again.
DAMAGE: dict[str, tuple[dict[str, Callable[[bytes], bytes] | None], int]] = {
    "ami": (
        {
            "ES2002a/audio/ES2002a.Headset-1.wav": lambda whole: whole[:-2] + b"??",
            "EN2001a/audio/*.Headset-0.wav": None,
            "words/ES2002a.A.words.xml": lambda whole: b"nothing\n",
            "background.txt": None,
        },
        2,
    ),
    "commonvoice": (
        {
            "en/clips/*_40000003.mp3": lambda whole: whole[:-1] + b"?",
            "en/clips/*_40000004.mp3": None,
            "en/train.tsv": None,
        },
        2,
    ),
    "speechcommands": (
        {
            "*/*_nohash_1.wav": lambda whole: whole[:-1] + b"?",
            "_background_noise_/hum.wav": None,
            "testing_list.txt": None,
        },
        2,
    ),
    "tedlium3": (
        {
            "data/sph/CleoNorth_2005.sph": lambda whole: whole[:-2] + b"??",
            "legacy/dev/sph/*.sph": None,
            "legacy/train/sph/BenNorth_2004.sph": None,
            "data/stm/BenNorth_2004_clean.stm": lambda whole: b"nothing\n",
        },
        2,
    ),
}


def test_a_damaged_mini_corpus_is_mended_to_the_same_bytes(recipe, tmp_path, tmp_path_factory):
    whole = mini_corpus(recipe, tmp_path_factory)
    corpus = tmp_path / whole.name
    shutil.copytree(whole, corpus, symlinks=True)
    damage, clips = DAMAGE[recipe]
    for pattern, change in damage.items():
        path = min(corpus.glob(pattern))
        path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    assert content(corpus) != content(whole)
    # The whole was made by two jobs.
    said = make_mini(recipe, tmp_path, "--nj", 1).ok().err
    assert f"{corpus}: making {clips} clips with espeak-ng\n" in said
    assert content(corpus) == content(whole)
    assert re.search(r": [0-9]+ clips are complete\n", make_mini(recipe, tmp_path).ok().err)


def test_a_mini_corpus_does_not_take_a_folder_that_is_not_its_own(
    recipe, tmp_path, tmp_path_factory
):
    theirs = tmp_path / mini_corpus(recipe, tmp_path_factory).name
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    make_mini(recipe, tmp_path).fails(1, "was not made by this script", "choose another OUT")
    assert content(tmp_path) == {f"{theirs.name}/thesis.tex": b"years of work"}
    for options in (["--nj", 0], ["--utterances", 0]):
        said = "--nj and --utterances must be at least 1"
        make_mini(recipe, tmp_path, *options).fails(2, "usage: mini.py", said)


def test_a_mini_corpus_goes_on_after_a_kill(tmp_path, tmp_path_factory):
    whole = mini_corpus("commonvoice", tmp_path_factory)
    corpus = tmp_path / whole.name
    clips = corpus / "en" / "clips"
    # What an earlier run leaves that was killed when it had made all but the last 30 clips.
    names = sorted(path.name for path in (whole / "en" / "clips").iterdir())
    shutil.copytree(whole, corpus)
    for path in [*(corpus / "en").glob("*.tsv"), *(clips / name for name in names[-30:])]:
        path.unlink()
    sums = (corpus / "SHA256SUMS").read_text().splitlines(keepends=True)
    (corpus / "SHA256SUMS").unlink()
    made = (line for line in sums if (corpus / line.split()[1]).exists())
    (corpus / ".sums").write_text("".join(made))
    few = ["--utterances", str(SENTENCES["commonvoice"]), "--nj", "1"]
    command = [sys.executable, str(ROOT / "local/commonvoice/mini.py"), str(tmp_path), *few]
    kill_when(command, {**os.environ, "PYTHONPATH": str(ROOT)}, clips, names[-21])
    (clips / ".common_voice_en_40000000.mp3.x.tmp").write_bytes(b"half")
    said = make_mini("commonvoice", tmp_path, "--nj", 1).ok().err
    again = int(re.search(r"making (\d+) clips", said)[1])
    # The last clip may have been renamed, and its sum not yet written.
    assert 5 < again <= 30 - 9
    assert content(corpus) == content(whole)


# What all four are made by; here the clips are no speech.


def make(corpus: Path, recipe: str = "a recipe", clips: int = 0, speak=None) -> None:
    """Make a folder of `clips` clips and a table of their number."""
    (synthesis,) = load("ami", "synthesis")
    names = {f"{number}.wav": number for number in range(clips)}
    table = corpus / "table"
    synthesis.make_corpus(
        corpus, recipe, names, speak, ["table"], lambda: table.write_text(f"{clips}\n"), 1
    )


def test_a_corpus_of_another_version_is_made_anew(tmp_path):
    corpus, old = tmp_path / "corpus", tmp_path / ".corpus.old"
    make(corpus)
    first = content(corpus)
    (corpus / "more").write_text("of another version")
    make(corpus)
    assert content(corpus).keys() - first.keys() == {"more"}
    old.mkdir()
    (old / "left").write_text("by a kill")
    make(corpus, "another recipe")
    assert content(corpus) == {**first, ".recipe": b"another recipe"} and not old.exists()
    # A link is followed, to the disk that was meant.
    (tmp_path / "link").symlink_to(corpus)
    make(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and content(corpus) == first


def test_a_corpus_is_made_after_a_kill_at_the_very_beginning(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "..recipe.elsewhere-1.abc.tmp").write_text("")
    make(corpus)
    assert set(content(corpus)) == {".recipe", "SHA256SUMS", "table"}


def test_clips_that_cannot_be_made_are_an_error(tmp_path):
    pytest.importorskip("espeakng_loader")

    def fail(synthesiser, clip, path):
        raise ValueError("no voice")

    def die(synthesiser, clip, path):
        if clip == 1:
            os._exit(1)
        path.write_text("spoken")

    with pytest.raises(
        UserError, match="cannot make a clip: ValueError: no voice; see utils/setup"
    ):
        make(tmp_path / "one", clips=2, speak=fail)
    with pytest.raises(UserError, match="1 clips were not made; run the command again"):
        make(tmp_path / "two", clips=2, speak=die)
    assert not list(tmp_path.glob("*/SHA256SUMS"))


def test_audio_that_the_script_did_not_make_is_noticed(tmp_path):
    """The annotations tell the times of its two sentences; here is one."""
    (meetings,), (talks,) = load("ami", "mini"), load("tedlium3", "mini")
    headset, talk = meetings.plan(0, 2)[0], talks.plan(0, 2, talks.Layout())[0]
    path = tmp_path / headset.audio
    path.parent.mkdir(parents=True)
    path.write_bytes(tiny_wav("one"))
    said = "not the audio that was made; remove it and run again"
    with pytest.raises(UserError, match=said):
        meetings.annotate(headset, tmp_path, False)
    with pytest.raises(UserError, match=said):
        talks.stm_of(talk, path)
