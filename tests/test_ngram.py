"""N-grams: lmplz's files, perplexity against its definition, and bad input."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import kenlm
import pytest

from fedtools.core.atomic import sha256
from fedtools.core.errors import UserError
from fedtools.data.datadir import write_table
from fedtools.lm.ngram import NgramFolder, find_program, perplexity, train_ngram
from fedtools.lm.tokens import train_tokens

LINES = ["the cat sat", "the hat sat", "a cat", "the cat", "a hat", "that cat sat on a hat"]


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text"
    write_table(path, {f"u{i}": words for i, words in enumerate(LINES)})
    return path


def test_the_files(cli, text, tmp_path):
    out = tmp_path / "lm"
    result = cli("train-lm", text, out, "--order", 3).ok()
    assert "3-gram of words" in result.out
    assert "--discount_fallback sets them" in result.err
    names = {path.name for path in out.iterdir()}
    assert names == {"3gram.arpa", "3gram.bin", "vocabulary", "lm.yaml"}
    words = sorted({word for words in LINES for word in words.split()})
    assert (out / "vocabulary").read_text().split() == words
    assert NgramFolder.read(out) == NgramFolder(out, 3, "word", sha256(out / "3gram.bin"))
    # No utterance id is included; both files are the same model.
    arpa, binary = kenlm.Model(str(out / "3gram.arpa")), kenlm.Model(str(out / "3gram.bin"))
    assert binary.order == 3 and "u0" not in binary and "cat" in binary
    assert binary.score("the cat sat") == pytest.approx(arpa.score("the cat sat"), abs=1e-6)
    assert binary.score("the cat sat") > binary.score("sat the cat")


def test_same_text_same_bytes(text, tmp_path):
    for run in "one", "two":
        train_ngram([text], tmp_path / run, 4)
    for path in (tmp_path / "one").iterdir():
        assert sha256(path) == sha256(tmp_path / "two" / path.name)


def test_plain_text_and_several_texts(cli, text, tmp_path):
    (tmp_path / "plain").write_text("a dog ran\n\n  the dog\tsat \n")
    out = tmp_path / "lm"
    cli("train-lm", text, out, "--plain", tmp_path / "plain").ok()
    assert {"dog", "ran", "cat"} <= set((out / "vocabulary").read_text().split())
    cli("train-lm", "--plain", tmp_path / "plain", out, "--order", 2).ok()
    assert (out / "vocabulary").read_text() == "a\ndog\nran\nsat\nthe\n"
    assert NgramFolder.read(out).order == 2


def test_perplexity_is_its_definition(cli, text, tmp_path):
    model = train_ngram([text], tmp_path / "lm", 3)
    valid = tmp_path / "valid"
    write_table(valid, {"v1": "the cat sat", "v2": "a dog sat"})
    found = perplexity(model, [valid])
    assert (found.sentences, found.units, found.unknown) == (2, 6, 1)
    arpa = kenlm.Model(str(model.arpa))
    log10 = arpa.score("the cat sat") + arpa.score("a dog sat")
    assert found.perplexity == pytest.approx(10 ** (-log10 / 8), rel=1e-5)
    dog = list(arpa.full_scores("a dog sat"))[1][0]
    assert found.perplexity_known == pytest.approx(10 ** (-(log10 - dog) / 7), rel=1e-5)
    table = cli("train-lm", text, tmp_path / "lm", "--order", 3, "--valid", valid).ok().out
    assert table.split("\n")[-2].split()[1:4] == ["2", "6", "1"]
    assert f"{found.perplexity:.2f}" in table


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_tokens(cli, text, tmp_path, kind):
    tokenizer = train_tokens([text], tmp_path / "t", kind, 25)
    out = tmp_path / "lm"
    extra = tmp_path / "extra"
    write_table(extra, {"x": "the Cat"})  # C is not covered
    arguments = ("--unit", "token", "--tokens", tmp_path / "t", "--valid", text)
    cli("train-lm", text, extra, out, *arguments).ok()
    model = kenlm.Model(str(out / "4gram.bin"))
    assert math.isfinite(model.score(" ".join(tokenizer.split("the cat"))))
    used = {token for words in LINES for token in tokenizer.split(words)}
    assert used <= set((out / "vocabulary").read_text().split("\n"))
    assert "<unk>" not in (out / "vocabulary").read_text()
    assert NgramFolder.read(out).unit == "token"
    found = perplexity(NgramFolder.read(out), [text], tokenizer)
    assert found.units == sum(len(tokenizer.encode(words)) for words in LINES)
    assert found.unknown == 0


def test_unk_in_transcripts_is_let_pass_but_not_learnt(text, tmp_path):
    write_table(text, {"u1": "the <unk> sat", "u2": "the cat"})
    model = train_ngram([text], tmp_path / "lm", 2)
    assert model.vocabulary.read_text() == "cat\nsat\nthe\n"


def test_a_text_of_other_words_is_warned_of(cli, text, tmp_path):
    out, upper = tmp_path / "lm", tmp_path / "upper"
    write_table(upper, {f"u{i}": words.upper() for i, words in enumerate(LINES)})
    done = cli("train-lm", text, out, "--order", 2, "--valid", upper, "--valid", text).ok()
    said = f"warning: {upper}: 18 of 18 words (100%) are unknown to {out / 'vocabulary'}"
    assert said in done.err and done.err.count("warning") == 1
    train_tokens([text], tmp_path / "t", "char")
    done = cli("train-lm", upper, out, "--unit", "token", "--tokens", tmp_path / "t", "--order", 2)
    # All except the spaces.
    assert "tokens (8" in done.ok().err and "are unknown to the tokens" in done.err


def test_bad_input(cli, text, tmp_path):
    out = tmp_path / "lm"
    (tmp_path / "reserved").write_text("u1 the cat\nu2 the </s>\n")
    cli("train-lm", tmp_path / "reserved", out).fails(1, "reserved:2:", "</s>")
    (tmp_path / "empty").write_text("u1\nu2\n")
    cli("train-lm", tmp_path / "empty", out).fails(1, "empty: no words")
    cli("train-lm", "--plain", tmp_path / "none", out).fails(1, "none: cannot be read")
    (tmp_path / "latin").write_bytes(b"fine\ncaf\xe9\n")
    cli("train-lm", "--plain", tmp_path / "latin", out).fails(1, "latin:2: not UTF-8")
    cli("train-lm", text, out, "--memory", "1M").fails(1, "lmplz failed", "give more with --memory")
    # No partial file is left, and none that a decoder would take for a model.
    assert list(out.iterdir()) == []
    with pytest.raises(UserError, match="not an n-gram's folder"):
        NgramFolder.read(out)
    train_ngram([text], out, 2)
    (out / "2gram.bin").unlink()
    with pytest.raises(UserError, match=r"2gram\.bin: missing"):
        NgramFolder.read(out)
    (out / "lm.yaml").write_text("order: 99\n")
    with pytest.raises(UserError, match="order or unit is missing"):
        NgramFolder.read(out)


def test_wrong_usage(cli, text, tmp_path):
    cli("train-lm", text).fails(2, "no text")
    cli("train-lm", text, tmp_path, "--order", 7).fails(2, "order")
    cli("train-lm", text, tmp_path, "--unit", "token").fails(2, "--tokens")
    cli("train-lm", text, tmp_path, "--tokens", tmp_path).fails(2, "--tokens")
    cli("train-lm", text, tmp_path, "--memory", "much").fails(2, "--memory")


def test_programs_are_the_environments_own_then_those_on_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match=r"lmplz is neither in .*; run utils/build_kenlm\.sh"):
        find_program("lmplz")
    for folder in "elsewhere", "bin":
        program = tmp_path / folder / "lmplz"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        os.chmod(program, 0o755)
        assert find_program("lmplz") == program
