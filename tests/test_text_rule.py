"""Words counted in a text, for systems that write differently."""

from __future__ import annotations

from pathlib import Path

import jiwer
import pytest
from conftest import inside
from hypothesis import given
from hypothesis import strategies as st

from fedtools.score.text_rule import plain


@pytest.mark.parametrize(
    ("written", "language", "spoken"),
    [
        ("Mark's 3rd, isn't it?", "en", "mark's third isn't it"),
        ("MARK IS GOING.", "en", "mark is going"),
        ("21 of 1,205", "en", "twenty one of one thousand two hundred and five"),
        ("3.5 metres", "en", "three point five metres"),
        ("A4 and B-52", "en", "a4 and b fifty two"),
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
