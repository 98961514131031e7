"""The word vocabulary of a neural language model, and the counts of its words in training text.

Two files, in the folder of a model and next to all scores that it gave:

    words.txt     one word a line; a word's id is its line, counted from 0
    unigram.tsv   word, count: occurrences in the training text, in the order of words.txt; and
                  words: how many distinct words of the text the line stands for, 1 but for `<unk>`

Line 0 is `</s>`, the end of a sentence: a model predicts it and is never given it, as ESPnet's
TransformerLM requires of its id 0, the padding. Line 1 is `<unk>`: every word that is not in the
list. The rest are words by falling count, those of equal count in the C locale's order. These are
all events that a model distributes its probability over, so a unigram distribution is a vector over
the very same lines. `<s>`, the start, is never predicted, and has no line: models keep an input of
their own for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv, write_tsv
from fedtools.core.text_files import read_words
from fedtools.data.symbols import END, START, UNKNOWN, check_sentence, nfc, words_of

WORDS, UNIGRAM = "words.txt", "unigram.tsv"
END_ID, UNKNOWN_ID = 0, 1
_COLUMNS = ("word", "count", "words")
_REMEDY = "make it with fedtools train-nnlm"


class Vocabulary:
    """Words and their ids.

    Args:
        words: `</s>`, `<unk>`, then the words proper.

    Attributes:
        words: as given.
        ids: word, in Unicode's form NFC -> id.
    """

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        self.ids = {nfc(word): index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    @property
    def start(self) -> int:
        """Return the id after the last word's: a model's input for `<s>`."""
        return len(self.words)

    def encode(self, words: str) -> list[int]:
        """Return the ids of words separated by whitespace, then that of `</s>`.

        Raises:
            UserError: if a reserved word, such as `<s>` or `</s>`, is among the words.
        """
        check_sentence(words)
        return [*(self.ids.get(word, UNKNOWN_ID) for word in words_of(words)), END_ID]

    @classmethod
    def read(cls, folder: str | Path) -> Vocabulary:
        """Read FOLDER/words.txt; raise a `UserError` with file and line of an error."""
        path = Path(folder) / WORDS
        words = read_words(path, _REMEDY)
        for index, mark in ((END_ID, END), (UNKNOWN_ID, UNKNOWN)):
            if words[index : index + 1] != [mark]:
                problem = f"{mark!r} belongs there"
                raise UserError(problem, path=path, line=index + 1, remedy=_REMEDY)
        if START in words:
            line = words.index(START) + 1
            raise UserError(f"{START!r} is not a word", path=path, line=line, remedy=_REMEDY)
        found = cls(words)
        for index, word in enumerate(words):
            if found.ids[nfc(word)] != index:
                problem = f"{word!r} is duplicated, in two forms of Unicode"
                raise UserError(problem, path=path, line=index + 1, remedy=_REMEDY)
        return found

    def write(self, folder: str | Path) -> None:
        """Write FOLDER/words.txt."""
        write_text(Path(folder) / WORDS, "".join(f"{word}\n" for word in self.words))


def make_vocabulary(
    sentences: Iterable[Sequence[str]], size: int | None = None, min_count: int = 1
) -> tuple[Vocabulary, np.ndarray, int]:
    """Make the vocabulary of a text, with unigram counts and the number of words behind `<unk>`.

    Args:
        sentences: the words of each, as `read_sentences` yields them.
        size: the most lines, `</s>` and `<unk>` included; None for any number.
        min_count: words that are rarer are `<unk>`.

    Returns:
        The vocabulary; int64 counts (words,): for `</s>` the number of sentences, for `<unk>` the
        number of words that are left out; and the number of distinct words that are left out.
    """
    counts: Counter[str] = Counter()
    number = 0
    for words in sentences:
        counts.update(words)
        number += 1
    unknown = counts.pop(UNKNOWN, 0)
    different = int(unknown > 0)
    ordered = sorted(counts, key=lambda word: (-counts[word], word.encode("utf-8")))
    kept = [word for word in ordered if counts[word] >= min_count]
    kept = kept if size is None else kept[: max(0, size - 2)]
    unknown += sum(counts.values()) - sum(counts[word] for word in kept)
    different += len(ordered) - len(kept)
    found = [number, unknown, *(counts[word] for word in kept)]
    return Vocabulary([END, UNKNOWN, *kept]), np.array(found, dtype=np.int64), different


def write_unigram(
    folder: str | Path, vocabulary: Vocabulary, counts: np.ndarray, unknown: int
) -> None:
    """Write FOLDER/unigram.tsv, with `counts` (words,) and `unknown` from `make_vocabulary`."""
    rows = [
        {"word": word, "count": int(number), "words": 1}
        for word, number in zip(vocabulary.words, counts, strict=True)
    ]
    rows[UNKNOWN_ID]["words"] = unknown
    write_tsv(Path(folder) / UNIGRAM, _COLUMNS, rows)


def read_unigram(folder: str | Path, vocabulary: Vocabulary) -> tuple[np.ndarray, int]:
    """Read FOLDER/unigram.tsv: int64 (words,), in the order of the vocabulary, and `unknown`.

    Raises:
        UserError: naming file and line, if it is damaged or of another vocabulary.
    """
    path = Path(folder) / UNIGRAM
    rows = read_tsv(path, _COLUMNS)
    if len(rows) != len(vocabulary):
        problem = f"{len(rows)} words, {Path(folder) / WORDS} has {len(vocabulary)}"
        raise UserError(problem, path=path, remedy=_REMEDY)
    for line, (row, word) in enumerate(zip(rows, vocabulary.words, strict=True), 2):
        if row["word"] != word:
            problem = f"{row['word']!r} where {word!r} belongs"
            raise UserError(problem, path=path, line=line, remedy=_REMEDY)
    counts = [count(row, "count", path, line) for line, row in enumerate(rows, 2)]
    unknown = count(rows[UNKNOWN_ID], "words", path, UNKNOWN_ID + 2)
    return np.array(counts, dtype=np.int64), unknown
