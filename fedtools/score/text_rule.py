"""Text normalisation before scoring, for `fedtools score --text-rule spoken`.

Whisper writes "Mark's 3rd, isn't it?" where a transcript has "MARK'S THIRD ISN'T IT". References
and hypotheses are both converted to the spoken words of their language (`fedtools.files.spoken`):
lower case, without punctuation; in English, numbers are spelled out. In other languages digits
stay. The files are not changed.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, get_args

from fedtools.files.errors import INSTALL_PRETRAINED, UserError
from fedtools.files.languages import main_code
from fedtools.files.spoken import lower, normalise
from fedtools.files.symbols import is_unknown

TextRule = Literal["none", "spoken"]
RULES = get_args(TextRule)

# A number with its thousands' commas, its decimals, and the ending of an ordinal.
_NUMBER = re.compile(r"(?<!\w)(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(st|nd|rd|th)?(?!\w)", re.I)
_LONGEST = 15


def plain(text: str, rule: TextRule, language: str = "en") -> str:
    """Apply a text rule to a text.

    Args:
        text: words separated by blanks.
        rule: "none" leaves the text as it is.
        language: a language code.

    Raises:
        UserError: if num2words is missing, for English.
    """
    if rule == "none":
        return text
    if main_code(language) == "en":
        text = _NUMBER.sub(_spelled, text)
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


def _spelled(found: re.Match[str]) -> str:
    whole, decimals, ordinal = found[1].replace(",", ""), found[2] or "", found[3]
    if len(whole) > _LONGEST:
        return found[0]
    return f" {_in_words(whole + decimals, bool(ordinal) and not decimals)} "


@cache
def _in_words(number: str, ordinal: bool) -> str:
    try:
        from num2words import num2words
    except ImportError:
        problem = "the text rule spoken needs num2words"
        raise UserError(problem, remedy=INSTALL_PRETRAINED) from None
    written: str = num2words(number, to="ordinal" if ordinal else "cardinal")
    return written.replace("-", " ").replace(",", "")
