"""Symbols in texts, as opposed to words, and token lists, which are made of both.

`<unk>`, in upper or lower case, is an unknown word: all readers of text map it to the unknown word
of their model, and no tokenizer spells it. (KenLM takes `<UNK>` for `<unk>` when it reads a model,
but not when it estimates one.) Other marks of unknown words in some corpora, such as `[UNK]`, are
ordinary words.

Words of references and hypotheses, of texts and vocabularies, are compared in Unicode's form NFC,
whatever the form in the files.

`RESERVED` are symbols that programs add or look for, in upper or lower case: no transcript and no
text of a language model may have one as a word.

A folder of tokens, as `fedtools train-tokens` and `fedtools import` write it:

    tokens.txt   one token per line: <blank> first, <unk> second, <sos/eos> last, as in ESPnet's
                 token_list
    bpe.model    the SentencePiece model, if the tokens are its pieces
    token_type   "word", if each token is a whole word (or a phone), separated by blanks

Without the last two files, tokens are characters; a token of several characters is a symbol such as
`<noise>`, which is one token wherever it stands. Tokens cannot have characters that texts cannot
have: unprintable ones, except for other kinds of spaces and joiners, and ones that are not in NFC.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from fedtools.core.atomic import atomic_write, write_text
from fedtools.core.errors import UserError
from fedtools.core.text_files import read_bytes, read_lines

BLANK, UNKNOWN, SPACE, SOS_EOS = "<blank>", "<unk>", "<space>", "<sos/eos>"
START, END = "<s>", "</s>"
RESERVED = (START, END, BLANK, SPACE, SOS_EOS, "#0")

# The joiners of Indic and Arabic script, which are invisible but change the characters around them.
JOINERS = str.maketrans("", "", "\u200c\u200d")
# A symbol, or any other character; "#0" is one only where it is a word.
_CHARACTER = re.compile(
    "|".join([*(word for word in (UNKNOWN, *RESERVED) if word[0] == "<"), "."]),
    re.DOTALL | re.IGNORECASE | re.ASCII,
)

TOKENS, BPE_MODEL, TOKEN_TYPE = FILES = ("tokens.txt", "bpe.model", "token_type")
CHAR, BPE, WORD = "char", "bpe", "word"
_REMEDY = "make it with fedtools train-tokens"
# From this share of unknown words on, text and vocabulary probably differ in case or spelling.
UNKNOWN_SHARE = 0.2


def is_unknown(word: str) -> bool:
    """Return whether a word is the symbol of the unknown word, in any case."""
    return word[:1] == "<" and word.lower() == UNKNOWN


def nfc(text: str) -> str:
    """Return a text in Unicode's form NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def characters_of(text: str) -> list[str]:
    """Return the characters of a text; a symbol is one, wherever it stands."""
    return _CHARACTER.findall(text)


def unprintable(text: str) -> str:
    """Return the first character that texts must not have, or "".

    Such a character does not print, and is neither a kind of space nor a joiner: it would turn a
    word into another one that looks the same.
    """
    if text.isprintable():
        return ""
    others = (
        mark for mark in text.translate(JOINERS) if not (mark.isprintable() or mark.isspace())
    )
    return next(others, "")


def words_of(sentence: str) -> list[str]:
    """Return the words of a sentence, in NFC, with every unknown word as `<unk>`."""
    words = nfc(sentence).split()
    # For speed: most sentences have no symbol at all.
    return [UNKNOWN if is_unknown(word) else word for word in words] if "<" in sentence else words


def check_sentence(sentence: str, path: str | Path | None = None, line: int | None = None) -> None:
    """Raise a `UserError`, naming `path` and `line`, for a sentence with a word of `RESERVED`."""
    if "<" not in sentence and "#" not in sentence:
        return
    for word in sentence.split():
        if word.lower() in RESERVED:
            problem = f"the word {word} is reserved"
            raise UserError(problem, path=path, line=line, remedy="remove it from the text")


def warn_of_unknown(
    unknown: int, total: int, path: str | Path, vocabulary: str | Path, units: str = "words"
) -> None:
    """Warn on stderr if `UNKNOWN_SHARE` of a text's words, or more, are not in a vocabulary.

    Args:
        unknown, total: the number of unknown words, and of all words.
        path: the text.
        vocabulary: the vocabulary, or its file.
    """
    if total and unknown >= UNKNOWN_SHARE * total:
        problem = (
            f"{unknown} of {total} {units} ({unknown / total:.0%}) are unknown to {vocabulary}"
        )
        remedy = "write both in the same case and spelling (import-nbest has --normalise)"
        print(f"warning: {path}: {problem}; {remedy}", file=sys.stderr)


def check_tokens(tokens: Sequence[object], path: str | Path, lines: bool = True) -> list[str]:
    """Return a token list as texts, after checking it.

    Args:
        lines: whether each token is a line of the file.

    Raises:
        UserError: naming the file, and the line if `lines`, if it is not a token list.
    """

    remedy = _REMEDY if lines else "a model with such tokens cannot be imported"

    def refuse(index: int, problem: str, remedy: str = remedy) -> UserError:
        place = "" if lines else f"token_list, token {index + 1}: "
        line = index + 1 if lines else None
        return UserError(place + problem, path=path, line=line, remedy=remedy)

    seen: set[str] = set()
    for index, token in enumerate(tokens):
        if not isinstance(token, str) or not token or set(token) & set(" \n\0"):
            raise refuse(index, f"{token!r} is no token")
        if "\r" in token:
            raise refuse(index, "carriage return", "run dos2unix")
        # In texts, these control characters separate words.
        blanks = (mark for mark in token if unicodedata.category(mark) in ("Cc", "Zl", "Zp"))
        if mark := unprintable(token) or next(blanks, ""):
            problem = f"no text has the token {token!r}: U+{ord(mark):04X} does not print"
            raise refuse(index, problem)
        if token != nfc(token):
            codes = " ".join(f"U+{ord(mark):04X}" for mark in token)
            problem = f"no text has the token {token!r} ({codes}): it is not in Unicode's form NFC"
            raise refuse(index, problem)
        if token in seen:
            raise refuse(index, f"{token!r} is duplicated")
        seen.add(token)
    for index, token in ((0, BLANK), (1, UNKNOWN), (len(tokens) - 1, SOS_EOS)):
        if tokens[index : index + 1] != [token]:
            found = f", not {tokens[index]!r}" if 0 <= index < len(tokens) else ""
            raise refuse(max(index, 0), f"{token!r} belongs there{found}")
    if len(tokens) < 4:
        problem = f"no tokens but {BLANK}, {UNKNOWN} and {SOS_EOS}"
        raise UserError(problem, path=path, remedy=remedy)
    return [str(token) for token in tokens]


def pieces_of(model: bytes, path: str | Path) -> list[str]:
    """Return the pieces of a SentencePiece model except <unk>, <s> and </s>.

    A token list has <blank>, <unk> and <sos/eos> instead.

    Raises:
        UserError: if the bytes are not a SentencePiece model.
    """
    from sentencepiece import SentencePieceProcessor

    try:
        # SentencePiece takes empty bytes for a missing argument, and fails only later.
        found = SentencePieceProcessor(model_proto=model or b"\0")
        ids = range(found.get_piece_size())
        kept = [i for i in ids if not (found.is_control(i) or found.is_unknown(i))]
        return [found.id_to_piece(i) for i in kept]
    except (RuntimeError, UnicodeDecodeError):
        remedy = "make it again"
        raise UserError("not a SentencePiece model", path=path, remedy=remedy) from None


def check_pieces(model: bytes, tokens: Sequence[str], path: Path, where: str | Path) -> None:
    """Raise a `UserError` if a piece of a SentencePiece model is missing in a token list."""
    known = set(tokens)
    for piece in pieces_of(model, path):
        if piece not in known:
            problem = f"the model's piece {piece!r} is not in {where}"
            raise UserError(problem, path=path, remedy="give the model of these tokens")


def read_tokens(folder: str | Path) -> tuple[list[str], str, bytes | None]:
    """Read a folder of tokens.

    Returns:
        The tokens, their type, and the SentencePiece model if the type is "bpe".

    Raises:
        UserError: naming file and line, if the token list is missing or invalid, or the model does
            not fit the tokens.
    """
    folder = Path(folder)
    tokens = read_lines(folder / TOKENS, _REMEDY)
    if not tokens:
        raise UserError("empty", path=folder / TOKENS, remedy=_REMEDY)
    check_tokens(tokens, folder / TOKENS)
    if (folder / BPE_MODEL).exists():
        model = read_bytes(folder / BPE_MODEL)
        check_pieces(model, tokens, folder / BPE_MODEL, folder / TOKENS)
        return tokens, BPE, model
    if not (folder / TOKEN_TYPE).exists():
        return tokens, CHAR, None
    if (found := read_lines(folder / TOKEN_TYPE)) != [WORD]:
        problem = f"{chr(10).join(found)!r}, not {WORD}"
        raise UserError(problem, path=folder / TOKEN_TYPE, remedy=_REMEDY)
    return tokens, WORD, None


def write_tokens(
    folder: str | Path, tokens: Sequence[str], token_type: str, model: bytes | None
) -> None:
    """Write a folder of tokens; tokens.txt comes last, and marks the folder as complete."""
    folder = Path(folder)
    if model is None:
        (folder / BPE_MODEL).unlink(missing_ok=True)
    else:
        with atomic_write(folder / BPE_MODEL, "wb") as file:
            file.write(model)
    if token_type == WORD:
        write_text(folder / TOKEN_TYPE, f"{WORD}\n")
    else:
        (folder / TOKEN_TYPE).unlink(missing_ok=True)
    write_text(folder / TOKENS, "".join(f"{token}\n" for token in tokens))
