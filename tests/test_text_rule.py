"""Words counted in a text, for systems that write differently."""

from __future__ import annotations

from pathlib import Path

import jiwer
import pytest
from conftest import inside
from hypothesis import given
from hypothesis import strategies as st
from num2words import num2words
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from fedtools.score.align import count_errors
from fedtools.score.text_rule import plain


@pytest.mark.parametrize(
    ("written", "language", "spoken"),
    [
        ("Mark's 3rd, isn't it?", "en", "mark's third isn't it"),
        ("MARK IS GOING.", "en", "mark is going"),
        ("21 of 1,205", "en", "twenty one of one two zero five"),
        ("3.5 metres", "en", "three point five metres"),
        ("A4 and B-52", "en", "a four and b fifty two"),
        ("…", "en", ""),
        ("<unk> said", "en", "<unk> said"),
        ("Es sind 21 Äpfel!", "de", "es sind 21 äpfel"),
        ("Işık, İZMİR", "tr", "ışık izmir"),
        ("நன்றி.", "ta", "நன்றி"),
        ("1" * 40, "en", "1" * 40),
    ],
)
def test_a_text_becomes_what_is_said(written, language, spoken):
    assert plain(written, "spoken", language) == spoken


# As it is said, and as Whisper writes it.
PAIRS = [
    ("in nineteen ninety five we moved", "In 1995, we moved."),
    ("two thousand and twelve", "2012"),
    ("twenty twelve", "2012"),
    ("nineteen oh five", "1905"),
    ("the nineteen eighties", "the 1980s"),
    ("THREE TWO TWO SEVEN", "3227"),
    ("ZERO THREE FIVE ONE", "0351"),
    ("ZERO THREE FIVE ONE", "0-3-5-1"),
    ("five five five one two three four", "555-1234"),
    ("one hundred and one", "101"),
    ("one hundred one", "101"),
    ("ten thousand", "10,000"),
    ("three point one four", "3.14"),
    ("twenty percent of people", "20% of people"),
    ("twenty per cent of people", "20% of people"),
    ("five dollars and fifty cents", "$5.50"),
    ("it costs twenty million dollars", "It costs $20 million."),
    ("three pounds", "£3"),
    ("at three thirty", "At 3:30."),
    ("minus five degrees", "-5°"),
    ("twenty first century", "21st century"),
    ("seven eleven", "7-11"),
    ("mister smith and doctor jones", "Mr. Smith and Dr. Jones"),
    ("saint louis", "St. Louis"),
    ("professor and missus green", "Prof. and Mrs. Green"),
    ("a and b", "A & B"),
    ("one half of it", "1/2 of it"),
    ("two and a half", "2 1/2"),
    ("two point five", "2½"),
    ("nine eleven", "9/11"),
]
DIFFERENT = [("minus five", "5"), ("five", "$5"), ("twenty", "20%"), ("3.5", "35"), ("21", "21st")]


@pytest.mark.parametrize(("said", "written"), PAIRS)
def test_numbers_and_titles_are_those_that_were_said(said, written):
    assert plain(said, "spoken") == plain(written, "spoken")


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_numbers_stay_others(one, other):
    assert plain(one, "spoken") != plain(other, "spoken")


@given(st.integers(0, 10**9))
def test_a_number_is_the_same_in_words_and_in_digits(number):
    """Words by num2words, which Whisper's normaliser reads."""
    said, whole = num2words(number), EnglishTextNormalizer({})
    assert plain(said, "spoken") == plain(str(number), "spoken") == plain(f"{number:,}", "spoken")
    # The same numbers are equal as by the original.
    assert whole(said) == whole(str(number))


NOT_ROUND = st.integers(1001, 9999).filter(lambda number: number % 100)


@given(NOT_ROUND, NOT_ROUND)
def test_a_wrong_digit_is_one_error(one, other):
    said, written = plain(str(one), "spoken"), plain(str(other), "spoken")
    digits = sum(map(str.__ne__, str(one), str(other)))
    assert count_errors(said.split(), written.split()).errors <= digits


@given(st.text(max_size=40), st.sampled_from(["en", "de", "tr", "ta", "zh-CN"]))
def test_the_rule_is_idempotent_and_gives_single_blanks(text, language):
    once = plain(text, "spoken", language)
    assert plain(once, "spoken", language) == once
    assert once == " ".join(once.split())
    assert plain(text, "none", language) == text


def test_score_and_compare_count_alike_what_is_said_alike(tmp_path: Path):
    tables = {
        "text": "a-1 MARK HAS TWENTY ONE DOGS\na-2 it is not\n",
        "utt2spk": "a-1 a\na-2 a\n",
    }
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "hyp").write_text("a-1 Mark has 21 dogs.\na-2 It isn't!\n")
    rows = {}
    for rule in ("none", "spoken"):
        given = (tmp_path, tmp_path / "hyp", tmp_path / rule, "--text-rule", rule)
        inside("score", *given).ok()
        head, *lines = (tmp_path / rule / "wer.tsv").read_text().splitlines()
        found = dict(zip(head.split("\t"), lines[-1].split("\t"), strict=True))
        rows[rule] = float(found["wer"])
    said = (["mark has twenty one dogs", "it is not"], ["mark has twenty one dogs", "it isn't"])
    assert rows["spoken"] == pytest.approx(100 * jiwer.wer(*said), abs=0.01)
    assert rows["none"] > rows["spoken"]
    hypotheses = [tmp_path / "hyp", tmp_path / "text"]
    out = inside("compare", tmp_path, *hypotheses, "--text-rule", "spoken").ok().out
    assert "25.00" in out.splitlines()[-1]
