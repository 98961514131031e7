"""Tokens: characters, BPE or words; `fedtools.data.symbols` describes their folder."""

from __future__ import annotations

import io
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from fedtools.core.errors import UserError, some
from fedtools.data.datadir import read_transcripts
from fedtools.data.symbols import (
    BLANK,
    BPE,
    CHAR,
    SOS_EOS,
    SPACE,
    TOKENS,
    UNKNOWN,
    WORD,
    characters_of,
    is_unknown,
    nfc,
    pieces_of,
    read_tokens,
    words_of,
    write_tokens,
)

WORD_START = "▁"  # SentencePiece's mark in front of the first piece of a word
# SentencePiece leaves out longer lines silently (its default is 4192 bytes).
_LONGEST_LINE = 1 << 24


class Tokenizer:
    """Words to token ids and back; characters, BPE and words behave alike.

    A word `<unk>` becomes the token `<unk>`, as does a word that no token covers.

    Args:
        tokens: the token list; an id is a position in it. `tokens[0]` is the CTC blank.
        model: the bytes of a SentencePiece model, or None for other tokens than its pieces.
        words: whether tokens without a model are words, and not characters.
    """

    blank = 0
    unknown = 1

    def __init__(self, tokens: Sequence[str], model: bytes | None = None, words: bool = False):
        self.tokens = list(tokens)
        self.token_type = BPE if model is not None else WORD if words else CHAR
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        # Among characters, a symbol of several characters matches anywhere, as in ESPnet.
        special = (BLANK, UNKNOWN, SPACE, SOS_EOS)
        symbols = [token for token in self.tokens if len(token) > 1 and token not in special]
        longest_first = sorted(symbols, key=len, reverse=True)
        self._character = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)
        if model is not None:
            from sentencepiece import SentencePieceProcessor

            self._pieces = SentencePieceProcessor(model_proto=model)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokens that `train_tokens` (or ESPnet) wrote.

        Raises:
            UserError: if tokens.txt is missing, is no ESPnet token list, or does not belong to
                bpe.model.
        """
        tokens, token_type, model = read_tokens(folder)
        return cls(tokens, model, words=token_type == WORD)

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, words: str) -> list[str]:
        """Split words, separated by whitespace, into tokens; what no token covers becomes <unk>."""
        found = words_of(words)
        if self.token_type == CHAR:
            spelled: list[str] = []
            for word in found:
                spelled += [SPACE] * bool(spelled)
                spelled += [word] if word == UNKNOWN else self._characters(word)
            found = spelled
        elif self.token_type == BPE:
            pieces: list[str] = []
            for unknown, run in groupby(found, key=is_unknown):
                if unknown:
                    # As SentencePiece encodes a word without any piece.
                    mark = [WORD_START] * (WORD_START in self._ids)
                    pieces += [*mark, UNKNOWN] * len(list(run))
                else:
                    pieces += self._pieces.encode(" ".join(run), out_type=str)
            found = pieces
        # A word of a text is never the blank, even if it is spelled like it.
        known = self._ids.keys() - {BLANK, SOS_EOS}
        return [token if token in known else UNKNOWN for token in found]

    def _characters(self, word: str) -> Iterator[str]:
        for character in self._character.findall(word):
            parts = list(unicodedata.normalize("NFD", character))
            # Letters and the marks on them, or the parts of a Korean syllable, may be tokens.
            whole = character in self._ids or not self._ids.keys() >= set(parts)
            yield from [character] if whole else parts

    def encode(self, words: str) -> list[int]:
        """Convert words, separated by whitespace, to token ids, <unk> for what no token covers."""
        return [self._ids[token] for token in self.split(words)]

    def decode(self, ids: Iterable[int]) -> str:
        """Convert token ids to words, separated by single blanks, without <blank> and <sos/eos>."""
        tokens = [self.tokens[index] for index in ids]
        tokens = [token for token in tokens if token not in (BLANK, SOS_EOS)]
        if self.token_type == CHAR:
            tokens = [" " if token == SPACE else token for token in tokens]
        text = (" " if self.token_type == WORD else "").join(tokens)
        if self.token_type == BPE:
            text = text.replace(WORD_START, " ")
        return nfc(" ".join(text.split()))


def warn_of_unspelled(tokenizer: Tokenizer, path: Path, folder: str | Path) -> None:
    """Warn on stderr of what the tokens cannot spell in transcripts, however rare it is.

    Args:
        path: a Kaldi `text`; without it there is no warning.
        folder: of the tokens.
    """
    texts = read_transcripts(path).values() if path.exists() else ()
    counts = Counter(word for text in texts for word in words_of(text) if word != UNKNOWN)
    lost = [word for word in counts if UNKNOWN in tokenizer.split(word)]
    if not lost:
        return
    letters = sorted({letter for word in lost for letter in characters_of(word)})
    missing = [letter for letter in letters if UNKNOWN in tokenizer.split(letter)]
    # Words that are tokens have no letters of their own.
    lacking = missing if tokenizer.token_type != WORD and missing else lost
    unknown, total = sum(counts[word] for word in lost), counts.total()
    share = f"{unknown} of {total} words ({100 * unknown / total:.2g} %)"
    problem = f"{Path(folder) / TOKENS} lacks {some(lacking)}, so that {share} become {UNKNOWN}"
    remedy = "train tokens on a text that has them, or write both texts in the same case"
    print(f"warning: {path}: {problem}; {remedy}", file=sys.stderr)


def train_tokens(
    texts: Sequence[str | Path],
    folder: str | Path,
    token_type: str = BPE,
    vocab_size: int | None = None,
) -> Tokenizer:
    """Make the tokens of one or several Kaldi text files and write them to `folder`.

    BPE is SentencePiece's (Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226), without
    any normalisation of the text, so that what was encoded is decoded unchanged.

    Args:
        texts: Kaldi `text` files; utterances without words are ignored.
        folder: gets tokens.txt and, for BPE, bpe.model.
        token_type: "bpe" or "char".
        vocab_size: the number of lines of tokens.txt; for characters the most lines, with None for
            any number.

    Returns:
        The tokenizer, as `Tokenizer.load` reads it back.

    Raises:
        UserError: if a text breaks a rule of `read_transcripts`, the texts have no words, or the
            vocabulary is too large or too small for them; the message gives the possible size.
    """
    sentences = [sentence for path in texts for sentence in _spelled(path) if sentence]
    if not sentences:
        raise UserError("no words in the text", path=texts[0])
    if token_type == BPE:
        pieces, model = _train_bpe(sentences, vocab_size, texts[0])
    else:
        pieces, model = _characters(sentences, vocab_size, texts[0]), None
    write_tokens(folder, [BLANK, UNKNOWN, *pieces, SOS_EOS], token_type, model)
    return Tokenizer.load(folder)


def _spelled(path: str | Path) -> Iterable[str]:
    """Yield the sentences of a text without unknown words, which have no spelling."""
    for sentence in read_transcripts(path).values():
        yield " ".join(word for word in words_of(sentence) if word != UNKNOWN)


def _train_bpe(
    sentences: list[str], vocab_size: int | None, path: str | Path
) -> tuple[list[str], bytes]:
    from sentencepiece import SentencePieceTrainer

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
    return pieces_of(model.getvalue(), path), model.getvalue()


def _sentencepiece_error(message: str, vocab_size: int | None, path: str | Path) -> UserError:
    problem = f"--vocab-size {vocab_size} does not fit this text"
    if found := re.search(r"value <= (\d+)", message):
        return UserError(problem, path=path, remedy=f"the largest possible is {found[1]}")
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return UserError(problem, path=path, remedy=f"the smallest possible is {found[1]}")
    return UserError(f"SentencePiece: {message}", path=path)


def _characters(sentences: list[str], vocab_size: int | None, path: str | Path) -> list[str]:
    counts = Counter(character for words in sentences for character in words)
    # Most frequent first, as in ESPnet's lists; ties by code point, independent of lines' order.
    ordered = sorted(counts, key=lambda character: (-counts[character], character))
    if vocab_size is not None:
        if vocab_size <= 3:
            problem = f"--vocab-size {vocab_size} leaves no character"
            remedy = f"all characters of this text need {len(ordered) + 3}"
            raise UserError(problem, path=path, remedy=remedy)
        ordered = ordered[: vocab_size - 3]
    return [SPACE if character == " " else character for character in ordered]
