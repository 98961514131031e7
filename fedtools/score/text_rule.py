"""Text normalisation before scoring, for `fedtools score --text-rule spoken`.

Whisper writes "Mark's 3rd, isn't it?" where a transcript has "MARK'S THIRD ISN'T IT". References
and hypotheses are both converted to the spoken words of their language
(`fedtools.data.written_to_spoken`): lower case, without punctuation. In other languages than
English, digits stay. The files are not changed.

In English, numbers, amounts of money and titles are first written as by Whisper's own normaliser
(Radford et al., ICML 2023, appendix C), for which "nineteen ninety five" and "one nine nine five"
are 1995; then all are spelled. Numbers that are read in several ways are spelled digit by digit: a
wrong digit is one error.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from itertools import groupby
from typing import Literal

from fedtools.core.errors import INSTALL_PRETRAINED, UserError
from fedtools.data.languages import main_code
from fedtools.data.symbols import is_unknown
from fedtools.data.written_to_spoken import APOSTROPHES, lower, normalise

TextRule = Literal["none", "spoken"]

# A number with its sign, its currency, its decimals, the ending of an ordinal or of a decade, and
# per cent.
_NUMBER = re.compile(r"(?<![\w.])([-+])?([$£€¢])?(\d+)((?:\.\d+)+)?(st|nd|rd|th|s)?(%)?(?!\w)")
# Numbers after each other are one in digits; Whisper's normaliser writes a single 1 as "one".
_ROW = re.compile(r"(?<![\w.$£€¢+-])(?:\d+|one)(?: (?:\d+|one))+(?![\w.%])")
_CODE = re.compile(r"(?<![\w.])0\d+(?![\w.])")
_LONGEST, _PASSES = 30, 4
_HALF = re.compile(r"(?<![\d/])(\d+ )?1/2(?![\d/])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
# Currencies, and hundredths of them.
_MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}
_MARKS = {"&": " and ", "°": " degrees ", "\u2212": "-", "½": " 1/2 "}


def plain(text: str, rule: TextRule, language: str = "en") -> str:
    """Apply a text rule to a text.

    Args:
        text: words separated by blanks.
        rule: "none" leaves the text as it is.
        language: a language code.

    Raises:
        UserError: if transformers or num2words are missing, for English.
    """
    if rule == "none":
        return text
    if main_code(language) != "en":
        return _words(text, language)
    # What is left out of a word may leave a number, as of "t0-day" and "o|".
    for _ in range(_PASSES):
        before, text = text, _words(_with_numbers(text), language)
        if text == before:
            break
    return text


def _words(text: str, language: str) -> str:
    return " ".join(filter(None, (_word(word, language) for word in text.split())))


def _word(word: str, language: str) -> str:
    """Return the spoken words of one written word."""
    if is_unknown(word):
        return word
    words, reason = normalise(word, language)
    if words or reason == "empty text":
        return words
    # A word without a spoken form is compared as it is written, except for case and punctuation.
    kept = "".join(mark if mark.isalnum() or mark == "'" else " " for mark in word)
    return " ".join(normalise(part, language)[0] or lower(part, language) for part in kept.split())


def _with_numbers(text: str) -> str:
    """Return an English text with numbers, amounts and titles spelled in one way."""
    found, numbers = [], _whispers()
    # An unknown word is no part of a number.
    for unknown, words in groupby(text.split(), is_unknown):
        if unknown:
            found.extend(words)
            continue
        part = lower(" ".join(words), "en")
        for mark, spoken in _MARKS.items():
            part = part.replace(mark, spoken)
        part = _THOUSANDS.sub("", " ".join(_plain_letters(part).split()))
        part = _HALF.sub(lambda half: f"{half[1]}and a half" if half[1] else "one half", part)
        part = re.sub(r"\.(?!\d)|(?<=\d)[-/:](?=\d)", " ", part)
        part = re.sub(r"""(?!(?<!\S)[-+][$£€¢]?\d)[^\w\s'.%$¢€£]""", _blank, part)
        # Leading zeros would be lost.
        part = _CODE.sub(lambda code: " ".join(code[0]), part)
        for title, spoken in numbers.titles.items():
            part = title.sub(spoken, part)
        part = _ROW.sub(_joined, " ".join(numbers.standardise(part).split()))
        found.append(_NUMBER.sub(_spelled, part))
    return " ".join(found)


def _plain_letters(text: str) -> str:
    """Return a text without marks on letters, as English has them removed."""
    # A vulgar fraction gets a slash of its own.
    whole = unicodedata.normalize("NFKD", text).replace("\u2044", " over ")
    return "".join(mark for mark in whole if unicodedata.category(mark) != "Mn")


def _joined(row: re.Match[str]) -> str:
    digits = row[0].replace("one", "1").replace(" ", "")
    return digits if re.search(r"\d", row[0]) else row[0]


def _blank(found: re.Match[str]) -> str:
    """Return a blank for punctuation that would keep a number from being seen."""
    mark = found[0]
    return " " if unicodedata.category(mark)[0] == "P" and mark not in APOSTROPHES else mark


class _Whispers:
    """The numbers and titles of Whisper's normaliser for English, in transformers.

    Attributes:
        titles: patterns of abbreviated titles, and their words.
    """

    def __init__(self) -> None:
        try:
            from transformers.models.whisper.english_normalizer import EnglishTextNormalizer
        except ImportError:
            problem = "the text rule spoken needs transformers"
            raise UserError(problem, remedy=INSTALL_PRETRAINED) from None
        whole = EnglishTextNormalizer({})
        self._numbers = whole.standardize_numbers
        # Replacements of whole words by a word and a blank; others are of contractions.
        self.titles = {
            re.compile(pattern): spoken
            for pattern, spoken in whole.replacers.items()
            if spoken.endswith(" ")
        }

    def standardise(self, text: str) -> str:
        """Return a text, in lower case, with numbers in digits."""
        found: str = self._numbers(text)
        return found


@cache
def _whispers() -> _Whispers:
    return _Whispers()


def _spelled(found: re.Match[str]) -> str:
    sign, money, whole, decimals, ending, percent = found.groups("")
    if len(whole + decimals) > _LONGEST:
        return found[0]
    words = _read(whole)
    if money in _MONEY and not decimals.count(".") > 1:
        unit, hundredth = _MONEY[money]
        parts = [f"{words} {_plural(unit, whole)}"] if int(whole) else []
        cents = decimals[1:].ljust(2, "0")
        if int(cents or "0"):
            parts.append(f"{_read(str(int(cents)))} {_plural(hundredth, cents)}")
        words = " and ".join(parts) or f"{words} {unit}s"
    elif decimals:
        words += "".join(f" point {_digits(part)}" for part in decimals.split(".")[1:])
    elif ending == "s":
        words = f"{words} s"
    elif ending:
        words = _in_words(whole, True)
    if money == "¢":
        words += f" {_plural('cent', whole)}"
    before = {"-": "minus ", "+": "plus "}.get(sign, "")
    return f" {before}{words}{' percent' if percent else ''} "


def _plural(unit: str, number: str) -> str:
    if int(number) == 1:
        return unit
    return "pence" if unit == "penny" else f"{unit}s"


def _read(number: str) -> str:
    """Return the words of a whole number: of its digits, if it has several ways to be read."""
    round_or_small = number[0] != "0" and (int(number) < 100 or not int(number) % 100)
    return _in_words(number, False) if round_or_small or number == "0" else _digits(number)


def _digits(number: str) -> str:
    return " ".join(_in_words(digit, False) for digit in number)


@cache
def _in_words(number: str, ordinal: bool) -> str:
    try:
        from num2words import num2words
    except ImportError:
        problem = "the text rule spoken needs num2words"
        raise UserError(problem, remedy=INSTALL_PRETRAINED) from None
    written: str = num2words(number, to="ordinal" if ordinal else "cardinal")
    return written.replace("-", " ").replace(",", "")
