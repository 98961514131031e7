"""Symbols in text: unknown words of any spelling, reserved words, and byte order marks."""

from __future__ import annotations

import random
import subprocess
import unicodedata
from pathlib import Path

import kenlm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.core.text_files import read_lines, read_text
from fedtools.data.datadir import DataDir, read_table, write_table
from fedtools.data.nbest import Hypothesis, read_nbest
from fedtools.data.symbols import RESERVED, check_sentence, is_unknown
from fedtools.lm.ngram import NgramFolder, perplexity, train_ngram
from fedtools.lm.private_words import covered_words, rare_words
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.vocabulary import Vocabulary, make_vocabulary
from fedtools.lm.word_scores import encode_all
from fedtools.tasks.rescore.spoken import measure_text

MARK = "\ufeff"
WORDS = "the cat sat on a mat and ran".split()


def some_text(path: Path, unknown: str, count: int = 60) -> Path:
    """Make a Kaldi text in which one word of nine is the unknown one."""
    draw = random.Random(1)
    lines = (" ".join(draw.choice([*WORDS, unknown]) for _ in range(6)) for _ in range(count))
    write_table(path, {f"u{index:03}": line for index, line in enumerate(lines)})
    return path


# --- unknown words ------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["<UNK>", "<Unk>"])
def test_an_n_gram_has_one_unknown_word(tmp_path, spelling):
    texts = {name: some_text(tmp_path / name, name) for name in ("<unk>", spelling)}
    models = {name: train_ngram([text], tmp_path / f"{name}lm", 2) for name, text in texts.items()}
    # KenLM must not find a second one when it reads the model: it would replace <unk>.
    assert spelling not in models[spelling].arpa.read_text()
    assert models[spelling].arpa.read_bytes() == models["<unk>"].arpa.read_bytes()
    assert models[spelling].vocabulary.read_text().split() == sorted(WORDS)
    arpa = dict(
        reversed(line.split("\t")[:2])
        for line in models[spelling].arpa.read_text().split("\\2-grams")[0].splitlines()
        if line.count("\t")
    )
    zebra = kenlm.Model(str(models[spelling].binary)).score("zebra", bos=False, eos=False)
    assert zebra == pytest.approx(float(arpa["<unk>"]), abs=1e-5)
    write_table(tmp_path / "valid", {"v1": f"the cat {spelling} ran", "v2": "the zebra sat"})
    write_table(tmp_path / "lower", {"v1": "the cat <unk> ran", "v2": "the zebra sat"})
    found = [perplexity(models[spelling], [tmp_path / name]) for name in ("valid", "lower")]
    assert found[0] == found[1] and found[0].unknown == 2


def test_a_vocabulary_has_one_unknown_word(cli, tmp_path):
    for name in ("<unk>", "<UNK>"):
        text = some_text(tmp_path / name, name)
        (tmp_path / "c.yaml").write_text(
            "nnlm: {epochs: 1, lm_conf: {layer: 1, head: 1, unit: 4, att_unit: 4, embed_unit: 4}}\n"
        )
        options = ("--valid", text, "--config", tmp_path / "c.yaml")
        cli("train-nnlm", text, tmp_path / f"{name}m", *options).ok()
    for file in ("words.txt", "unigram.tsv", "model.safetensors"):
        one, other = (tmp_path / f"{name}m" / file for name in ("<unk>", "<UNK>"))
        assert one.read_bytes() == other.read_bytes()
    assert Vocabulary.read(tmp_path / "<UNK>m").words[:2] == ["</s>", "<unk>"]


def test_what_is_an_unknown_word():
    assert all(map(is_unknown, ("<unk>", "<UNK>", "<Unk>")))
    assert not any(map(is_unknown, ("unk", "[UNK]", "<unk", "<unknown>", "unk>", "", "<s>")))
    # Other systems' symbols are words, and are counted as such.
    vocabulary, counts, _ = make_vocabulary([["a", "[UNK]", "<unk>"]])
    assert set(vocabulary.words[2:]) == {"a", "[UNK]"} and counts[1] == 1


def test_nobodys_own_word_is_unknown():
    said = {"x": ["zorg <unk> <UNK>", "zorg <unk> <UNK>"]}
    assert rare_words(said, {}, 0) == {"x": ["zorg"]}


@pytest.mark.parametrize("kind", ["char", "bpe"])
@pytest.mark.parametrize("spelling", ["<unk>", "<UNK>"])
def test_tokens_do_not_spell_an_unknown_word(cli, tmp_path, kind, spelling):
    text = some_text(tmp_path / "text", spelling)
    size = ("--vocab-size", 25) if kind == "bpe" else ()
    cli("train-tokens", text, tmp_path / "t", "--token-type", kind, *size).ok()
    tokenizer = Tokenizer.load(tmp_path / "t")
    letters = set("".join(tokenizer.tokens[2:-1]).replace("<space>", ""))
    assert letters == set("".join(WORDS)) | ({"▁"} if kind == "bpe" else set())
    for words in (f"the {spelling} cat", spelling, f"{spelling} {spelling} ran", f"a {spelling}"):
        ids = tokenizer.encode(words)
        assert ids.count(tokenizer.unknown) == words.count(spelling)
        assert tokenizer.decode(ids) == words.replace(spelling, "<unk>")
        # The other words are unchanged.
        known = [tokenizer.encode(word) for word in words.split() if word != spelling]
        assert all(str(part)[1:-1] in str(ids) for part in known)


def test_words_are_compared_in_one_form_of_unicode(cli, tmp_path):
    """NFD in texts, hypotheses or lists does not make another word."""
    words = {form: unicodedata.normalize(form, "schön für é") for form in ("NFC", "NFD")}
    for form, text in words.items():
        write_table(tmp_path / form, {f"u{n}": f"{text} und so {text}" for n in range(9)})
    models = {form: train_ngram([tmp_path / form], tmp_path / f"{form}-lm", 2) for form in words}
    assert models["NFC"].arpa.read_bytes() == models["NFD"].arpa.read_bytes()
    assert {perplexity(models["NFC"], [tmp_path / form]).unknown for form in words} == {0}
    # A vocabulary of another form, from an earlier version, and an n-gram's, which KenLM knows.
    vocabulary = Vocabulary(["</s>", "<unk>", *words["NFD"].split()])
    assert {tuple(vocabulary.encode(text)) for text in words.values()} == {(2, 3, 4, 0)}
    hypotheses = [Hypothesis(1, 0.0, 0.0, text) for text in words.values()]
    assert encode_all(vocabulary, hypotheses, "list")[0].tolist() == [2, 3, 4, 0] * 2
    Vocabulary(["</s>", "<unk>", "e\u0301", "\u00e9"]).write(tmp_path)
    with pytest.raises(UserError, match=r"words.txt:3: .* is duplicated, in two forms of Unicode"):
        Vocabulary.read(tmp_path)
    models["NFC"].vocabulary.write_text("a\nfu\u0308r\n")
    with pytest.raises(UserError, match=r"vocabulary:2: .* is not in Unicode's form NFC"):
        NgramFolder.read(tmp_path / "NFC-lm")
    assert measure_text({"u": words["NFD"]}, {"u": words["NFC"]})["errors"] == 0
    assert rare_words({"x": list(words.values())}, {}, 0) == {"x": sorted(words["NFC"].split())}
    covered = covered_words(list(words.values()), {"x": slice(0, 2)}, {"x": [words["NFD"]]})
    assert covered.tolist() == [3, 3]


# --- reserved words -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", [*RESERVED, "<S>", "<SPACE>"])
def test_reserved_words_are_refused_by_every_reader_of_transcripts(cli, tmp_path, word):
    path = tmp_path / "d" / "text"
    DataDir(tmp_path / "d", text={"u1": "a", "u2": f"the {word} cat"}, utt2spk={}).write()
    said = f"{path}:2: the word {word} is reserved"
    for command in (
        ("train-tokens", path, tmp_path / "out", "--token-type", "char"),
        ("train-lm", path, tmp_path / "out"),
        ("train-nnlm", path, tmp_path / "out", "--valid", path),
    ):
        cli(*command).fails(1, said)
    with pytest.raises(UserError, match=word):
        DataDir.read(tmp_path / "d", "text")
    (tmp_path / "plain").write_text(f"a\nthe {word} cat\n")
    cli("train-lm", "--plain", tmp_path / "plain", tmp_path / "out").fails(
        1, f"plain:2: the word {word}"
    )


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="<>/#0spaceunk ", max_size=30))
def test_a_sentence_that_passes_has_no_reserved_word(sentence):
    bad = any(word.lower() in RESERVED for word in sentence.split())
    if bad:
        with pytest.raises(UserError):
            check_sentence(sentence)
    else:
        check_sentence(sentence)


def test_reserved_words_that_come_all_the_same_are_spelled_and_survive(tmp_path):
    letters = sorted(set("".join(RESERVED)))
    characters = Tokenizer(["<blank>", "<unk>", "<space>", *letters, "<sos/eos>"])
    for word in RESERVED:
        ids = characters.encode(f"a {word} b")
        assert characters.blank not in ids and len(characters) - 1 not in ids
        assert characters.decode(characters.encode(f"s {word} c")) == f"s {word} c"
    words = Tokenizer(["<blank>", "<unk>", "a", "<sos/eos>"], words=True)
    assert words.encode("a <blank> <sos/eos>") == [2, 1, 1]


# --- byte order marks ---------------------------------------------------------------------------


def test_a_mark_at_the_beginning_is_no_part_of_a_text(cli, tmp_path):
    (tmp_path / "plain").write_text(f"{MARK}on the tree\nthe dog on the house\n")
    cli("train-lm", "--plain", tmp_path / "plain", tmp_path / "lm", "--order", 2).ok()
    words = (tmp_path / "lm" / "vocabulary").read_text().split()
    assert words == ["dog", "house", "on", "the", "tree"]
    (tmp_path / "list").write_text(f"{MARK}on\noff\n")
    assert read_lines(tmp_path / "list") == ["on", "off"]
    assert read_text(tmp_path / "list") == "on\noff\n"
    (tmp_path / "t.tsv").write_text(f"{MARK}client\tphrase\na\tb\n")
    assert read_tsv(tmp_path / "t.tsv", ("client", "phrase"))[0] == {"client": "a", "phrase": "b"}
    (tmp_path / "n.tsv").write_text(f"{MARK}u\t1\t-1\t-2\tw\n")
    assert list(read_nbest(tmp_path / "n.tsv")) == ["u"]


def test_a_mark_within_a_text_is_named_with_its_line(cli, tmp_path):
    # The result of cat on two files.
    (tmp_path / "plain").write_text(f"{MARK}on the tree\n{MARK}the dog\n")
    failed = cli("train-lm", "--plain", tmp_path / "plain", tmp_path / "lm", "--order", 2)
    failed.fails(1, "plain:2: a byte order mark (U+FEFF) within the text", "sed")
    with pytest.raises(UserError, match="plain:2: a byte order mark"):
        read_lines(tmp_path / "plain")


def test_tables_of_data_directories_have_no_mark_at_all(tmp_path):
    # Kaldi's programs would read it as part of the first key.
    (tmp_path / "text").write_text(f"{MARK}u1 a\n")
    with pytest.raises(UserError, match="text:1: a byte order mark") as told:
        read_table(tmp_path / "text")
    assert "at the beginning of the file, byte 0" in str(told.value)
    # The message gives a remedy, which works.
    command = str(told.value).partition("remove it with: ")[2]
    assert subprocess.run(command, shell=True, check=False).returncode == 0
    assert read_table(tmp_path / "text") == {"u1": "a"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            f"{MARK}{MARK}u1 a\n",
            "text:1: a byte order mark (U+FEFF) at the beginning of the file, byte 3",
        ),
        (f"u1 a\n{MARK}u2 b\n", "text:2: a byte order mark (U+FEFF) within the text"),
    ],
)
def test_a_mark_is_told_with_its_place_and_a_remedy(tmp_path, content, said):
    (tmp_path / "a text").write_text(content)
    with pytest.raises(UserError) as told:
        read_lines(tmp_path / "a text")
    assert said in str(told.value)
    subprocess.run(str(told.value).partition("remove it with: ")[2], shell=True, check=True)
    assert read_lines(tmp_path / "a text") == content.replace(MARK, "").splitlines()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_every_table_of_another_encoding_is_told(tmp_path, encoding):
    for name, content, read in (
        ("text", "u1 a\n", read_table),
        ("t.tsv", "client\tphrase\na\tb\n", lambda path: read_tsv(path, ("client", "phrase"))),
        ("nbest.tsv", "u\t1\t-1\t-2\tw\n", read_nbest),
        ("list", "a\n", read_lines),
    ):
        (tmp_path / name).write_bytes(content.encode(encoding))
        with pytest.raises(
            UserError, match=f"{name}:1: {encoding.upper()}, not UTF-8; convert it with"
        ):
            read(tmp_path / name)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1", "utf-32"])
def test_other_encodings_are_named(cli, tmp_path, encoding):
    (tmp_path / "plain").write_bytes("café\nthe dog\n".encode(encoding))
    failed = cli("train-lm", "--plain", tmp_path / "plain", tmp_path / "lm", "--order", 2)
    failed.fails(1, "plain:1: ", "iconv" if encoding in ("utf-16", "utf-32") else "convert")
