"""N-best lists: written lists are read back, and anything else is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.core.errors import UserError
from fedtools.data.datadir import read_table, write_table
from fedtools.data.nbest import Hypothesis, best_text, read_nbest, write_nbest

scores = st.floats(allow_nan=False, allow_infinity=False, width=32)
word = st.text(st.characters(exclude_categories=("Cs", "Zs", "Zl", "Zp", "Cc")), min_size=1)
words = st.lists(word.filter(lambda text: text.split() == [text]), max_size=4).map(" ".join)
utterances = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,9}", fullmatch=True)
lists = st.dictionaries(
    utterances, st.lists(st.tuples(scores, scores, words), min_size=1, max_size=4), max_size=5
).map(
    lambda table: {
        utterance: [Hypothesis(rank, *line) for rank, line in enumerate(lines, 1)]
        for utterance, lines in table.items()
    }
)


@settings(deadline=None, max_examples=50)
@given(nbest=lists)
def test_round_trip(nbest, tmp_path_factory):
    path = tmp_path_factory.mktemp("nbest") / "nbest"
    write_nbest(path, nbest.items())
    found = read_nbest(path)
    assert list(found) == sorted(nbest, key=str.encode)
    for utterance, hypotheses in found.items():
        for got, put in zip(hypotheses, nbest[utterance], strict=True):
            assert (got.rank, got.words) == (put.rank, put.words)
            # Nine digits reproduce any float32.
            assert got.acoustic == pytest.approx(put.acoustic, rel=1e-8)
            assert got.lm == pytest.approx(put.lm, rel=1e-8)
    first = path.read_bytes()
    write_nbest(path, found.items())
    assert path.read_bytes() == first


GOOD = "a\t1\t-1.5\t-2\tx y\na\t2\t-3\t-1e-05\t\nb\t1\t0\t0\tx\n"


def test_the_format(tmp_path):
    path = tmp_path / "nbest"
    path.write_text(GOOD)
    nbest = read_nbest(path)
    assert nbest == {
        "a": [Hypothesis(1, -1.5, -2.0, "x y"), Hypothesis(2, -3.0, -1e-5, "")],
        "b": [Hypothesis(1, 0.0, 0.0, "x")],
    }
    write_nbest(path, reversed(nbest.items()))
    assert path.read_text() == GOOD


@pytest.mark.parametrize(
    "line, bad, said",
    [
        (1, "a\t1\t-1.5\t-2", "4 fields"),
        (1, "a\t1\t-1.5\t-2\tx\ty", "6 fields"),
        (1, "", "1 fields"),
        (1, "../a\t1\t-1.5\t-2\tx", "not usable as an id"),
        (1, "a\t0\t-1.5\t-2\tx", "rank '0' of 'a' where 1 belongs"),
        (1, "a\t01\t-1.5\t-2\tx", "rank '01'"),
        (2, "a\t3\t-3\t-1\tx", "rank '3' of 'a' where 2 belongs"),
        (2, "b\t2\t-3\t-1\tx", "rank '2' of 'b' where 1 belongs"),
        (3, "a\t1\t-3\t-1\tx", "rank '1' of 'a' where 3 belongs"),
        (3, "A\t1\t-3\t-1\tx", "'A' is not in order"),
        (1, "a\t1\tnan\t-2\tx", "'nan' is not a finite number"),
        (1, "a\t1\t-1.5\t-inf\tx", "'-inf' is not a finite number"),
        (1, "a\t1\t1_0\t-2\tx", "'1_0' is not a finite number"),
        (1, "a\t1\t-1.5 \t-2\tx", "'-1.5 ' is not a finite number"),
        (1, "a\t1\t-1.5\t\tx", "'' is not a finite number"),
        (1, "a\t1\t-1.5\t-2\tx  y", "doubled"),
        (1, "a\t1\t-1.5\t-2\tx ", "trailing whitespace"),
        (1, "a\t1\t-1.5\t-2\tx\r", "trailing whitespace"),
    ],
)
def test_damage_is_named(tmp_path, line, bad, said):
    lines = GOOD.split("\n")
    lines[line - 1] = bad
    path = tmp_path / "nbest"
    path.write_bytes("\n".join(lines).encode())
    with pytest.raises(UserError) as error:
        read_nbest(path)
    assert f"{path}:{line}: " in str(error.value)
    assert said in str(error.value)


def test_an_utterance_may_not_come_back(tmp_path):
    path = tmp_path / "nbest"
    path.write_text(GOOD + "a\t1\t0\t0\tx\n")
    with pytest.raises(UserError, match=":4: utterance 'a' is not in order"):
        read_nbest(path)


@pytest.mark.parametrize(
    "content, said", [(GOOD[:-1].encode(), ":3: the last line"), (b"a\t1\t0\t0\t\xff\n", ":1: not")]
)
def test_damaged_files(tmp_path, content, said):
    path = tmp_path / "nbest"
    path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_nbest(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_nbest(tmp_path / "none")


@settings(deadline=None, max_examples=200)
@given(content=st.text(st.sampled_from("ab12.-e\t \nnaif\u2028"), max_size=40))
def test_any_text_is_read_or_refused(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(content.encode())
    try:
        nbest = read_nbest(path)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        # Every accepted list has a normal form.
        write_nbest(path, nbest.items())
        assert read_nbest(path).keys() == nbest.keys()


@pytest.mark.parametrize(
    "utterance, hypotheses",
    [
        ("a", []),
        ("a b", [Hypothesis(1, 0.0, 0.0, "")]),
        ("a", [Hypothesis(1, math.nan, 0.0, "")]),
        ("a", [Hypothesis(1, 0.0, -math.inf, "")]),
        ("a", [Hypothesis(2, 0.0, 0.0, "")]),
        ("a", [Hypothesis(1, 0.0, 0.0, "x\ty")]),
        ("a", [Hypothesis(1, 0.0, 0.0, "x\ny")]),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, utterance, hypotheses):
    path = tmp_path / "nbest"
    path.write_text("old")
    with pytest.raises(UserError, match=str(path)):
        write_nbest(path, [(utterance, hypotheses)])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_utterance_is_written_once(tmp_path):
    line = ("a", [Hypothesis(1, 0.0, 0.0, "")])
    with pytest.raises(UserError, match="'a' is duplicated"):
        write_nbest(tmp_path / "nbest", [line, line])


def test_best_text_is_a_kaldi_table(tmp_path):
    nbest = {
        "a": [Hypothesis(1, -1.0, -9.0, "one two"), Hypothesis(2, -2.0, -1.0, "three")],
        "b": [Hypothesis(1, 0.0, 0.0, "")],
    }
    assert best_text(nbest) == {"a": "one two", "b": ""}
    assert best_text(nbest, 0.5) == {"a": "three", "b": ""}
    assert best_text(nbest, 0.5, 5.0) == {"a": "one two", "b": ""}
    write_table(tmp_path / "text", best_text(nbest))
    assert (tmp_path / "text").read_text() == "a one two\nb\n"
    assert read_table(tmp_path / "text", values="optional") == best_text(nbest)
