"""Common Voice: every quirk of the releases through prepare.py, and the mini corpus."""

from __future__ import annotations

import random
import re
import shlex
import shutil
import unicodedata
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import prepared
import pytest
import scripts
from commands import inside
from fakes import Clip, common_voice, some_clips, speaker_id
from hypothesis import given
from hypothesis import strategies as st
from mp3s import TINY_SECONDS
from prepared import ACCENTS, content

from fedtools.core.tables import read_tsv
from fedtools.data.datadir import DataDir
from fedtools.data.validate import validate_data_dir

SETS = ["train", "valid", "test", "server_train", "server_valid", "server_test"]
prepare = partial(scripts.prepare, "commonvoice")


def speakers_of(out: Path) -> dict[str, set[str]]:
    return {name: set(DataDir.read(out / name).utt2spk.values()) for name in SETS}


def texts_of(out: Path) -> list[str]:
    return sorted(text for name in SETS for text in DataDir.read(out / name).text.values())


# --- releases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [1, 5, 8, 17, 22])
def test_every_release_gives_the_same_sets(tmp_path, release):
    clips = some_clips()
    common_voice(tmp_path, clips, release)
    told = {clip.speaker[:8]: clip.gender[0] for clip in clips if clip.gender}
    assert set(told.values()) == {"m", "f"} and len(told) == 12
    out = tmp_path / "data"
    result = prepare(tmp_path / f"cv-corpus-{release}.0", out, "--accents", ACCENTS).ok()
    assert "kept 32, dropped 0" in result.out
    assert "all there is, in ratio 100:10:10" in result.out
    speakers = speakers_of(out)
    assert all(not a & b for a, b in combinations(speakers.values(), 2))
    lengths = f"{TINY_SECONDS:.3f}"
    hashes = {name: {speaker.split("-")[1] for speaker in who} for name, who in speakers.items()}
    if release == 1:
        (tmp_path / "other").mkdir()
        reference = common_voice(tmp_path / "other", some_clips(), 17)
        prepare(reference, tmp_path / "reference", "--accents", ACCENTS).ok()
        assert speakers == speakers_of(tmp_path / "reference")
    for name, who in speakers.items():
        data = DataDir.read(out / name)
        clients = {"au", "en", "in"} if not name.startswith("server") else {"us"}
        assert {utterance.split("-")[0] for utterance in data.text} == clients
        assert set(data.utt2client.values()) == (clients if clients != {"us"} else set())
        assert all(Path(path).is_file() for path in data.wav_scp.values())
        assert set(data.utt2dur.values()) == {lengths}
        genders = dict(line.split() for line in (out / name / "spk2gender").open())
        hidden = {speaker.split("-")[1] for speaker in who}
        expected = {name: told[name] for name in told.keys() & hidden}
        assert {name.split("-")[1]: gender for name, gender in genders.items()} == expected
    assert len(set.union(*hashes.values())) == 16


def test_release_12_says_that_its_accents_are_empty(tmp_path):
    language = common_voice(tmp_path, some_clips(), 12)
    result = prepare(language, tmp_path / "data", "--accents", ACCENTS)
    result.fails(1, "validated.tsv", "no accent in any of 32 rows", "take another release")
    assert not (tmp_path / "data").exists()


def test_a_language_with_variants_alone_is_told_with_them(tmp_path):
    """Welsh and others name a variant in place of an accent, in releases from 17."""
    language = common_voice(tmp_path, [replace(clip, accent="") for clip in some_clips()], 17)
    table = language / "validated.tsv"
    header, *rows = (line.split("\t") for line in table.read_text().splitlines())
    for number, row in enumerate(rows):
        row[header.index("variant")] = "North-Western Welsh" if number % 4 else "Patagonian Welsh"
    table.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))
    said = "which have variants of the language instead: North-Western Welsh (24); Patagonian"
    result = prepare(language, tmp_path / "data", "--accents", ACCENTS)
    result.fails(1, "no accent in any of 32 rows", said, "make speakers the clients: --accents any")
    assert "release 12" not in result.err


@pytest.mark.parametrize("release", [5, 17])
def test_a_table_that_was_saved_with_an_index_is_read(tmp_path, release):
    """Pandas' to_csv adds a column without a name, unless it is told not to."""
    language = common_voice(tmp_path, some_clips(), release)
    prepare(language, tmp_path / "one", "--accents", ACCENTS).ok()
    for table in language.glob("*.tsv"):
        header, *rows = table.read_text().splitlines(keepends=True)
        indexed = [f"{number}\t{row}" for number, row in enumerate(rows)]
        table.write_text("".join([f"\t{header}", *indexed]))
    prepare(language, tmp_path / "two", "--accents", ACCENTS).ok()
    assert content(tmp_path / "one") == content(tmp_path / "two")


LAYOUTS = {
    "spontaneous": (("ss-corpus-en.tsv", "audios/1.mp3"), "this is Spontaneous Speech, which is"),
    "above it": (("en/ss-corpus-en.tsv", "en/audios/1.mp3"), "take Scripted Speech"),
    "hugging face": (
        ("transcript/en/train.tsv", "audio/en/train/en_train_0.tar"),
        "Hugging Face's copy has other folders: unpack audio/*/*/*.tar into one folder clips",
    ),
    "kaggle": (("cv-valid-train.csv", "cv-valid-train/1.mp3"), "does not tell speakers apart"),
    "archive": (("cv-corpus-17.0-en.tar.gz",), "unpack the archive, with tar -xf "),
    "tables": (("en/train-0000.parquet",), "such as train-0000.parquet are not read"),
    "far above": (("cv-corpus-17.0/en/validated.tsv",), "such as {folder}/cv-corpus-17.0/en"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_get_the_remedy_that_fits(tmp_path, name):
    files, said = LAYOUTS[name]
    folder = tmp_path / "corpus"
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    result = prepare(folder, tmp_path / "data", "--accents", ACCENTS)
    result.fails(1, "no validated.tsv; ", said.format(folder=folder))


@pytest.mark.parametrize("name", ["en.tar.gz", "en.tgz", "my corpus.tar", "en.zip"])
def test_an_archive_in_place_of_a_folder_is_told_with_a_command(tmp_path, name):
    (tmp_path / name).touch()
    tool = "unzip" if name.endswith("zip") else "tar -xf"
    said = f"an archive; unpack it, with {tool} {shlex.quote(str(tmp_path / name))}; name the"
    prepare(tmp_path / name, tmp_path / "data", "--accents", ACCENTS).fails(1, said)


def test_codes_and_texts_and_their_letters_are_one_accent(tmp_path):
    clips = some_clips()
    spelled = {"australia": "AUSTRALIAN  English", "england": "england", "indian": "indian"}
    clips += [
        replace(clip, number=clip.number + 500, accent=spelled.get(clip.accent, clip.accent))
        for clip in clips
    ]
    language = common_voice(tmp_path, clips, 17)
    for accents in (
        "australia,england,indian",
        "au=Australian English|Strine,en=england english,in=India*",
        "au=australia,en=England*,in=India and South Asia (India, Pakistan, Sri Lanka)",
    ):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        result = prepare(language, tmp_path / "data", "--accents", accents).ok()
        assert "kept 64, dropped 0" in result.out, accents
    assert set(DataDir.read(tmp_path / "data" / "train").utt2client.values()) == {"au", "en", "in"}


# --- order, seed, names --------------------------------------------------------------------------


def test_same_bytes_in_any_order_of_rows(tmp_path):
    language = common_voice(tmp_path, some_clips(8, 3))
    prepare(language, tmp_path / "a", "--accents", ACCENTS).ok()
    table = language / "validated.tsv"
    header, *rows = table.read_text().splitlines()
    random.Random(1).shuffle(rows)
    table.write_text("\r\n".join(["\ufeff" + header, *rows]) + "\r\n")
    prepare(language, tmp_path / "b", "--accents", ACCENTS).ok()
    assert content(tmp_path / "b") == content(tmp_path / "a")


def test_ids_keep_clients_together_and_grow_where_speakers_collide(tmp_path):
    clips = some_clips(4, 12)
    twin = clips[0].speaker[:10] + "0" * 118
    clips += [replace(clip, speaker=twin, number=clip.number + 5000) for clip in clips[:3]]
    language = common_voice(tmp_path, clips)
    prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    speakers = set.union(*speakers_of(tmp_path / "data").values())
    assert {f"au-{twin[:12]}", f"au-{clips[0].speaker[:12]}"} <= speakers
    assert len(speakers) == 17
    data = DataDir.read(tmp_path / "data" / "train")
    order = [data.utt2client[utterance] for utterance in data.utterances]
    assert [
        client for client, after in zip(order, [*order[1:], ""], strict=True) if client != after
    ] == ["au", "en", "in"]
    assert all(re.fullmatch(r"(au|en|in)-[0-9a-f]{8,12}-\d{4}", name) for name in data.utterances)


# --- dropped clips -------------------------------------------------------------------------------

TRAPS = [
    ({"accent": ""}, "no accent"),
    ({"accent": "us|england"}, "several accents"),
    ({"accent": "England English,Scottish English"}, "several accents"),
    ({"audio": "missing"}, "missing clip"),
    ({"audio": "empty"}, "clip of zero bytes"),
    ({"audio": "damaged"}, "unreadable clip"),
    ({"sentence": "..."}, "empty text"),
    ({"sentence": "'"}, "empty text"),
    ({"sentence": "In 1999 it rained."}, "digits"),
    ({"sentence": "It costs \u00bd a pound."}, "digits"),
    ({"sentence": "Salt & pepper."}, "symbols"),
    ({"sentence": "Two \u20ac."}, "symbols"),
    ({"sentence": "\u041f\u0440\u0438\u0432\u0435\u0442."}, "letters outside a-z"),
    ({"path": "../../secret.mp3"}, "not the name of a clip"),
    ({"path": "/etc/passwd"}, "not the name of a clip"),
    ({"path": ".."}, "not the name of a clip"),
    ({"path": "common_voice_en_1000.mp3"}, "clip named twice"),
    ({"speaker": ""}, "malformed line"),
    ({"sentence": "one\tcell too many"}, "malformed line"),
]


@pytest.mark.parametrize("durations", [True, False])
def test_every_fault_is_dropped_and_counted(tmp_path, durations):
    clips = some_clips()
    expected: dict[str, int] = {}
    for number, (fault, reason) in enumerate(TRAPS):
        who = Clip(speaker_id("england 1"), 2000 + number, accent="england", gender="female")
        clips.append(replace(who, **fault))
        expected[reason] = expected.get(reason, 0) + 1
    language = common_voice(tmp_path, clips, durations=durations)
    (tmp_path / "secret.mp3").write_bytes(b"secret")
    with open(language / "validated.tsv", "ab") as file:
        file.write(b"too\tshort\n" + "\t".join(["x"] * 13).encode() + b"\xff\n")
    expected["malformed line"] += 2
    result = prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    last = result.out.splitlines()[-1]
    assert last.startswith(f"kept 32, dropped {sum(expected.values())} (")
    counts = dict(re.findall(r"([a-z][a-z -]+): (\d+)", last))
    assert {reason: int(count) for reason, count in counts.items()} == expected


def test_text_is_lower_case_words(tmp_path):
    spoken = {
        '"So it is, they said': "so it is they said",
        "It\u2019s Ben\u2019s \u2018cat\u2019!": "it's ben's cat",
        "Caf\u00e9\u2014au lait\u2026 well-known": "cafe au lait well known",
        " a  double\u00a0blank ": "a double blank",
    }
    clips = some_clips(3, 1)
    for number, sentence in enumerate(spoken):
        clips[number] = replace(clips[number], sentence=sentence)
    language = common_voice(tmp_path, clips)
    prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    assert set(spoken.values()) <= set(texts_of(tmp_path / "data"))


# A locale in the table (release 8) or none (5), the folder's name, --language: which has priority.
# Codes that YAML or a table of numbers would take for another value are in it, too.
@pytest.mark.parametrize(
    ("release", "locale", "name", "options", "language"),
    [
        (8, "de", "en", [], "de"),
        (8, "de", "clips of mine", ["--language", "en"], "de"),
        (8, "", "de", ["--language", "en"], "de"),
        (8, "", "en", ["--language", "deu"], "en"),
        (8, "xx", "de", [], "de"),
        (8, "xx", "en", ["--language", "de"], "en"),
        (8, "", "nan", [], "nan"),
        (8, "nan-tw", "en", [], "nan-tw"),
        (8, "no", "en", [], "no"),
        (8, "", "my-clips", ["--language", "qqq"], "qqq"),
        (8, "", "cv-corpus", ["--language", "de"], "de"),
        (5, "de", "de", [], "de"),
        (5, "", "mine", ["--language", "sv-SE"], "sv-SE"),
        (5, "", "en", [], "en"),
    ],
)
def test_the_language_is_the_locale_or_the_folder_or_the_option(
    tmp_path, release, locale, name, options, language
):
    clips = [
        replace(clip, sentence="Scho\u0308n \u2013 wu\u0308rden!", locale=locale)
        for clip in some_clips(3, 1)
    ]
    corpus = common_voice(tmp_path, clips, release, name=name)
    out = tmp_path / "data"
    same = ("--common-sentences", "keep")
    result = prepare(corpus, out, "--accents", ACCENTS, *same, *options).ok()
    assert set(texts_of(out)) == {"schon wurden" if language == "en" else "sch\u00f6n w\u00fcrden"}
    for part in SETS:
        assert set(DataDir.read(out / part).others["utt2lang"].values()) == {language}
        validate_data_dir(out / part, feats=False)
    unknown = "--language qqq is not the code of a known language"
    assert (unknown in result.err) == (language == "qqq")
    said = "the locale of 12 rows, such as 'xx', is not a known language: they are treated as "
    said += language
    assert (said in result.err) == (locale == "xx")
    asked = options[1:] not in ([], [language])
    told = f"--language {options[1]} is not that of all rows: 12 are {language}" if asked else ""
    assert told in result.err and asked == ("is not that of all rows" in result.err)
    # Letters and marks first, then the most frequent symbols.
    rows = (out / "left_out.tsv").read_text().splitlines()
    marks = ["\u25cc\u0308\tU+0308\tcombining diaeresis\t24"] if language == "en" else []
    dashes = ["!\tU+0021\texclamation mark\t12", "\u2013\tU+2013\ten dash\t12"]
    assert rows == ["character\tcode\tname\tcount", *marks, *dashes]
    assert f"left out of the sentences: {len(rows) - 1} characters, " in result.out


def test_without_a_language_the_option_is_asked_for(tmp_path):
    corpus = common_voice(tmp_path, some_clips(3, 1), 5, name="mine")
    command = [corpus, tmp_path / "data", "--accents", ACCENTS]
    prepare(*command).fails(1, "mine: neither a locale", "give --language, as in --language de")
    clips = [replace(clip, locale="xx") for clip in some_clips(3, 1)]
    for name in ("my-clips", "xx", "raw", "cv-corpus", "de-small"):
        corpus = common_voice(tmp_path / name, clips, 8, name=name)
        said = f"{name}: neither a locale", "'xx' is not the code of a known language"
        prepare(corpus, tmp_path / "data", "--accents", ACCENTS).fails(1, *said)
    assert not (tmp_path / "data").exists()


def test_min_nan_is_scored_by_character_to_the_end(tmp_path):
    clips = [replace(clip, sentence="知影 (tsai) 矣。", locale="nan") for clip in some_clips(3, 1)]
    corpus = common_voice(tmp_path, clips, 8, name="nan")
    out = tmp_path / "data"
    options = ("--accents", ACCENTS, "--common-sentences", "keep")
    prepare(corpus, out, *options).ok()
    assert set(texts_of(out)) == {"知影 矣"}
    for hypothesis, rate in (("知影矣", "0.00"), ("知影", "33.33")):
        rows = DataDir.read(out / "test").text
        (tmp_path / "hyp").write_text("".join(f"{name} {hypothesis}\n" for name in rows))
        inside("score", out / "test", tmp_path / "hyp", tmp_path / "scored").ok()
        total = read_tsv(tmp_path / "scored" / "wer.tsv", None)[-1]
        assert (total["cer"], total["characters"]) == (rate, str(3 * len(rows)))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["validated.tsv", "clip_durations.tsv"])
def test_a_table_of_another_encoding_is_named(tmp_path, encoding, name):
    language = common_voice(tmp_path, some_clips(3, 1), durations=True)
    table = language / name
    table.write_bytes(table.read_text().encode(encoding))
    said = f"{name}:1: {encoding.upper()}, not UTF-8", f"iconv -f {encoding.upper()} -t UTF-8"
    prepare(language, tmp_path / "data", "--accents", ACCENTS).fails(1, *said)
    assert not (tmp_path / "data").exists()


def test_rows_that_are_not_utf_8_are_named_by_line(tmp_path):
    language = common_voice(tmp_path, some_clips(8, 2))
    table = language / "validated.tsv"
    header, *rows = table.read_bytes().splitlines(keepends=True)
    bad = {3, 7, 8}
    lines = [row.replace(b"\n", b"\xe9\n") if n in bad else row for n, row in enumerate(rows, 2)]
    table.write_bytes(b"".join([header, *lines]))
    result = prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    named = [int(n) for n in re.findall(r"validated\.tsv:(\d+): not UTF-8", result.err)]
    assert named == sorted(bad) and "more rows" not in result.err
    assert "dropped 3 (malformed line: 3)" in result.out
    lines = [row.replace(b"\n", b"\xe9\n") if n < 10 else row for n, row in enumerate(rows, 2)]
    table.write_bytes(b"".join([header, *lines]))
    result = prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    named = re.findall(r"validated\.tsv:(\d+): not UTF-8", result.err)
    assert named == list("23456") and "3 more rows are not UTF-8" in result.err


def test_speakers_with_two_accents_go_and_two_genders_are_left_open(tmp_path):
    clips = some_clips(5)
    clips.append(replace(clips[0], number=3000, accent="england"))
    clips.append(replace(clips[-2], number=3001, accent="scotland"))
    clips.append(replace(clips[10], number=3002, gender="female"))
    clips.append(replace(clips[12], number=3003, accent="", gender="other"))
    language = common_voice(tmp_path, clips)
    result = prepare(language, tmp_path / "data", "--accents", ACCENTS).ok()
    reasons = "contradictory accents of one speaker: 6, no accent: 1"
    assert f"kept {len(clips) - 7}, dropped 7 ({reasons})" in result.out
    assert "1 speakers with two genders" in result.err
    speakers = set.union(*speakers_of(tmp_path / "data").values())
    named = {
        line.split()[0]
        for name in SETS
        for line in (tmp_path / "data" / name / "spk2gender").open()
    }
    silent = {f"{name}-{speaker_id(f'{accent} 2')[:8]}" for name, accent in
              (("au", "australia"), ("en", "england"), ("in", "indian"), ("us", "us"))}  # fmt: skip
    assert speakers - named == {f"en-{clips[10].speaker[:8]}"} | silent


def test_without_a_usable_clip_nothing_is_written(tmp_path):
    language = common_voice(tmp_path, some_clips())
    shutil.rmtree(language / "clips")
    command = [language, tmp_path / "data", "--accents", ACCENTS]
    prepare(*command).fails(1, "en/clips: no such folder; unpack the audio")
    (language / "clips").mkdir()
    prepare(*command).fails(1, "usable clips of 0 speakers")
    assert not (tmp_path / "data").exists()


# --- choice of speakers --------------------------------------------------------------------------


def test_hours_are_kept_and_no_speaker_makes_up_a_set(tmp_path):
    clips = [
        replace(clip, seconds=60.0 if index % 40 else 3000.0)
        for index, clip in enumerate(some_clips(40, 3))
    ]
    language = common_voice(tmp_path, clips)
    out = tmp_path / "data"
    hours = ["--hours", "3,0.6,0.6", "--server-hours", "1,0.2,0.2"]
    result = prepare(language, out, "--accents", ACCENTS, *hours).ok()
    assert "beyond the hours asked for" in result.out and "all there is" not in result.out
    for name, asked in zip(SETS, [3, 0.6, 0.6, 1, 0.2, 0.2], strict=True):
        data = DataDir.read(out / name)
        length = {utterance: float(seconds) / 3600 for utterance, seconds in data.utt2dur.items()}
        clients = set(data.utt2client.values()) or {"server"}
        for client in clients:
            got = sum(length[u] for u in length if data.utt2client.get(u, "server") == client)
            assert got == pytest.approx(asked / len(clients), abs=0.03)
        if "train" not in name:
            assert max(length.values()) < 0.1


def test_the_server_gets_chosen_accents_or_a_fraction_of_the_speakers(tmp_path):
    accents = ("australia", "england", "indian", "us", "scotland", "Klingon (Q, o)")
    language = common_voice(tmp_path, some_clips(10, 1, accents))
    command = [language, tmp_path / "data", "--accents", ACCENTS]
    prepare(*command).ok()
    prefixes = {who.split("-")[0] for who in speakers_of(tmp_path / "data")["server_train"]}
    assert prefixes <= {"us", "scotland", "klingon_q_o"} and len(prefixes) > 1
    result = prepare(*command, "--server", "sco=Scot*").ok()
    assert "accent not asked for: 20" in result.out
    assert speakers_of(tmp_path / "data")["server_train"] < {
        f"sco-{speaker_id(f'scotland {n}')[:8]}" for n in range(10)
    }
    result = prepare(*command, "--server-fraction", "0.4").ok()
    assert "kept 30, dropped 30 (accent not asked for: 30)" in result.out
    speakers = speakers_of(tmp_path / "data")
    assert all(not a & b for a, b in combinations(speakers.values(), 2))
    server = set.union(*(speakers[name] for name in SETS[3:]))
    assert sorted(who.split("-")[0] for who in server) == ["au"] * 4 + ["en"] * 4 + ["in"] * 4


def test_without_other_accents_the_remedy_is_told(tmp_path):
    language = common_voice(tmp_path, some_clips(accents=("Child English", "Adult English")))
    command = [language, tmp_path / "data", "--accents", "Child English,Adult English"]
    prepare(*command).fails(1, "no speaker of another accent", "--server-fraction 0.4")
    prepare(*command, "--server-fraction", "0.5").fails(1, "'child_english' has usable clips of 2")
    assert not (tmp_path / "data").exists()


# --- bad input ----------------------------------------------------------------------------------


def test_bad_input_is_told_in_one_line(tmp_path):
    language = common_voice(tmp_path, some_clips())
    out = tmp_path / "data"
    accents = "au=australia,zz=Klingon"
    said = "validated.tsv: no row has the accent 'zz'; accents there: australian english (8)"
    prepare(language, out, "--accents", accents).fails(1, said)
    overlapping = "a=australia,b=Austral*"
    prepare(language, out, "--accents", overlapping).fails(1, "matched by 'a' and by 'b'")
    durations = language / "clip_durations.tsv"
    told = durations.read_text()
    for number in ("long", "nan", "inf"):
        durations.write_text(told.replace("\t576\n", f"\t{number}\n", 1))
        said = f"clip_durations.tsv:2: {number!r} is not a number"
        prepare(language, out, "--accents", ACCENTS).fails(1, said)
    shutil.copytree(language, language.parent / "de")
    prepare(language.parent, out, "--accents", ACCENTS).fails(1, "several languages: de, en")
    table = language / "validated.tsv"
    table.write_text(table.read_text().replace("accents", "akzente"))
    prepare(language, out, "--accents", ACCENTS).fails(1, "validated.tsv:1: no column 'accents'")
    table.write_text(table.read_text().replace("sentence\t", "satz\t"))
    prepare(language, out, "--accents", ACCENTS).fails(1, "validated.tsv:1: no column 'sentence'")
    table.write_bytes(b"\x1f\x8b\x08\x00\x00" * 99)
    prepare(language, out, "--accents", ACCENTS).fails(1, "validated.tsv")
    assert not out.exists()


@pytest.mark.parametrize("accent", ["Казахский", "Færøysk", "中国", "Đồng Nai"])
def test_an_accent_that_names_cannot_spell_wants_a_name(tmp_path, accent):
    clips = [replace(clip, accent=accent) for clip in some_clips(3, 1)]
    # The same letters in another form of Unicode are the same accent.
    typed = unicodedata.normalize("NFD", accent)
    language = common_voice(tmp_path, clips)
    command = (language, tmp_path / "data", "--server-fraction", "0.4", "--accents")
    prepare(*command, accent).fails(2, f"give it one, as in NAME={accent}")
    prepare(*command, f"Süd={accent}").fails(
        2, f"a name is letters a-z, digits and '_', as in x={accent}"
    )
    prepare(*command, f"home={typed}", "--common-sentences", "keep").ok()
    assert set(DataDir.read(tmp_path / "data" / "train").utt2client.values()) == {"home"}


# --- parsers -------------------------------------------------------------------------------------


choose, corpus, mini = scripts.load("commonvoice", "choose", "corpus", "mini")


@given(st.lists(st.tuples(st.text("abc ", min_size=1), st.text("ab,| ")), min_size=1))
def test_separators_in_parentheses_belong_to_the_accent(parts):
    accents = [f"x{name}({inside})" for name, inside in parts]
    assert corpus.separate("|".join(accents), ",|") == accents
    assert corpus.separate(",".join(accents), ",|") == accents


# --- the mini corpus -----------------------------------------------------------------------------


def test_mini_corpus_prepares(tmp_path, tmp_path_factory):
    whole = prepared.mini_corpus("commonvoice", tmp_path_factory)
    # As in real releases: a tag, and no Info frame.
    for clip in (whole / "en" / "clips").iterdir():
        assert clip.read_bytes()[:3] == b"ID3" and b"Info" not in clip.read_bytes()
    out = tmp_path / "data"
    hours = ["--hours", "6,2,2", "--server-hours", "24,3,3"]
    result = prepare(whole, out, "--accents", ACCENTS, *hours).ok()
    assert "kept 178, dropped 0" in result.out
    assert len(texts_of(out)) == len(set(texts_of(out))) == 178
    sizes = {name: len(DataDir.read(out / name).text) for name in SETS}
    assert sizes["valid"] >= 3 and sizes["test"] >= 3 and sum(sizes.values()) == 178


def test_two_synthesisers_of_a_process_speak_alike():
    pytest.importorskip("espeakng_loader")
    (voices,) = scripts.load("commonvoice", "voices")
    speaker = voices.make_speaker("us", 0, 0)
    first = voices.Synthesiser()
    alone = first.speak("an empty kitchen", speaker, "key").tobytes()
    second = voices.Synthesiser()
    for each in (second, first):
        assert each.speak("an empty kitchen", speaker, "key").tobytes() == alone


def test_a_mini_corpus_for_tests_has_so_many_speakers_who_are_tested_on():
    """README's command gives these seconds of words, approximately; by prepare.py's own rule."""
    plan = mini.plan(0, 40, 60)
    drawn, said = random.Random(0), Counter(clip.speaker.client_id for clip in plan)
    accents = Counter({clip.speaker.client_id: clip.speaker.accent.text for clip in plan}.values())
    clients = [accent for accent, count in accents.items() if count == 78]
    assert len(clients) == 3
    for accent in clients:
        own = [clip for clip in plan if clip.speaker.accent.text == accent]
        assert Counter(said[who] for who in {clip.speaker.client_id for clip in own}) == {
            40: 6,
            15: 72,
        }
        rows = [
            corpus.Row(clip.name, clip.speaker.client_id, clip.sentence, (accent,), "")
            for clip in own
        ]
        for row in rows:
            row.seconds = len(row.sentence.split()) * drawn.uniform(0.3, 0.5)
        speakers = choose.by_speaker(rows, 0)
        sets = choose.hold_out(accent, speakers, [16, 12, 60], Counter(), 0.02)
        valid, test = ({row.speaker for row in rows} for rows in sets[:2])
        assert len(test) in (59, 60, 61) and len(valid) in (11, 12, 13)
        # The speakers with the most speech, and the remaining ones.
        assert {who for who, count in said.items() if count == 40} & (valid | test) == set()
        assert len(speakers) == 78 - len(valid) - len(test)
    assert len({clip.sentence for clip in plan}) == len(plan)
