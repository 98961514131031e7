"""Texts that repeat themselves, as a decoder writes them that has lost its way.

Letters and words are counted, never tokens: a letter of Georgian or Burmese is two or three
byte-level tokens, of which the first ones are always the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence

# A text repeats itself if it has at least this many symbols, and fewer of its trigrams are distinct
# than this share.
_LONG, _NEW = 12, 0.5


def repeats(text: str) -> bool:
    """Return whether a text repeats its words, or the letters of one of them."""
    words = text.split()
    return _loops(words) or any(_loops(word) for word in words)


def _loops(symbols: Sequence[Hashable]) -> bool:
    """Return whether few of the symbols' trigrams are distinct."""
    triples = list(zip(symbols, symbols[1:], symbols[2:], strict=False))
    return len(symbols) >= _LONG and len(set(triples)) < _NEW * len(triples)


def compression_ratio(text: str) -> float:
    """Return how many times zlib makes a text shorter: Whisper's own measure of repetition.

    In every script, a letter is one byte. Whisper counts the two or three bytes of UTF-8, so that
    ordinary sentences of some scripts compress as well as repetitions in English.
    """
    others = {letter: number for number, letter in enumerate(sorted({*text} - _ASCII))}
    whole = bytes(
        ord(letter) if letter in _ASCII else 128 + others[letter] % 128 for letter in text
    )
    return len(whole) / len(zlib.compress(whole))


_ASCII = frozenset(map(chr, range(128)))
