"""A client's own words: names and jargon that its rescoring favours, and that it never sends.

A list has words or phrases. Each word of a hypothesis that is part of a listed phrase gets a bonus,
independent of the language models: most listed words are unknown to both of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.datadir import check_id
from fedtools.data.symbols import is_unknown, words_of

COLUMNS = ("client", "phrase")
# Marks the end of a phrase in a trie.
_END = ""


class Trie:
    """A trie of phrases, word by word."""

    def __init__(self, phrases: Iterable[str]):
        self._root: dict = {}
        for phrase in phrases:
            node = self._root
            for word in words_of(phrase):
                node = node.setdefault(word, {})
            node[_END] = {}

    def covered(self, words: Sequence[str]) -> int:
        """Count the words that are parts of phrases, from the left, the longest phrase first."""
        at = count = 0
        while at < len(words):
            length = self._longest(words, at)
            count += length
            at += max(1, length)
        return count

    def _longest(self, words: Sequence[str], begin: int) -> int:
        node, longest = self._root, 0
        for length, word in enumerate(words[begin:], 1):
            if word not in node:
                break
            node = node[word]
            longest = length if _END in node else longest
        return longest


def read_phrases(path: str | Path) -> dict[str, list[str]]:
    """Read client -> its phrases from a table of `COLUMNS`.

    Raises:
        UserError: if it is malformed, or a phrase is empty.
    """
    found: dict[str, list[str]] = {}
    for line, row in enumerate(read_tsv(path, COLUMNS), 2):
        check_id(row["client"], "client", path, line)
        if not row["phrase"].split():
            raise UserError("empty phrase", path=path, line=line)
        found.setdefault(row["client"], []).append(row["phrase"])
    return found


def write_phrases(path: str | Path, phrases: Mapping[str, Iterable[str]]) -> None:
    """Write a table for `read_phrases`."""
    rows = [
        {"client": client, "phrase": phrase} for client in phrases for phrase in phrases[client]
    ]
    write_tsv(path, COLUMNS, rows)


def rare_words(
    spoken: Mapping[str, Sequence[str]], background: Mapping[str, int], most: int, times: int = 2
) -> dict[str, list[str]]:
    """Return the words that a client has said several times and that are rare in the background.

    The unknown word is not among them: its bonus would be one for any word.

    Args:
        spoken: client -> sentences.
        background: word -> its count in the background text.
        most: the highest count in the background of a listed word.
        times: the lowest count at the client of a listed word.
    """
    found = {}
    for client, sentences in spoken.items():
        counts = Counter(word for sentence in sentences for word in words_of(sentence))
        found[client] = sorted(
            word
            for word, count in counts.items()
            if count >= times and background.get(word, 0) <= most and not is_unknown(word)
        )
    return found


def covered_words(
    hypotheses: Sequence[str], owners: Mapping[str, slice], phrases: Mapping[str, Sequence[str]]
) -> np.ndarray:
    """Count the words of each hypothesis that its client's list covers, (H,).

    Args:
        hypotheses: of all clients.
        owners: client -> its hypotheses.
        phrases: client -> its list, for clients that have one.

    Raises:
        UserError: if a list belongs to no client.
    """
    if unknown := sorted(phrases.keys() - owners.keys()):
        raise UserError(f"a list of words belongs to {unknown[0]!r}, which is not a client")
    found = np.zeros(len(hypotheses))
    for client, own in phrases.items():
        trie, part = Trie(own), owners[client]
        found[part] = [trie.covered(words_of(words)) for words in hypotheses[part]]
    return found
