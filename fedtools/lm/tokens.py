"""Tokens: characters or SentencePiece BPE, in a folder laid out as ESPnet's token lists are.

tokens.txt   one token a line: <blank> first, <unk> second, <sos/eos> last (ESPnet's token_list)
bpe.model    the SentencePiece model; a folder without it holds characters
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.files.atomic import atomic_write, write_text
from fedtools.files.datadir import read_table
from fedtools.files.errors import UserError
from fedtools.files.lines import read_bytes, read_words

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

BLANK, UNKNOWN, SPACE, SOS_EOS = "<blank>", "<unk>", "<space>", "<sos/eos>"
WORD_START = "▁"  # SentencePiece's mark in front of the first piece of a word
# SentencePiece leaves out longer lines silently (its default is 4192 bytes).
_LONGEST_LINE = 1 << 24


class Tokenizer:
    """Words to token ids and back; characters and BPE behave alike.

    Args:
        tokens: the token list; an id is a position in it. `tokens[0]` is the CTC blank.
        model: the bytes of a SentencePiece model, or None for characters.
    """

    blank = 0
    unknown = 1

    def __init__(self, tokens: Sequence[str], model: bytes | None = None):
        self.tokens = list(tokens)
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self._pieces = None
        if model is not None:
            from sentencepiece import SentencePieceProcessor

            self._pieces = SentencePieceProcessor(model_proto=model)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read what `train_tokens` (or ESPnet) wrote.

        Raises:
            UserError: if tokens.txt is missing, is no ESPnet token list, or does not belong to
                bpe.model.
        """
        folder = Path(folder)
        path = folder / "tokens.txt"
        tokens = _read_tokens(path)
        model, remedy = folder / "bpe.model", "run fedtools train-tokens again"
        if not model.exists():
            return cls(tokens)
        try:
            # SentencePiece takes no bytes for no model, and complains later.
            tokenizer = cls(tokens, read_bytes(model) or b"\0")
        except RuntimeError:
            raise UserError("not a SentencePiece model", path=model, remedy=remedy) from None
        for piece in _pieces_of(tokenizer._pieces):
            if piece not in tokenizer._ids:
                problem = f"the model's piece {piece!r} is not in {path}"
                raise UserError(problem, path=model, remedy=remedy)
        return tokenizer

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def token_type(self) -> str:
        """ "char" or "bpe"."""
        return "char" if self._pieces is None else "bpe"

    def split(self, words: str) -> list[str]:
        """Words, separated by whitespace, to tokens; what no token covers becomes <unk>."""
        words = " ".join(words.split())
        if self._pieces is None:
            tokens = [SPACE if character == " " else character for character in words]
        else:
            tokens = self._pieces.encode(words, out_type=str)
        return [token if token in self._ids else UNKNOWN for token in tokens]

    def encode(self, words: str) -> list[int]:
        """Words, separated by whitespace, to token ids; what no token covers becomes <unk>."""
        return [self._ids[token] for token in self.split(words)]

    def decode(self, ids: Iterable[int]) -> str:
        """Token ids to words, separated by single blanks; <blank> and <sos/eos> are left out."""
        silent = (BLANK, SOS_EOS)
        text = "".join(token for token in map(self.tokens.__getitem__, ids) if token not in silent)
        mark = SPACE if self._pieces is None else WORD_START
        return " ".join(text.replace(mark, " ").split())


def train_tokens(
    texts: Sequence[str | Path],
    folder: str | Path,
    token_type: str = "bpe",
    vocab_size: int | None = None,
) -> Tokenizer:
    """Make the tokens of one or several Kaldi text files and write them to `folder`.

    BPE is SentencePiece's (Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226), without
    any normalisation of the text, so that what was encoded is decoded unchanged.

    Args:
        texts: Kaldi `text` files; utterances without words count for nothing.
        folder: gets tokens.txt and, for BPE, bpe.model.
        token_type: "bpe" or "char".
        vocab_size: lines of tokens.txt; for characters at most, None for all of them.

    Returns:
        The tokenizer, as `Tokenizer.load` reads it back.

    Raises:
        UserError: if a text breaks a rule of `read_table`, there is nothing in them, or the
            vocabulary is too large or too small for them; the message says what is possible.
    """
    folder = Path(folder)
    sentences = [" ".join(w.split()) for path in texts for w in _read_words(path) if w]
    if not sentences:
        raise UserError("no words in the text", path=texts[0])
    model = folder / "bpe.model"
    if token_type == "bpe":
        pieces, content = _train_bpe(sentences, vocab_size, texts[0])
        # tokens.txt is written last: where it is, the folder is whole.
        with atomic_write(model, "wb") as file:
            file.write(content)
    else:
        pieces = _characters(sentences, vocab_size, texts[0])
        model.unlink(missing_ok=True)
    tokens = [BLANK, UNKNOWN, *pieces, SOS_EOS]
    write_text(folder / "tokens.txt", "".join(f"{token}\n" for token in tokens))
    return Tokenizer.load(folder)


def _read_words(path: str | Path) -> Iterable[str]:
    return read_table(path, values="optional").values()


def _train_bpe(
    sentences: list[str], vocab_size: int | None, path: str | Path
) -> tuple[list[str], bytes]:
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    model = io.BytesIO()
    try:
        # From memory, so that no file name gets into the model: the same text, the same bytes.
        SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            normalization_rule_name="identity",
            max_sentence_length=_LONGEST_LINE,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _sentencepiece_error(str(error), vocab_size, path) from None
    return _pieces_of(SentencePieceProcessor(model_proto=model.getvalue())), model.getvalue()


def _pieces_of(model: SentencePieceProcessor) -> list[str]:
    """The pieces of a model but <unk>, <s> and </s>: the token list has three in their stead."""
    ids = range(model.get_piece_size())
    return [model.id_to_piece(i) for i in ids if not (model.is_control(i) or model.is_unknown(i))]


def _sentencepiece_error(said: str, vocab_size: int | None, path: str | Path) -> UserError:
    problem = f"--vocab-size {vocab_size} does not fit this text"
    if found := re.search(r"value <= (\d+)", said):
        return UserError(problem, path=path, remedy=f"the largest possible is {found[1]}")
    if found := re.search(r"required_chars\. \d+ vs (\d+)", said):
        return UserError(problem, path=path, remedy=f"the smallest possible is {found[1]}")
    return UserError(f"SentencePiece: {said}", path=path)


def _characters(sentences: list[str], vocab_size: int | None, path: str | Path) -> list[str]:
    counts = Counter(character for words in sentences for character in words)
    # Most frequent first, as in ESPnet's lists; ties by code point, whatever the order of lines.
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    if vocab_size is not None:
        if vocab_size <= 3:
            problem = f"--vocab-size {vocab_size} leaves no character"
            remedy = f"all characters of this text need {len(ordered) + 3}"
            raise UserError(problem, path=path, remedy=remedy)
        ordered = ordered[: vocab_size - 3]
    return [SPACE if character == " " else character for character in ordered]


def _read_tokens(path: Path) -> list[str]:
    remedy = "make it with fedtools train-tokens"
    tokens = read_words(path, remedy)
    for line, token in ((1, BLANK), (2, UNKNOWN), (len(tokens), SOS_EOS)):
        if tokens[line - 1 : line] != [token]:
            problem = f"{token!r} belongs there"
            raise UserError(problem, path=path, line=line, remedy=remedy)
    if len(tokens) < 4:
        raise UserError("no tokens but <blank>, <unk> and <sos/eos>", path=path, remedy=remedy)
    return tokens
