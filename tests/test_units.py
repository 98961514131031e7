"""Units of error rates: characters where a language is written without spaces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import inside, run
from reported import arguments, make_experiment, markdown_row
from scored import SCTK, needs_sclite, write_data

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.data.datadir import write_table
from fedtools.data.nbest import Hypothesis, write_nbest
from fedtools.data.symbols import RESERVED
from fedtools.data.text_units import CHARACTER, WORD, read_text_unit, text_unit_of
from fedtools.data.trn import characters, words

# Reference, hypothesis, and their errors by hand: Thai vowels and signs count singly.
THAI = [
    ("สวัสดีครับ", "สวัสดี ครับ", 0),
    ("น้ำ ใจ", "นำใจ", 1),
    ("กก ขข คค", "", 6),
    ("ab ก", "AB ข", 1),
]
LENGTH = 10 + 5 + 6 + 3


def thai(folder: Path, language: str = "th") -> tuple[Path, Path]:
    rows = [(f"s{n % 2}-{n}", f"s{n % 2}", "c", *pair[:2]) for n, pair in enumerate(THAI)]
    data, hyp = write_data(folder, rows)
    write_table(data / "utt2lang", dict.fromkeys((row[0] for row in rows), language))
    return data, hyp


def test_a_data_directory_says_what_is_counted(tmp_path):
    data, _ = thai(tmp_path)
    assert read_text_unit(data) is CHARACTER
    for language, unit in (("zh-HK", CHARACTER), ("nan-tw", CHARACTER), ("en", WORD), ("xx", WORD)):
        assert text_unit_of({"a": language, "b": language}, data) is unit
    (data / "utt2lang").unlink()
    assert read_text_unit(data) is WORD
    with pytest.raises(UserError, match="'de' is written with spaces, 'ja' without"):
        text_unit_of({"a": "de", "b": "ja"}, data)
    # The parts of a data directory keep it.
    data, _ = thai(tmp_path / "again")
    inside("subset-data", data, tmp_path / "part", "--speakers", "1").ok()
    assert read_text_unit(tmp_path / "part") is CHARACTER


def test_characters_are_code_points_of_nfc_without_spaces():
    assert CHARACTER.cut("cafe\u0301  a") == list("caf\u00e9a")
    assert CHARACTER.cut("\u0e19\u0e49\u0e33") == ["\u0e19", "\u0e49", "\u0e33"]
    assert CHARACTER.cut(" ") == [] and WORD.cut("a b ") == ["a", "b"]


def test_a_symbol_is_one_character():
    assert CHARACTER.cut("我<unk>你 <UNK>") == ["我", "<unk>", "你", "<UNK>"]
    assert CHARACTER.cut("<unk><unk>a") == ["<unk>", "<unk>", "a"]
    for symbol in RESERVED[:-1]:
        assert CHARACTER.cut(f"ก{symbol}ข") == ["ก", symbol, "ข"]
    # Characters in none of them are spelled out.
    assert CHARACTER.cut("<unk") == list("<unk") and CHARACTER.cut("<x>") == list("<x>")
    assert characters("a <unk>b") == ["a", "<space>", "<unk>", "b"]
    assert words("a <unk>b") == ["a", "<unk>b"]


@pytest.mark.parametrize(("language", "rate"), [("th", "cer"), ("de", "wer"), ("de", "cer")])
def test_symbols_and_forms_of_unicode_are_no_errors(cli, tmp_path, language, rate):
    """One unknown character or word at one place, and the same letters in two forms, are equal."""
    pairs = [
        ("<unk> é", "<UNK> e\u0301", 0),
        ("ab <unk>", "ab c", 1),
        ("が é", "か\u3099 e\u0301", 0),
    ]
    data, hyp = write_data(
        tmp_path, [(f"s-{n}", "s", "c", *pair[:2]) for n, pair in enumerate(pairs)]
    )
    write_table(data / "utt2lang", {f"s-{n}": language for n in range(len(pairs))})
    # By hand: units of the references; in the second, blanks between words are characters.
    total = {("th", "cer"): 2 + 3 + 2, ("de", "wer"): 6, ("de", "cer"): 3 + 4 + 3}[language, rate]
    cli("score", data, hyp, tmp_path / "out").ok()
    row = read_tsv(tmp_path / "out" / "wer.tsv", None)[-1]
    assert row[rate] == f"{100 / total:.2f}"
    cli("compare", data, hyp, data / "text", "--out", tmp_path / "compare.tsv").ok()
    row = read_tsv(tmp_path / "compare.tsv", None)[-1]
    main = "cer" if language == "th" else "wer"
    expected = f"{100 / {'th': 7, 'de': 6}[language]:.2f}"
    assert (row[f"{main}_a"], row[f"{main}_b"]) == (expected, "0.00")


@pytest.mark.parametrize("code", ["jp", "japanese", "xx"])
def test_a_code_that_is_not_known_counts_words_and_says_so(tmp_path, code):
    data, hyp = thai(tmp_path, code)
    done = inside("score", data, hyp, tmp_path / "out").ok()
    assert f"utt2lang: '{code}' is not the code of a known language" in done.err
    assert done.err.count("\n") == 1 and "WER" in done.out


@pytest.mark.parametrize("code", ["jpn", "cmn", "tha", "nan", "zho-TW"])
def test_codes_of_three_letters_are_those_of_two(tmp_path, code):
    data, hyp = thai(tmp_path, code)
    done = inside("score", data, hyp, tmp_path / "out").ok()
    assert done.out.startswith("CER by character") and not done.err


def test_score_counts_characters_alone(tmp_path):
    data, hyp = thai(tmp_path)
    said = inside("score", data, hyp, tmp_path / "out").ok().out
    assert said.startswith("CER by character, without spaces: the language is written without them")
    assert "WER" not in said and not (tmp_path / "out" / "score_wer").exists()
    total = read_tsv(tmp_path / "out" / "wer.tsv", None)[-1]
    assert not {"words", "wer"} & total.keys()
    assert total["characters"] == str(LENGTH)
    assert total["cer"] == f"{100 * sum(errors for *_, errors in THAI) / LENGTH:.2f}"


@needs_sclite
def test_sclite_counts_the_same_characters(tmp_path):
    """sclite's own character mode reads the unmodified texts."""
    data, hyp = thai(tmp_path)
    inside("score", data, hyp, tmp_path / "out").ok()
    total = read_tsv(tmp_path / "out" / "wer.tsv", None)[-1]
    for name, table in (("ref", data / "text"), ("hyp", hyp)):
        lines = (line.partition(" ") for line in table.read_text().splitlines())
        text = "".join(f"{words} ({utterance})\n" for utterance, _, words in lines)
        (tmp_path / f"{name}.trn").write_text(text)
    files = ("-r", "ref.trn", "trn", "-h", "hyp.trn", "trn", "-i", "rm", "-c", "-e", "utf-8")
    found = run(SCTK / "sclite", *files, "-o", "rsum", "stdout", cwd=tmp_path).ok().out
    cells = re.search(r"Sum\s*\|(.*)\|(.*)\|", found)
    assert cells, found
    counts = [*cells[1].split(), *cells[2].split()[1:4]]
    columns = ("utterances", "characters", "substitutions", "deletions", "insertions")
    assert counts == [total[column] for column in columns]


def test_compare_counts_characters(tmp_path):
    data, hyp = thai(tmp_path)
    out = tmp_path / "compare.tsv"
    said = inside("compare", data, data / "text", hyp, "--out", out).ok().out
    assert "CER by character" in said and "CER% B" in said and "WER" not in said
    total = read_tsv(out, None)[-1]
    assert (total["cer_a"], total["cer_b"]) == ("0.00", f"{100 * 8 / LENGTH:.2f}")


def test_tune_counts_characters(tmp_path):
    """The first list's only word is wrong, but most of its characters are right."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_text("a กขค\n")
    hypotheses = [Hypothesis(1, -2.0, -1.0, "กข"), Hypothesis(2, -1.0, -2.0, "ฃฅฆ")]
    write_nbest(tmp_path / "dec" / "nbest.tsv", [("a", hypotheses)])
    command = ["tune", tmp_path / "dec", tmp_path / "data", tmp_path / "w.yaml"]
    assert "lm_weight 0.0, word_score 0.0, WER 100.00 %" in inside(*command).ok().out
    (tmp_path / "data" / "utt2lang").write_text("a th\n")
    assert "lm_weight 1.0, word_score 0.0, CER 33.33 %" in inside(*command).ok().out


def test_the_report_says_what_is_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, hyp = thai(tmp_path / "data")
    for name, text in (("a", hyp), ("b", data / "text")):
        inside("score", data, text, tmp_path / name).ok()
    make_experiment(Path("exp"))
    more = ["--elsewhere", "elsewhere=b", "--plot", "wer.png", "--also", "another table=A=:a"]
    inside(*arguments(*more, A="exp:a", B=":b")).ok()
    page = Path("RESULTS.md").read_text()
    assert "WER" not in page
    assert "communication, computation and CER (%)** on 4 utterances, 24 characters, 2" in page
    assert "CER is by character, without spaces: the language is written without them." in page
    assert page.count("CER (%) with 95 % intervals** by bootstrap") == 1
    assert markdown_row(page, "A")[4:6] == ["33.3", "33.3"]
    assert "elsewhere: CER 0.0 % on 4 utterances, 24 characters" in page
    # Scores of different units cannot be compared.
    (data / "utt2lang").unlink()
    inside("score", data, hyp, tmp_path / "c").ok()
    inside(*arguments(A=":a", C=":c")).fails(1, "'C' was not scored on the same test data as 'A'")
