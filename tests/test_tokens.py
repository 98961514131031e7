"""Tokens: ESPnet's list, round trips, and refused texts."""

from __future__ import annotations

import unicodedata

import pytest
import sentencepiece
from conftest import fedtools
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.core.errors import UserError
from fedtools.data.datadir import write_table
from fedtools.data.symbols import check_tokens
from fedtools.lm.tokens import Tokenizer, train_tokens

LINES = ["the cat sat", "the hat", "that cat", "a hat that sat", "cats can't sit"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    write_table(path, {f"u{i}": words for i, words in enumerate(LINES)})
    return path


@pytest.fixture(scope="module", params=["char", "bpe"])
def tokenizer(request, text):
    folder = text.parent / request.param
    return train_tokens([text], folder, request.param, 30 if request.param == "bpe" else None)


def test_the_list_is_espnets(tokenizer, text):
    folder = text.parent / tokenizer.token_type
    tokens = (folder / "tokens.txt").read_text().split("\n")[:-1]
    assert tokens == tokenizer.tokens
    assert tokens[:2] == ["<blank>", "<unk>"] and tokens[-1] == "<sos/eos>"
    if tokenizer.token_type == "bpe":
        # ESPnet's recipe makes this of a model: its pieces without <unk>, <s> and </s>.
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "bpe.model"))
        assert tokens[2:-1] == [model.id_to_piece(i) for i in range(3, len(model))]
        assert len(tokens) == len(model) == 30
    else:
        assert tokens[2:5] == ["t", "a", "<space>"]  # by frequency, ties by code point
        assert sorted(tokens[5:-1]) == sorted(set("".join(LINES)) - set("ta "))


def test_words_survive(tokenizer):
    for words in [*LINES, "", "a", "tac tas", "hhh"]:
        assert tokenizer.decode(tokenizer.encode(words)) == words
    assert tokenizer.encode("  the   cat ") == tokenizer.encode("the cat")
    assert tokenizer.encode("") == []
    assert tokenizer.blank not in tokenizer.encode("the cat")


@settings(deadline=None, max_examples=100)
@given(words=st.text("the cats'n", max_size=30))
def test_any_words_of_known_characters_survive(words, tokenizer_pair):
    for tokenizer in tokenizer_pair:
        ids = tokenizer.encode(words)
        assert tokenizer.decode(ids) == " ".join(words.split())
        # Words are spelled the same at every position, on which decoders rely.
        if tokenizer.token_type == "bpe":
            assert ids == [i for word in words.split() for i in tokenizer.encode(word)]


@pytest.fixture(scope="module")
def tokenizer_pair(text):
    folder = text.parent
    return (
        train_tokens([text], folder / "pair_char", "char"),
        train_tokens([text], folder / "pair_bpe", "bpe", 30),
    )


@settings(deadline=None, max_examples=100)
@given(words=st.text(max_size=20))
def test_any_text_can_be_encoded(words, tokenizer_pair):
    for tokenizer in tokenizer_pair:
        ids = tokenizer.encode(words)
        assert all(0 < index < len(tokenizer) - 1 for index in ids)
        assert bool(ids) == bool(words.split())


def test_unknown_characters(tokenizer):
    ids = tokenizer.encode("the Zat")
    assert tokenizer.unknown in ids
    assert tokenizer.decode(ids) == "the <unk>at"
    assert tokenizer.decode([0, *ids, 0, len(tokenizer) - 1]) == "the <unk>at"


def test_the_command_is_deterministic(text, tmp_path):
    other = tmp_path / "text2"
    write_table(other, {"x": "more cats", "y": ""})
    for run in "one", "two":
        arguments = (text, other, tmp_path / run, "--vocab-size", 32)
        assert "32 tokens (bpe)" in fedtools("train-tokens", *arguments).ok().out
    for name in "tokens.txt", "bpe.model":
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    tokenizer = Tokenizer.load(tmp_path / "one")
    assert tokenizer.decode(tokenizer.encode("more")) == "more"
    # There is no path in the model: it is the same wherever it was made.
    assert str(tmp_path).encode() not in (tmp_path / "one" / "bpe.model").read_bytes()


def test_characters_replace_bpe(cli, text, tmp_path):
    cli("train-tokens", text, tmp_path / "t", "--vocab-size", 30).ok()
    cli("train-tokens", text, tmp_path / "t", "--token-type", "char").ok()
    assert Tokenizer.load(tmp_path / "t").token_type == "char"
    cli("train-tokens", text, tmp_path / "t", "--token-type", "char", "--vocab-size", 6).ok()
    assert Tokenizer.load(tmp_path / "t").tokens[2:-1] == ["t", "a", "<space>"]


def test_the_largest_and_smallest_sizes_are_named_and_work(cli, text, tmp_path):
    failed = cli("train-tokens", text, tmp_path / "t", "--vocab-size", 1000)
    failed.fails(1, str(text), "the largest possible is ")
    largest = failed.err.rpartition(" ")[2].strip()
    cli("train-tokens", text, tmp_path / "t", "--vocab-size", largest).ok()
    failed = cli("train-tokens", text, tmp_path / "u", "--vocab-size", 5)
    failed.fails(1, "the smallest possible is ")
    assert not (tmp_path / "u").exists()
    smallest = failed.err.rpartition(" ")[2].strip()
    cli("train-tokens", text, tmp_path / "u", "--vocab-size", smallest).ok()
    assert len(Tokenizer.load(tmp_path / "u")) == int(smallest)


def test_wrong_usage(cli, text, tmp_path):
    cli("train-tokens", text, "--vocab-size", 30).fails(2, "at least one text")
    cli("train-tokens", text, tmp_path / "t").fails(2, "needed for bpe")
    cli("train-tokens", text, tmp_path / "t", "--token-type", "phone").fails(2, "phone")
    cli("train-tokens", tmp_path / "none", tmp_path / "t", "--vocab-size", 30).fails(1, "none")
    (tmp_path / "empty").write_text("u1\nu2\n")
    cli("train-tokens", tmp_path / "empty", tmp_path / "t", "--vocab-size", 30).fails(1, "no words")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "content, said",
    [
        ("<unk>\n<blank>\na\n<sos/eos>\n", ":1: '<blank>' belongs there"),
        ("<blank>\na\n<unk>\n<sos/eos>\n", ":2: '<unk>' belongs there"),
        ("<blank>\n<unk>\na\n", ":3: '<sos/eos>' belongs there"),
        ("<blank>\n<unk>\na\na\n<sos/eos>\n", ":4: 'a' is duplicated"),
        ("<blank>\n<unk>\na\n\n<sos/eos>\n", ":4: '' is no token"),
        ("<blank>\n<unk>\n<sos/eos>\n", "no tokens but"),
        # Characters that no text has.
        ("<blank>\n<unk>\na\n\u200b\n<sos/eos>\n", r":4: no text has the token '\\u200b': U\+200B"),
        ("<blank>\n<unk>\na\u00ad\n<sos/eos>\n", r":3: no text has the token 'a\\xad': U\+00AD"),
        ("<blank>\n<unk>\na\x07\n<sos/eos>\n", r":3: no text has the token 'a\\x07': U\+0007"),
        ("<blank>\n<unk>\na\tb\n<sos/eos>\n", r":3: no text has the token 'a\\tb': U\+0009"),
        ("<blank>\n<unk>\na\x85\n<sos/eos>\n", r"U\+0085 does not print"),
        ("<blank>\n<unk>\na\u2028\n<sos/eos>\n", r"U\+2028 does not print"),
        ("<blank>\n<unk>\na\ufeff\n<sos/eos>\n", ":3: a byte order mark"),
        ("<blank>\n<unk>\ne\u0301\n<sos/eos>\n", r":3: .*\(U\+0065 U\+0301\): it is not in .* NFC"),
        (
            "<blank>\n<unk>\n\u212b\n<sos/eos>\n",
            r":3: .*\(U\+212B\): it is not in Unicode's form NFC",
        ),
        ("", "empty"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_list_is_named(tmp_path, content, said):
    if content is not None:
        (tmp_path / "tokens.txt").write_text(content)
    with pytest.raises(UserError, match=said):
        Tokenizer.load(tmp_path)


def test_a_list_that_is_not_the_models(text, tmp_path):
    train_tokens([text], tmp_path, "bpe", 30)
    path = tmp_path / "tokens.txt"
    path.write_text(path.read_text().replace("▁cat\n", "▁dog\n"))
    with pytest.raises(UserError, match="piece '▁cat' is not in"):
        Tokenizer.load(tmp_path)
    (tmp_path / "bpe.model").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer.load(tmp_path)


def test_tokens_that_texts_do_have():
    listed = ["<blank>", "<unk>", "\u0301", "\u200d", "\u200c", "\u3000", "\u1112", "<sos/eos>"]
    assert check_tokens(listed, "tokens.txt") == listed


def test_what_does_not_print_is_refused_in_transcripts_before_it_is_a_token(cli, tmp_path):
    for mark in "\u200b\u00ad\x07\u2060":
        (tmp_path / "text").write_text(f"a x\nb y{mark}\n")
        said = f"text:2: a character that does not print (U+{ord(mark):04X})"
        cli("train-tokens", tmp_path / "text", tmp_path / "t", "--token-type", "char").fails(
            1, said
        )
    (tmp_path / "text").write_text("a می\u200cخواهم x\u00a0y\n")
    cli("train-tokens", tmp_path / "text", tmp_path / "t", "--token-type", "char").ok()


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_text_has_the_same_tokens_in_any_form_of_unicode(tmp_path, kind):
    lines = ["schön für dich", "größer als für mich", "が ぎ ぐ", "한국 음악"]
    size = 45 if kind == "bpe" else None
    found = {}
    for form in ("NFC", "NFD"):
        texts = [unicodedata.normalize(form, line) for line in lines]
        write_table(tmp_path / form, {f"u{i}": line for i, line in enumerate(texts)})
        found[form] = train_tokens([tmp_path / form], tmp_path / f"{form}-t", kind, size)
        for tokenizer in found.values():
            assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == lines
    assert found["NFC"].tokens == found["NFD"].tokens
    assert found["NFC"].encode(lines[0]) == found["NFD"].encode(
        unicodedata.normalize("NFD", lines[0])
    )


def test_marks_and_parts_of_syllables_that_are_tokens():
    tokens = ["<blank>", "<unk>", "e", "\u0301", "\u1112", "\u1161", "\u11ab", "<sos/eos>"]
    tokenizer = Tokenizer(tokens)
    for text in ("é", "e\u0301", "한", "\u1112\u1161\u11ab"):
        assert tokenizer.unknown not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)
    assert tokenizer.encode("é") == [2, 3] and tokenizer.encode("è") == [1]
