"""Normalisation of AMI's words for scoring, and division of segments into sentences to decode.

Normalisation is that of Kaldi's and ESPnet's AMI recipes, so that their hypotheses and reference
texts match ours: upper case; punctuation is removed; a hyphen becomes a space (INFRA RED), but
MM-HMM and UH-HUH are one word each; spelled letters, T_V_, become T. V. with full stops; truncated
words (`trunc="true"`) and apostrophes ('CAUSE, DON'T, USERS') are kept. A string with neither a
letter nor a digit is not a word. Kaldi's script loses words that a comma joins (it deletes UM,I);
here both are kept. Normalising the result again does not change it.

Sentences are also those of Kaldi's recipe, on which published counts are based (12,643 utterances
of the eval set): a segment is divided after every full stop and question mark; a sentence of more
than thirty words and marks is divided at the comma, colon or exclamation mark nearest to its middle
in time, and its halves again. A sentence lasts from the mark before it to the mark after it. There
are two differences: a segment is not divided at a mark without a time (Kaldi leaves out the whole
segment), and times are rounded to hundredths, not truncated.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WORD, STOP, PAUSE, SOUND = "word", "stop", "pause", "sound"
MARKS = {".": STOP, "?": STOP, ",": PAUSE, ":": PAUSE, "!": PAUSE}
APOSTROPHES = str.maketrans(dict.fromkeys("\u2018\u2019\u02bc\u0060\u00b4\u2032", "'"))
JOINED = {("MM", "HMM"), ("UH", "HUH")}
# Approximate rate of speech in meetings, to estimate the text for an hour of synthetic speech.
WORDS_PER_SECOND = 2.5


@dataclass(frozen=True)
class Token:
    """A word, a punctuation mark, or a non-word sound.

    `start` and `end` are in hundredths of a second, or None.
    """

    text: str
    kind: str
    start: int | None
    end: int | None


@dataclass(frozen=True)
class Sentence:
    """Words and their times, in hundredths of a second."""

    start: int
    end: int
    text: str


def words_of(text: str) -> str:
    """Return the words of a text, normalised and single-spaced, or "" if there is none."""
    text = unicodedata.normalize("NFC", text.upper()).translate(APOSTROPHES)
    text = "".join(c if c.isalnum() or c in "'._" else " " for c in text).replace("_", ". ")
    words: list[str] = []
    for piece in text.split():
        spelled = len(piece) == 2 and piece[0].isalpha() and piece[1] == "."
        kept = piece if spelled else piece.replace(".", " ")
        for word in kept.split():
            if words and (words[-1], word) in JOINED:
                words[-1] += f"-{word}"
            elif any(map(str.isalnum, word)):
                words.append(word)
    return " ".join(words)


def sentences(tokens: Sequence[Token], start: int, end: int, most: int) -> list[Sentence]:
    """Divide the tokens from `start` to `end` into sentences with at least one word each.

    Args:
        tokens: the tokens, in order.
        start: where the first sentence begins, in the unit of the tokens.
        end: where the last one ends.
        most: maximum number of words and marks of a sentence that can be divided at a mark; 0: do
            not divide.
    """
    if most == 0:
        parts = [(list(tokens), start, end)]
    else:
        parts = [half for part in _at_stops(tokens, start, end) for half in _halves(part, most)]
    found = [Sentence(begin, stop, _text(own)) for own, begin, stop in parts]
    return [sentence for sentence in found if sentence.text]


Part = tuple[list[Token], int, int]


def _text(tokens: Iterable[Token]) -> str:
    return words_of(" ".join(token.text for token in tokens if token.kind == WORD))


def _at_stops(tokens: Iterable[Token], start: int, end: int) -> list[Part]:
    parts: list[Part] = []
    own: list[Token] = []
    for token in tokens:
        if token.kind == STOP and token.start is not None:
            parts.append((own, start, token.start))
            own, start = [], token.start
        else:
            own.append(token)
    return [*parts, (own, start, end)]


def _halves(part: Part, most: int) -> list[Part]:
    """Divide a part at marks until each piece is short enough or has no mark within."""
    waiting, done = [part], []
    while waiting:
        own, start, end = waiting.pop()
        places = [
            (abs(2 * token.start - start - end), place)
            for place, token in enumerate(own)
            if token.kind == PAUSE and token.start is not None and start < token.start < end
        ]
        if not places or sum(token.kind in (WORD, PAUSE) for token in own) <= most:
            done.append((own, start, end))
            continue
        place = min(places)[1]
        middle = own[place].start
        waiting += [(own[place + 1 :], middle, end), (own[:place], start, middle)]
    return done
