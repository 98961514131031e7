"""Clients' own word lists: the words they cover, and the clients they help."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fmp_world import T, begin, best_text, by_hand
from hypothesis import given
from hypothesis import strategies as st
from rescored_world import CLIENTS, make_stream

from fedtools.core.tables import read_tsv
from fedtools.lm.private_words import Trie, rare_words, read_phrases
from fedtools.lm.reweighting import Lists, ListWeights
from fedtools.lm.stream import open_stream

LETTERS = st.lists(st.sampled_from("abc"), max_size=8)


@given(phrases=st.lists(LETTERS.filter(bool), max_size=4), words=LETTERS)
def test_covered_words(phrases, words):
    """From the left, the longest phrase first, they equal a search of all phrases everywhere."""
    at = expected = 0
    while at < len(words):
        fits = [len(one) for one in phrases if words[at : at + len(one)] == one]
        expected += max(fits, default=0)
        at += max(fits, default=1)
    assert Trie(" ".join(one) for one in phrases).covered(words) == expected


def test_rare_words():
    said = {"ann": ["a b", "b c d", "d"], "bob": ["c"]}
    counts = {"b": 5, "d": 6, "c": 1}
    assert rare_words(said, counts, 5) == {"ann": ["b"], "bob": []}
    assert rare_words(said, counts, 6, times=1) == {"ann": ["a", "b", "c", "d"], "bob": ["c"]}


@pytest.fixture
def stream(tmp_path) -> Path:
    return make_stream(tmp_path / "stream")


def best(folder: Path, **weights: float) -> dict[str, str]:
    opened = open_stream(folder)
    rescored = opened.rescored
    lists = Lists(rescored, ListWeights(**weights), opened.covered())
    numbers = lists.best(slice(0, len(rescored.utterances)), None)
    said = [rescored.hypotheses[number] for number in numbers]
    return dict(zip(rescored.utterances, said, strict=True))


def test_a_list_helps_its_own_client(stream, tmp_path, cli):
    """With a dominant bonus, a listed word is in the result if any hypothesis has it.

    This includes words unknown to all language models; other clients' results are unchanged.
    """
    plain = best(stream)
    assert plain == by_hand(stream, scale=0.0)
    lines = [line.split("\t") for line in (stream / "nbest.tsv").read_text().splitlines()]
    # A word in an utterance's other hypotheses.
    other = next(
        (line[0], word)
        for line in lines
        for word in line[4].split()
        if line[0].startswith("ann") and word not in plain[line[0]].split()
    )
    listed = ["unheard", other[1]]
    rows = "".join(f"ann\t{word}\n" for word in listed)
    (tmp_path / "list").write_text(f"client\tphrase\n{rows}")
    cli("rescore-words", stream, "--list", tmp_path / "list").ok()
    helped = best(stream, bonus=1000.0)
    for name in plain:
        counts = {
            line[4]: sum(word in listed for word in line[4].split())
            for line in lines
            if line[0] == name
        }
        if name.startswith("ann"):
            assert counts[helped[name]] == max(counts.values())
        else:
            assert helped[name] == plain[name]
    assert helped[other[0]] != plain[other[0]]


def test_nothing_of_the_lists_is_sent(stream, tmp_path, cli):
    """Hypotheses change by them; messages and the server's results do not."""
    plain = begin(stream, tmp_path / "plain", scale=1.0)
    before = best_text(plain)
    lines = [line.split("\t") for line in (stream / "nbest.tsv").read_text().splitlines()]
    words = {
        word
        for name, *_, text in lines
        for word in set(text.split()) - set(before[name].split())
        if name.startswith("ann")
    }
    rows = "".join(f"ann\t{word}\n" for word in sorted(words))
    (tmp_path / "list").write_text(f"client\tphrase\nann\tunheard\n{rows}")
    cli("rescore-words", stream, "--list", tmp_path / "list").ok()
    helped = begin(stream, tmp_path / "helped", scale=1.0, bonus=50.0)
    assert best_text(helped) != before
    sent = sorted(path.relative_to(plain) for path in plain.glob("round_*/*.safetensors"))
    assert len(sent) > 2 * T
    for path in sent:
        assert (plain / path).read_bytes() == (helped / path).read_bytes(), path
    for path in helped.rglob("*"):
        assert path.is_dir() or b"unheard" not in path.read_bytes(), path


def test_lists_of_what_was_said_first(stream, cli):
    """Lists use only the first group's best hypotheses, since later words are no longer new."""
    cli("rescore-words", stream, "--rounds", T, "--most", 30).ok()
    phrases = read_phrases(stream / "phrases.tsv")
    opened = open_stream(stream)
    rescored = opened.rescored
    rows = [line.split("\t") for line in (stream / "unigram.tsv").read_text().splitlines()[1:]]
    counts = {word: int(count) for word, count, _ in rows}
    listed = 0
    for client in CLIENTS:
        group = opened.groups(client, T)[0]
        first = [
            rescored.hypotheses[rescored.first_hypothesis[at]] for at in range(group.stop)[group]
        ]
        words = " ".join(first).split()
        expected = {w for w in words if words.count(w) > 1 and counts.get(w, 0) <= 30}
        assert set(phrases.get(client, [])) == expected
        listed += len(expected)
    assert listed


def test_lists_of_corrected_transcripts_have_words_that_no_hypothesis_has(stream, cli):
    """They are of the same utterances as without correction, and are not scored there."""
    words = ("rescore-words", stream, "--rounds", T, "--most", 30)
    cli(*words).ok()
    heard, made_of = (stream / "phrases.tsv").read_bytes(), (stream / "phrases_of").read_text()
    truth = dict(line.split(" ", 1) for line in (stream / "text").read_text().splitlines())
    first = [name for name in made_of.split() if name.startswith("ann")]
    truth[first[0]] += " zorvane zorvane once"
    rows = [f"{name} {said}\n" for name, said in sorted(truth.items())]
    (stream / "text").write_text("".join(rows))
    cli(*words, "--corrected").ok()
    assert "zorvane" not in (stream / "nbest.tsv").read_text()
    table = [line.split("\t") for line in (stream / "unigram.tsv").read_text().splitlines()]
    counts = {word: count for word, count, _ in table}
    phrases = read_phrases(stream / "phrases.tsv")
    for client in CLIENTS:
        said = " ".join(truth[n] for n in made_of.split() if n.startswith(client)).split()
        assert set(phrases.get(client, [])) == {
            word for word in said if said.count(word) > 1 and int(counts.get(word, 0)) <= 30
        }
    assert "zorvane" in phrases["ann"] and "once" not in phrases["ann"]
    assert (stream / "phrases_of").read_text() == made_of
    cli(*words).ok()
    assert (stream / "phrases.tsv").read_bytes() == heard
    (stream / "text").write_text("".join(row for row in rows if not row.startswith(first[0])))
    cli(*words, "--corrected").fails(1, "text", f"no entry of utterance '{first[0]}'")


def test_sweeps_tell_how_many_are_missed(stream, tmp_path, cli):
    (tmp_path / "list").write_text("client\tphrase\nann\tw03\nann\tw27 w28\n")
    cli("rescore-words", stream, "--list", tmp_path / "list").ok()
    out = tmp_path / "out.tsv"
    cli("rescore-sweep", stream, out, "--vary", "bonus=0,1000", "--set", "scale=0").ok()
    truth = dict(line.split(" ", 1) for line in (stream / "text").read_text().splitlines())
    for row, bonus in zip(read_tsv(out, None), (0.0, 1000.0), strict=True):
        found, missed, said = best(stream, bonus=bonus), 0, 0
        for name in truth:
            for word in ("w03", "w27", "w28") if name.startswith("ann") else ():
                times = truth[name].split().count(word)
                said += times
                missed += max(0, times - found[name].split().count(word))
        assert (int(row["listed"]), int(row["missed"])) == (said, missed)
    assert said


def test_what_a_list_is_made_of_does_not_gain_by_it(stream, tmp_path, cli):
    """A list knows the first group's words; a bonus there would use the answer itself."""
    cli("rescore-words", stream, "--rounds", T, "--most", 1000).ok()
    phrases = read_phrases(stream / "phrases.tsv")
    begins = [line.split() for line in (stream / "segments").read_text().splitlines()]
    first = set()
    for client in CLIENTS:
        own = sorted((float(begin), name) for name, _, begin, _ in begins if name[:3] == client)
        first |= {name for _, name in own[: -(-len(own) // (T + 1))]}
    assert set((stream / "phrases_of").read_text().split()) == first
    plain, helped = best(stream), best(stream, bonus=1000.0)
    # If all utterances got the bonus, the first ones would gain by it, too.
    shutil.copytree(stream, tmp_path / "given")
    cli("rescore-words", tmp_path / "given", "--list", stream / "phrases.tsv").ok()
    assert not (tmp_path / "given" / "phrases_of").exists()
    everywhere = best(tmp_path / "given", bonus=1000.0)
    for name in plain:
        assert helped[name] == (plain if name in first else everywhere)[name]
    assert any(everywhere[name] != plain[name] for name in first)
    assert any(everywhere[name] != plain[name] for name in plain if name not in first)
    # Its own words are not counted as found or missed either.
    truth = dict(line.split(" ", 1) for line in (stream / "text").read_text().splitlines())
    for folder, left_out in ((stream, first), (tmp_path / "given", set())):
        cli("rescore-sweep", folder, tmp_path / "o", "--vary", "bonus=0", "--set", "scale=0").ok()
        said = [
            (truth[name].split().count(word), plain[name].split().count(word))
            for name in truth
            if name not in left_out
            for word in phrases.get(name[:3], [])
        ]
        (row,) = read_tsv(tmp_path / "o", None)
        assert int(row["listed"]) == sum(times for times, _ in said)
        assert int(row["missed"]) == sum(max(0, times - heard) for times, heard in said)
    # Another list replaces both files; a list of other utterances is refused.
    cli("rescore-words", stream, "--list", stream / "phrases.tsv").ok()
    assert best(stream, bonus=1000.0) == everywhere
    (stream / "phrases_of").write_text("ann-000\nzoe-000\n")
    sweep = ("rescore-sweep", stream, tmp_path / "o", "--vary", "bonus=1")
    cli(*sweep).fails(1, "phrases_of:2", "zoe-000")
    cli("rescore-words", stream, "--rounds", T, "--most", 1000).ok()
    cli(*sweep).ok()


def test_mistakes_are_told(stream, tmp_path, cli):
    (tmp_path / "list").write_text("client\tphrase\nann\t \n")
    cli("rescore-words", stream, "--list", tmp_path / "list").fails(1, "list:2", "empty phrase")
    cli("rescore-words", stream, "--list", tmp_path / "list", "--corrected").fails(2, "--corrected")
    (tmp_path / "list").write_text("client\tphrase\nzoe\tw03\n")
    cli("rescore-words", stream, "--list", tmp_path / "list").ok()
    sweep = ("rescore-sweep", stream, tmp_path / "o", "--vary", "bonus=1")
    cli(*sweep).fails(1, "zoe")
    (stream / "phrases.tsv").unlink()
    cli(*sweep).fails(1, "phrases.tsv", "rescore-words")
