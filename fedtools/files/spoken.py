"""The spoken words of a written sentence, by the rules of its language.

English is a-z and the apostrophe, as it has always been here: marks on letters go, and a sentence
with other letters has no words. Every other language keeps what it is written with:

letters      all, with the marks on them, in Unicode's form NFC; lower case by `str.lower`, so that
             ß stays. İ becomes i; I becomes ı where `LANGUAGES` says so. Ligatures, presentation
             forms and full-width and half-width forms become the letters that they stand for;
             ำ, ຳ, ໜ, և, ㅋ and ʰ are letters of their own.
joiners      (ZWJ, ZWNJ) stay within words, and so does ZWJ after a virama, which makes a letter.
silent       other format characters (soft hyphen, zero width space, direction marks), variation
             selectors, tatweel and the Armenian ՛ ՜ ՞ ՟ go; the word that they are in stays one.
apostrophes  of any kind become ', which stays within words. ʻ is a letter, and ʼ is one at an end
             of a word.
blanks       are what other punctuation becomes, hyphens and the Tibetan tsheg too.
no words     has a sentence with a digit, a sign that is read as a word ("&", "°", "€", "1ª") or a
             character that Unicode does not know.

`LANGUAGES` has what else is particular: the middle dot of Catalan and Occitan, geresh and gershayim
of Hebrew and Yiddish, oʻ and gʻ of Uzbek, apostrophes that are consonants, and which languages are
written without spaces.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

# What people type for an apostrophe; U+02BC is a letter by its category.
_MODIFIER = "\u02bc"
_APOSTROPHES = "'\u2018\u2019\u201b`\u00b4\u2032\u055a" + _MODIFIER
_ZWJ = "\u200d"
# Words and parts of words that are neither letters nor marks by their category: the ideographic
# zero, which is read as it stands, Burmese particles, Sindhi "and" and "in".
_LETTERS = "\u3007\u104c\u104d\u104e\u104f\u06fd\u06fe"
# Read as words; ª and º, letters by their category, in many ways.
_SIGNS = "&%@#*/\\§٪‰‱ªº"
# Symbols by their category that people type for dashes, brackets and dandas.
_PUNCTUATION = "|¦~<>\u2212"
_SILENT = (
    "\u0640\u07fa"  # tatweel and its like
    "\u055b\u055c\u055e\u055f"  # Armenian, above the stressed vowel of a word
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"  # without a shape
)
_SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# Compatibility forms that are folded, by their tag in Unicode's table, and those whose tag does not
# tell: <compat> is also of letters that have no other spelling.
_WIDTHS = ("<wide>", "<narrow>")
_FORMS = ("<font>", "<initial>", "<medial>", "<final>", "<isolated>", "<vertical>")
_LIGATURES = re.compile("[ĲĳĿŀſǄ-ǌǱ-ǳϐ-ϒϕϖϰ-ϲϴϵϹ\u2f00-\u2fd5ﬀ-ﬆﬓ-ﬗﭏ]")

# Kinds of characters. The last three are why a sentence has no words.
_LETTER, _MARK, _JOINER, _NOTHING, _APOSTROPHE, _BLANK = range(6)
_REASONS = ("digits", "symbols", "unknown characters")


@dataclass(frozen=True)
class Language:
    """What is particular to a language.

    Attributes:
        aside: a regular expression of what is written, but not spoken.
        spelling: regular expressions, and what is written for what they match; apostrophes are
            still as they were typed.
        inner: marks that stay between two letters, beside the apostrophe.
        letters: marks that are letters.
        edges: whether an apostrophe at an end of a word is a letter.
        dots: whether an i keeps a dot that is written as a mark above it.
        spaces: whether there are spaces between words.
    """

    aside: str = ""
    spelling: tuple[tuple[str, str], ...] = ()
    inner: str = ""
    letters: str = ""
    edges: bool = False
    dots: bool = False
    spaces: bool = True


_HAN = "\u3007\u3400-\u9fff\U00020000-\U0003ffff"
_HEBREW = "[\u05d0-\u05ea\u05ef-\u05f2]"
_AFTER_HEBREW = f"(?:(?<={_HEBREW})|(?<={_HEBREW}[\u05b0-\u05c7]))"
_DOTLESS = Language(spelling=(("İ", "i"), ("I", "ı")))
_GLOTTAL = Language(edges=True)
_UNSPACED = Language(spaces=False)
_GERESH = Language(
    # A geresh makes another consonant of a letter, also at the end of a word; gershayim stand
    # within acronyms. Elsewhere what is typed for them are quotation marks.
    spelling=(
        (f'{_AFTER_HEBREW}["\u201c\u201d](?={_HEBREW})', "\u05f4"),
        (rf"(?<![\w{_APOSTROPHES}])[{_APOSTROPHES}]([^{_APOSTROPHES}]*)['\u2019](?!\w)", r" \1 "),
        (f"{_AFTER_HEBREW}[{_APOSTROPHES}]", "\u05f3"),
        (f"(?!{_AFTER_HEBREW})\u05f3", " "),
    ),
    inner="\u05f4",
    letters="\u05f3",
)

# The table of rules, by the first part of a code: "zh" is of zh-CN, zh-HK and zh-TW. English has a
# function of its own.
LANGUAGES: Mapping[str, Language] = MappingProxyType(
    {
        **dict.fromkeys(("tr", "az", "crh", "gag"), _DOTLESS),
        "lt": Language(dots=True),
        # Letters with any apostrophe; ʻ after other letters is typed for the tutuq, which is one.
        "uz": Language(
            spelling=((f"(?<=[OoGg])[{_APOSTROPHES}]", "\u02bb"), (r"(?<![OoGg])\u02bb(?=\w)", "'"))
        ),
        "ca": Language(spelling=((r"(?<=[Ll])[.•‧∙⋅・](?=[Ll])", "·"),), inner="·"),
        "oc": Language(inner="·"),
        **dict.fromkeys(("he", "yi"), _GERESH),
        **dict.fromkeys(("mt", "ha", "haw", "ty", "sm", "to", "quc", "cak", "yua"), _GLOTTAL),
        **dict.fromkeys(("ja", "zh", "yue", "th", "lo", "km", "my", "bo", "dz", "shn"), _UNSPACED),
        # After Han characters their reading may stand in parentheses.
        "nan": Language(aside=rf"(?<=[{_HAN}]) ?\([^(){_HAN}]*\)", spaces=False),
    }
)


def rules_of(language: str) -> Language:
    """The rules of a language by its code, such as "de", "zh-CN", "nan-tw" or "rm-vallader"."""
    return LANGUAGES.get(_main(language), Language())


def is_language(code: str) -> bool:
    """Whether this can be the code of a language; not that of a folder named cv-corpus."""
    return re.fullmatch("(?!cv-)[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8}){0,3}", code) is not None


def normalise(
    sentence: str, language: str, left_out: Counter[str] | None = None
) -> tuple[str, str]:
    """Spoken words of a sentence, lower case: (text, "") or ("", why there is none).

    Args:
        sentence: as it is written.
        language: a code such as "en", "zh-CN" or "rm-vallader".
        left_out: if there is a text, the characters of the sentence that it is without are added,
            but for whitespace.
    """
    lost: Counter[str] = Counter()
    if _main(language) == "en":
        text, reason = _english(sentence, lost)
    else:
        text, reason = _words(sentence, rules_of(language), lost)
    if text and left_out is not None:
        left_out.update({mark: count for mark, count in lost.items() if not mark.isspace()})
    return text, reason or ("" if text else "empty text")


def _main(language: str) -> str:
    return re.split("[-_]", language.lower())[0]


def _english(sentence: str, lost: Counter[str]) -> tuple[str, str]:
    text = re.sub("[\u2018\u2019\u02bc\u0060\u00b4\u2032]", "'", sentence.lower())
    text = unicodedata.normalize("NFKD", text)
    if any(unicodedata.category(mark)[0] == "N" for mark in text):
        return "", "digits"
    if any(mark in "&%@#*/\\" or unicodedata.category(mark)[0] == "S" for mark in text):
        return "", "symbols"
    kept = []
    for mark in text:
        if "a" <= mark <= "z" or mark == "'":
            kept.append(mark)
        elif mark.isalpha():
            return "", "letters outside a-z"
        elif not unicodedata.combining(mark):
            kept.append(" ")
    words = " ".join(filter(None, (word.strip("'") for word in "".join(kept).split())))
    lost.update(Counter(text) - Counter(words))
    return words, ""


def _words(sentence: str, rules: Language, lost: Counter[str]) -> tuple[str, str]:
    """Those of any other language."""
    text = "".join(map(_folded, unicodedata.normalize("NFC", sentence)))
    if rules.aside:
        lost.update(Counter(text) - Counter(text := re.sub(rules.aside, "", text)))
    text = unicodedata.normalize("NFC", _cleaned(unicodedata.normalize("NFC", text), lost))
    kinds = set(map(_kind, text))
    for reason in _REASONS:
        if reason in kinds:
            return "", reason
    for pattern, spelled in rules.spelling:
        text = re.sub(pattern, spelled, text)
    parts, inner = [], "'" + rules.inner
    for mark in text:
        if _kind(mark) == _APOSTROPHE:
            parts.append(mark if mark == _MODIFIER and not rules.edges else "'")
        elif mark in rules.inner + rules.letters or _kind(mark) < _NOTHING:
            parts.append(mark)
        else:
            parts.append(" ")
            lost[mark] += 1
    # Two in a row are a quotation mark.
    line = re.sub(f"[{inner}{_MODIFIER}]{{2,}}", " ", joined := "".join(parts))
    line = re.sub(rf"(?<=\S){_MODIFIER}(?=\S)", "'", line)
    words = []
    for word in line.split():
        if not rules.edges or word[0] == word[-1] == "'":
            word = word.strip(inner)
        if any(_kind(mark) == _LETTER for mark in word):
            words.append(word)
    lost.update(Counter(joined.replace(_MODIFIER, "'")) - Counter("".join(words)))
    return " ".join(_lower(word, rules) for word in words), ""


def _lower(word: str, rules: Language) -> str:
    word = word.lower()
    # Python's lower case of İ is an i with a second dot.
    return unicodedata.normalize("NFC", word if rules.dots else re.sub("i\u0307+", "i", word))


def _cleaned(text: str, lost: Counter[str]) -> str:
    """Without silent characters, joiners that join nothing, and marks without a letter."""
    kept: list[str] = []
    joiner = ""
    for mark in text + " ":
        kind = _kind(mark)
        in_word = bool(kept) and _kind(kept[-1]) in (_LETTER, _MARK)
        if kind == _JOINER and in_word and not joiner:
            joiner = mark
            continue
        if kind in (_JOINER, _NOTHING):
            lost[mark] += 1
            continue
        if joiner:
            # After a virama (of combining class 9), ZWJ makes a letter also at the end of a word.
            letter = joiner == _ZWJ and unicodedata.combining(kept[-1]) == 9
            if letter or kind in (_LETTER, _MARK):
                kept.append(joiner)
            else:
                lost[joiner] += 1
            joiner = ""
        if kind == _MARK and not in_word:
            lost[mark] += 1
        else:
            kept.append(mark)
    return "".join(kept[:-1])


@cache
def _kind(mark: str) -> int | str:
    """The kind of a character, or the reason why a sentence that has it has no words."""
    listed = (
        ("\u200c\u200d", _JOINER),
        (_LETTERS, _LETTER),
        (_APOSTROPHES, _APOSTROPHE),
        (_SIGNS, "symbols"),
        (_PUNCTUATION, _BLANK),
        (_SILENT, _NOTHING),
    )
    for marks, kind in listed:
        if mark in marks:
            return kind
    category = unicodedata.category(mark)
    if category == "Cf" or _SELECTORS.match(mark):
        return _NOTHING
    if category in ("Cn", "Co", "Cs"):
        return "unknown characters"
    return {"L": _LETTER, "M": _MARK, "N": "digits", "S": "symbols"}.get(category[0], _BLANK)


@cache
def _folded(mark: str) -> str:
    """What a compatibility form stands for; any other character as it is."""
    if mark == "ŉ":
        return "'n"
    tag, _, codes = unicodedata.decomposition(mark).partition(" ")
    form = tag in _FORMS and unicodedata.category(mark)[0] == "L"
    if not (form or tag in _WIDTHS or _LIGATURES.match(mark)):
        return mark
    plain = "".join(_folded(chr(int(code, 16))) for code in codes.split())
    # Forms of Arabic marks stand on a blank, but belong to the letter before.
    return plain.lstrip() if form else plain
