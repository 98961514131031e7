"""Words as they are scored, and utterances of a length that can be decoded.

Normalisation is that of Kaldi's and ESPnet's AMI recipes, so that their hypotheses and reference
texts fit ours: upper case; punctuation goes; a hyphen becomes a blank (INFRA RED), but MM-HMM and
UH-HUH are one word each; letters that are spelled, T_V_, become T. V. with their points; truncated
words (`trunc="true"`) stay as they are written; apostrophes stay ('CAUSE, DON'T, USERS'). What has
neither a letter nor a digit is no word. Where Kaldi's script loses words (UM,I without a blank is
deleted there) both are kept. The result does not change when it is normalised again.

Sentences are those of Kaldi's recipe too, on which published counts rest (12,643 utterances of the
eval set): a segment is divided after every full stop and question mark; a sentence of more than
thirty words and marks is divided at the comma, colon or exclamation mark that is nearest to its
middle in time, and its halves again. A sentence lasts from the mark before it to the mark after
it. Two things differ: a mark without a time divides nothing (Kaldi leaves the whole segment out),
and times are rounded to hundredths, not cut off.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WORD, STOP, PAUSE, SOUND = "word", "stop", "pause", "sound"
MARKS = {".": STOP, "?": STOP, ",": PAUSE, ":": PAUSE, "!": PAUSE}
APOSTROPHES = str.maketrans(dict.fromkeys("\u2018\u2019\u02bc\u0060\u00b4\u2032", "'"))
JOINED = {("MM", "HMM"), ("UH", "HUH")}
# About what people say in a meeting, and so how much text makes an hour of synthetic speech.
WORDS_PER_SECOND = 2.5


@dataclass(frozen=True)
class Token:
    """A word, a mark, or a sound that is no word.

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
    """The words of a text, normalised and single-spaced; "" if there is none."""
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
    """Divide what was said from `start` to `end` into sentences with at least one word each.

    Args:
        tokens: in order.
        start: where the first sentence begins, in the unit of the tokens.
        end: where the last one ends.
        most: the most words and marks of a sentence that has a mark within; 0 divides nothing.
    """
    if most == 0:
        parts = [(list(tokens), start, end)]
    else:
        parts = [half for part in _at_stops(tokens, start, end) for half in _halves(part, most)]
    told = [Sentence(begin, stop, _text(own)) for own, begin, stop in parts]
    return [sentence for sentence in told if sentence.text]


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
    """The part, divided at marks until each piece is short enough or has no mark within."""
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
