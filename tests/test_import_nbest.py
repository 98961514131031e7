"""N-best lists of Kaldi and ESPnet: files in these toolkits' formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import inside

from fedtools.data.nbest import Hypothesis, read_nbest

# Text form of copy-feats and similar tools: two blanks after the key, sorted by key.
AC = "a-b-1  120.5\na-b-10  131\na-b-2  121.25\nc-1  1e+02\n"
LM = "a-b-1  20\na-b-10  20.125\na-b-2  21.5 \nc-1  0\n"
# utils/int2sym.pl leaves a blank after an utterance without words.
WORDS = "a-b-1 hello world\na-b-10 hello\na-b-2 hello  word \nc-1 \n"
REST = [f"a-b-{rank}" for rank in range(3, 10)]


def kaldi(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"ac_cost": AC, "lm_cost": LM, "words_text": WORDS} | files
    for name, text in given.items():
        if name not in files:
            text += "".join(f"{key} {'hi' if name == 'words_text' else 9}\n" for key in REST)
        (folder / name).write_text(text)
    return folder


def test_kaldi(cli, tmp_path):
    source = kaldi(tmp_path / "k")
    done = cli("import-nbest", "kaldi", source, tmp_path / "out").ok()
    assert done.out == f"{tmp_path / 'out' / 'nbest.tsv'}: 2 utterances\n"
    found = read_nbest(tmp_path / "out" / "nbest.tsv")
    assert list(found) == ["a-b", "c"]
    assert [one.rank for one in found["a-b"]] == list(range(1, 11))
    assert found["a-b"][0] == Hypothesis(1, -120.5, -20.0, "hello world")
    assert found["a-b"][1] == Hypothesis(2, -121.25, -21.5, "hello word")
    assert found["a-b"][9] == Hypothesis(10, -131.0, -20.125, "hello")
    assert found["c"] == [Hypothesis(1, -100.0, -0.0, "")]
    cli("import-nbest", "kaldi", source, tmp_path / "out", "--acoustic-scale", "0.1").ok()
    scaled = read_nbest(tmp_path / "out" / "nbest.tsv")["a-b"][0]
    assert (scaled.acoustic, scaled.lm) == (pytest.approx(-12.05), -20.0)
    for scale in ("0", "-1", "nan", "inf"):
        words = ("import-nbest", "kaldi", source, tmp_path / "out", "--acoustic-scale", scale)
        cli(*words).fails(2, "over 0")


def test_kaldis_jobs_are_joined(tmp_path):
    for job in (10, 2, 1):
        one = {"ac_cost": f"u{job}-1 {job}\n", "lm_cost": f"u{job}-1 2\n"}
        kaldi(tmp_path / f"archives.{job}", **one, words_text=f"u{job}-1 w{job}\n")
    inside("import-nbest", "kaldi", tmp_path, tmp_path / "out").ok()
    found = read_nbest(tmp_path / "out" / "nbest.tsv")
    assert found == {f"u{job}": [Hypothesis(1, -job, -2, f"w{job}")] for job in (1, 10, 2)}
    kaldi(tmp_path / "archives.3", ac_cost="u2-1 1\n", lm_cost="u2-1 1\n", words_text="u2-1 w\n")
    inside("import-nbest", "kaldi", tmp_path, tmp_path / "out").fails(
        1, "archives.3/words_text:1: 'u2-1' is in an earlier folder"
    )


THREE = ("ac_cost", "lm_cost", "words_text")


@pytest.mark.parametrize(
    "files, said",
    [
        ({"ac_cost": "u-1 1\n"}, "ac_cost: 'a-b-1' is missing (12 differ)"),
        ({"lm_cost": LM}, "lm_cost: 'a-b-3' is missing (7 differ)"),
        (
            dict.fromkeys(THREE, "u-2 1\n"),
            "rank 1 of 'u' is missing",
        ),
        (
            dict.fromkeys(THREE, "u 1\n"),
            "words_text:1: 'u' is not <",
        ),
        (dict.fromkeys(THREE, "u-0 1\n"), "'u-0' is not <"),
        (dict.fromkeys(THREE, "u-1 x\n"), "ac_cost:1: score 'x'"),
        (dict.fromkeys(THREE, "u-1 nan\n"), "score 'nan'"),
        (dict.fromkeys(THREE, "u-1\n"), "score ''"),
        (dict.fromkeys(THREE, "u-1 1\nu-1 2\n"), ":2: 'u-1' is duplicated"),
        (dict.fromkeys(THREE, "u-1 1\n\n"), ":2: an empty line"),
        (dict.fromkeys(THREE, "../u-1 1\n"), "words_text:1: utterance '../u' is n"),
        (dict.fromkeys(THREE, "a-1 1\nu:v-1 1\n"), "words_text:2: utterance 'u:v' is not usable"),
        (dict.fromkeys(THREE, "a-1 1\n" + "u" * 201 + "-1 1\n"), "words_text:2: utterance 'uuu"),
        (dict.fromkeys(THREE, "a-1 1\nu-1 1\nu-3 1\n"), "words_text:3: rank 2 of 'u' is missing"),
        (dict.fromkeys(THREE, "a-1 1\nu-1 \0\n"), "words_text:2: a NUL byte"),
        (dict.fromkeys(THREE, ""), "no hypotheses"),
    ],
)
def test_what_kaldi_did_not_write_is_told(cli, tmp_path, files, said):
    cli("import-nbest", "kaldi", kaldi(tmp_path / "k", **files), tmp_path).fails(1, said)
    assert not (tmp_path / "nbest.tsv").exists()


def test_missing_files_are_told(cli, tmp_path):
    cli("import-nbest", "kaldi", tmp_path, tmp_path / "out").fails(1, "no words_text")
    (kaldi(tmp_path / "k") / "lm_cost").unlink()
    cli("import-nbest", "kaldi", tmp_path / "k", tmp_path / "out").fails(1, "lm_cost: cannot be re")
    cli("import-nbest", "espnet", tmp_path, tmp_path / "out").fails(1, "no 1best_recog/text")
    cli("import-nbest", "htk", tmp_path, tmp_path / "out").fails(2, "htk")


def espnet(folder: Path, rank: int, text: str, score: str) -> None:
    """Write the files that asr_inference writes for one rank."""
    place = folder / f"{rank}best_recog"
    place.mkdir(parents=True)
    (place / "text").write_text(text)
    (place / "score").write_text(score)
    (place / "token").write_text("b t o k\na t o k\n")


def test_espnet(cli, tmp_path):
    scores = "b tensor(-3.25)\na tensor(-1.5e1, device='cuda:0')\n"
    espnet(tmp_path / "dec", 1, "b hi there\na one\n", scores)
    espnet(tmp_path / "dec", 2, "a two\n", "a -16.5\n")
    espnet(tmp_path / "dec", 10, "", "")
    for rank in range(3, 10):
        # An utterance without a hypothesis has no words.
        espnet(tmp_path / "dec", rank, "a \n", f"a {-20 - rank}\n")
    cli("import-nbest", "espnet", tmp_path / "dec", tmp_path / "out").ok()
    found = read_nbest(tmp_path / "out" / "nbest.tsv")
    assert found["b"] == [Hypothesis(1, -3.25, 0.0, "hi there")]
    assert found["a"][:3] == [
        Hypothesis(1, -15.0, 0.0, "one"),
        Hypothesis(2, -16.5, 0.0, "two"),
        Hypothesis(3, -23.0, 0.0, ""),
    ]
    assert len(found["a"]) == 9


@pytest.mark.parametrize("inner", ["", "logdir"])
def test_espnets_jobs_are_joined(cli, tmp_path, inner):
    for job in (1, 2):
        place = tmp_path / "dec" / inner / f"output.{job}"
        espnet(place, 1, f"u{job} w\n", f"u{job} {-job}\n")
    cli("import-nbest", "espnet", tmp_path / "dec", tmp_path / "out").ok()
    found = read_nbest(tmp_path / "out" / "nbest.tsv")
    assert found == {f"u{job}": [Hypothesis(1, -job, 0.0, "w")] for job in (1, 2)}
    espnet(tmp_path / "dec" / inner / "output.3", 1, "u2 w\n", "u2 -1\n")
    cli("import-nbest", "espnet", tmp_path / "dec", tmp_path / "out").fails(1, "in an earlier job")


@pytest.mark.parametrize(
    "text, score, said",
    [
        ("a x\nb y\n", "a 1\n", "1best_recog/score: 'b' is missing"),
        ("a x\n", "a 1\nb 2\n", "1best_recog/text: 'b' is missing"),
        ("a x\n", "a tensor(-inf)\n", "score 'tensor(-inf)'"),
        ("a x\n", "a tensor([1.0])\n", "score:1: score 'tensor([1.0])'"),
        ("a x\na y\n", "a 1\n", "text:2: 'a' is duplicated"),
        ("a x", "a 1\n", "the last line has no end"),
        ("a x\nü y\n", "ü 1\na 1\n", "1best_recog/text:2: utterance 'ü' is not usable as an id"),
        ("a x\nu/v y\n", "a 1\nu/v 1\n", "1best_recog/text:2: utterance 'u/v' is not usable"),
    ],
)
def test_what_espnet_did_not_write_is_told(cli, tmp_path, text, score, said):
    espnet(tmp_path / "dec", 1, text, score)
    cli("import-nbest", "espnet", tmp_path / "dec", tmp_path / "out").fails(1, said)


def test_a_gap_between_ranks_is_told(cli, tmp_path):
    espnet(tmp_path / "dec", 1, "a x\n", "a -1\n")
    espnet(tmp_path / "dec", 3, "a y\n", "a -2\n")
    said = "dec/3best_recog/text:1: rank 2 of 'a' is missing"
    cli("import-nbest", "espnet", tmp_path / "dec", tmp_path / "out").fails(1, said)


def test_a_score_that_the_scale_makes_infinite_is_told(cli, tmp_path):
    files = {"ac_cost": "a-1 1\nu-1 -1e308\n", **dict.fromkeys(THREE[1:], "a-1 1\nu-1 1\n")}
    words = ("import-nbest", "kaldi", kaldi(tmp_path / "k", **files), tmp_path)
    cli(*words).ok()
    cli(*words, "--acoustic-scale", "10").fails(1, "ac_cost:2: score '-1e308' times 10 is not")


# Options of --normalise, --language, words, and the expected output.
CASES = [
    ("upper", "", "straße çağ <unk> <UNK>", "STRAßE ÇAĞ <unk> <unk>"),
    ("upper", "de", "Straße e\u0301", "STRAßE \u00c9"),
    ("lower", "de", "STRAẞE STRASSE <Unk>", "straße strasse <unk>"),
    ("upper", "tr", "ışık iyi i\u0307", "IŞIK İYİ İ"),
    ("lower", "tr", "IŞIK İYİ I\u0307", "ışık iyi i"),
    ("lower", "tur", "IŞIK", "ışık"),
    ("lower", "", "IŞIK İYİ", "işik iyi"),
    ("lower", "el", "ΟΔΟΣ ΣΑΣ", "οδος σας"),
    ("upper", "", "\ufb01n ŉa ǰ", "\ufb01N ŉA ǰ"),
]


@pytest.mark.parametrize(("case", "language", "words", "written"), CASES)
def test_the_case_is_by_the_rules_of_the_language(cli, tmp_path, case, language, words, written):
    kaldi(tmp_path / "k", **dict.fromkeys(THREE[:2], "u-1 1\n"), words_text=f"u-1 {words}\n")
    espnet(tmp_path / "e", 1, f"u {words}\n", "u -1\n")
    options = ("--normalise", case, *(("--language", language) if language else ()))
    for form, source in (("kaldi", "k"), ("espnet", "e")):
        cli("import-nbest", form, tmp_path / source, tmp_path / "out", *options).ok()
        assert read_nbest(tmp_path / "out" / "nbest.tsv")["u"][0].words == written


def test_without_normalise_words_stay_as_they_are(cli, tmp_path):
    espnet(tmp_path / "e", 1, "u IŞIK e\u0301 <UNK>\n", "u -1\n")
    cli("import-nbest", "espnet", tmp_path / "e", tmp_path / "out").ok()
    assert read_nbest(tmp_path / "out" / "nbest.tsv")["u"][0].words == "IŞIK e\u0301 <UNK>"
    command = ("import-nbest", "espnet", tmp_path / "e", tmp_path / "out", "--language")
    cli(*command, "tr").fails(2, "needs --normalise")
    cli(*command, "xx", "--normalise", "lower").fails(2, "'xx' is not the code of a known")


@pytest.mark.parametrize("word", ["<s>", "</s>", "<S>", "<blank>", "<space>", "<sos/eos>", "#0"])
def test_reserved_words_are_told_by_the_sources_line(cli, tmp_path, word):
    files = dict.fromkeys(THREE[:2], "a-1 1\nb-1 1\n")
    kaldi(tmp_path / "k", **files, words_text=f"a-1 x\nb-1 x {word} y\n")
    espnet(tmp_path / "e", 1, f"a x\nb {word}\n", "a -1\nb -1\n")
    for form, place in (("kaldi", "k/words_text:2"), ("espnet", "e/1best_recog/text:2")):
        done = cli("import-nbest", form, tmp_path / place[0], tmp_path / "out")
        done.fails(1, f"{place}: the word {word} is reserved")
    assert not (tmp_path / "out").exists()


def test_other_encodings_are_told_by_the_sources_line(cli, tmp_path):
    files = dict.fromkeys(THREE[:2], "a-1 1\nb-1 1\n")
    source = kaldi(tmp_path / "k", **files, words_text="")
    for raw, said in (
        ("a-1 é\nb-1 é\n".encode("utf-16"), "words_text:1: UTF-16, not UTF-8"),
        (b"a-1 x\nb-1 \xe9\n", "words_text:2: not UTF-8"),
    ):
        (source / "words_text").write_bytes(raw)
        cli("import-nbest", "kaldi", source, tmp_path / "out").fails(1, said)
