"""The spoken words of a written sentence, by the rules of its language.

English has a-z and the apostrophe only: marks on letters are removed, and a sentence with other
letters has no words. Every other language keeps its own script:

letters      are all kept, with their marks, in Unicode's form NFC and in lower case by `str.lower`,
             so that ß stays. İ becomes i; I becomes ı where `LANGUAGES` says so. Ligatures,
             presentation forms, full-width and half-width forms and µ become the letters that they
             stand for; ำ, ຳ, ໜ, և, ㅋ and ʰ are letters of their own. ゛ and ゜ belong to the kana
             before them.
joiners      (ZWJ, ZWNJ) stay within words, and so does ZWJ after a virama, which makes a letter.
silent       other format characters (soft hyphen, zero width space, direction marks), variation
             selectors, tatweel and the Armenian ՛ ՜ ՞ ՟ are removed without splitting a word.
apostrophes  of any kind become ', which stays within words. ʻ is a letter, and ʼ is one at the end
             of a word.
blanks       replace other punctuation, including hyphens and the Tibetan tsheg.
no words     are in a sentence with a digit, a sign that is read as a word ("&", "°", "€", "1ª") or
             a character that is not in Unicode.

`LANGUAGES` has the rules of particular languages:

Catalan      the dot of l·l is a part of the word, and so are its substitutes: ŀl, l.l, l•l, l‧l,
             l∙l, l⋅l, l・l, l․l, l⸱l, lꞏl. l-l is two words, as with any hyphen. Occitan has the
             dot, too.
Hebrew       and Yiddish: after a letter, any apostrophe, ʹ and ׳ are a geresh; between letters,
             any double quotation mark, ʺ, ″, ״ and two such apostrophes are gershayim.
Hawaiian     and Tahitian, Samoan, Tongan: ʻ, and any apostrophe, ʽ, ʿ and ꞌ before a vowel, are the
             letter ʻ; ‘so’ and 'so' are in quotation marks.
Greek        an apostrophe for an elided vowel stays at either end of a word: γι', 'ναι; ‘ and ’
             around words are quotation marks.
Korean       ㆍ substitutes for a middle dot, and becomes a blank.
Thai         ำ is one character after any tone mark, also where ◌ํ and า are typed for it; เเ
             becomes แ. The same holds for Lao.
others       oʻ and gʻ of Uzbek, apostrophes that are consonants, and which languages are written
             without spaces.

A language with an unknown code (`fedtools.data.languages`) has no particular rules: its letters
are kept, and its words are separated by spaces.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType

from fedtools.data.languages import main_code

# Characters that are typed for an apostrophe, in Greek also stand-alone accents; U+02BC is a letter
# by its category.
_MODIFIER = "\u02bc"
APOSTROPHES = "'\u2018\u2019\u201b`\u00b4\u2032\u055a\u0384\u1fbd\u1fbf" + _MODIFIER
_ZWJ = "\u200d"
# Words and parts of words that are neither letters nor marks by their category: the ideographic
# zero, Burmese particles, and Sindhi "and" and "in".
_LETTERS = "\u3007\u104c\u104d\u104e\u104f\u06fd\u06fe"
# Signs that are read as words; ª and º, letters by their category, are read in many ways.
_SIGNS = "&%@#*/\\§٪‰‱ªº"
# Symbols by their category that are typed for dashes, brackets and dandas.
_PUNCTUATION = "|¦~<>\u2212"
_SILENT = (
    "\u0640\u07fa"  # tatweel and similar characters
    "\u055b\u055c\u055e\u055f"  # Armenian, above the stressed vowel of a word
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0"  # invisible characters
)
_SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# Compatibility forms that are folded, by their tag in Unicode's table; _LIGATURES has those with
# the tag <compat>, which letters without another spelling have, too.
_WIDTHS = ("<wide>", "<narrow>")
_FORMS = ("<font>", "<initial>", "<medial>", "<final>", "<isolated>", "<vertical>")
# The stand-alone voicing marks of kana.
_VOICED = re.compile("(?<=[ぁ-ゖゝァ-ヺヽ])[\u309b\u309c]")
_LIGATURES = re.compile("[ĲĳĿŀſµǄ-ǌǱ-ǳϐ-ϒϕϖϰ-ϲϴϵϹ\u2f00-\u2fd5ﬀ-ﬆﬓ-ﬗﭏ]")

# Kinds of characters; _REASONS are kinds for which a sentence has no words.
_LETTER, _MARK, _JOINER, _NOTHING, _APOSTROPHE, _BLANK = range(6)
_REASONS = ("digits", "symbols", "unknown characters")


@dataclass(frozen=True)
class Language:
    """The rules of a language.

    Attributes:
        aside: a regular expression for text that is written, but not spoken.
        spelling: regular expressions and their replacements, which apply while apostrophes are
            still as they were typed.
        capitals: pairs of a capital and a small letter that differ from those of Unicode.
        inner: marks that stay between two letters, in addition to the apostrophe.
        letters: marks that are letters.
        edges: whether an apostrophe at either end of a word is a letter.
        dots: whether an i keeps a dot that is written as a mark above it.
        spaces: whether words are separated by spaces.
    """

    aside: str = ""
    spelling: tuple[tuple[str, str], ...] = ()
    capitals: tuple[tuple[str, str], ...] = ()
    inner: str = ""
    letters: str = ""
    edges: bool = False
    dots: bool = False
    spaces: bool = True


_HAN = "\u3007\u3400-\u9fff\U00020000-\U0003ffff"
_HEBREW = "[\u05d0-\u05ea\u05ef-\u05f2]"
_AFTER_HEBREW = f"(?:(?<={_HEBREW})|(?<={_HEBREW}[\u05b0-\u05c7]))"
_DOTLESS = Language(capitals=(("İ", "i"), ("I", "ı")))
_GLOTTAL = Language(edges=True)
_UNSPACED = Language(spaces=False)
_APOSTROPHE_CLASS = f"[{APOSTROPHES}]"
_GERESH_CLASS = f"[{APOSTROPHES}\u05f3]"
_OKINA_CLASS = f"[{APOSTROPHES}\u02bd\u02bf\ua78c]"
_GERESH = Language(
    # A geresh changes the consonant of a letter, also at the end of a word; gershayim stand within
    # acronyms. Elsewhere, the characters that are typed for them are quotation marks.
    spelling=(
        # Characters that are letters by their category, but typed for apostrophes.
        ("\u02b9[\u05b0-\u05c7]*", "'"),
        ("[\u02ba\u02ee][\u05b0-\u05c7]*", '"'),
        (
            f'{_AFTER_HEBREW}(?:["\u201c-\u201f\u2033\u02dd]|{_GERESH_CLASS}{{2}})(?={_HEBREW})',
            "\u05f4",
        ),
        (f"{_GERESH_CLASS}{{2,}}", " "),
        (rf"(?<![\w{APOSTROPHES}])[{APOSTROPHES}]([^{APOSTROPHES}]*)['\u2019](?!\w)", r" \1 "),
        (f"{_AFTER_HEBREW}{_GERESH_CLASS}", "\u05f3"),
        (f"(?!{_AFTER_HEBREW})\u05f3", " "),
    ),
    inner="\u05f4",
    letters="\u05f3",
)
_OKINA = Language(
    spelling=(
        (f"{_APOSTROPHE_CLASS}{{2,}}", " "),
        (
            rf"(?<![\w{APOSTROPHES}]){_APOSTROPHE_CLASS}([^{APOSTROPHES}]*)"
            rf"{_APOSTROPHE_CLASS}(?![\w{APOSTROPHES}])",
            r" \1 ",
        ),
        (f"{_OKINA_CLASS}(?=(?i:[aeiouāēīōūáéíóúäëïöü]))", "\u02bb"),
        (_MODIFIER, "'"),
    )
)
_THAI = Language(
    spelling=(
        ("\u0e4d([\u0e48-\u0e4b]*)\u0e32", "\\1\u0e33"),
        ("(?<=[\u0e01-\u0e2e])\u0e33([\u0e48-\u0e4b]+)", "\\1\u0e33"),
        ("\u0e40\u0e40", "\u0e41"),
    ),
    spaces=False,
)
_LAO = Language(
    spelling=(
        ("\u0ecd([\u0ec8-\u0ecb]*)\u0eb2", "\\1\u0eb3"),
        ("(?<=[\u0e81-\u0eae\u0edc-\u0edf])\u0eb3([\u0ec8-\u0ecb]+)", "\\1\u0eb3"),
        ("\u0ec0\u0ec0", "\u0ec1"),
    ),
    spaces=False,
)

# The table of rules, by main code: "zh" is for zh-CN, zh-HK and zh-TW. English has a function of
# its own.
LANGUAGES: Mapping[str, Language] = MappingProxyType(
    {
        **dict.fromkeys(("tr", "az", "crh", "gag"), _DOTLESS),
        "lt": Language(dots=True),
        # Oʻ and gʻ, typed with any apostrophe; ʻ after other letters is the tutuq, an apostrophe.
        "uz": Language(
            spelling=((f"(?<=[OoGg])[{APOSTROPHES}]", "\u02bb"), (r"(?<![OoGg])\u02bb(?=\w)", "'"))
        ),
        "ca": Language(spelling=((r"(?<=[Ll])[.•‧∙⋅・․⸱ꞏ](?=[Ll])", "·"),), inner="·"),
        "oc": Language(inner="·"),
        "el": Language(spelling=((r"\u2018([^\u2018\u2019']*)\u2019(?!\w)", r" \1 "),), edges=True),
        "ko": Language(spelling=(("\u318d", " "),)),
        **dict.fromkeys(("he", "yi"), _GERESH),
        **dict.fromkeys(("haw", "ty", "sm", "to"), _OKINA),
        **dict.fromkeys(("mt", "ha", "quc", "cak", "yua"), _GLOTTAL),
        **dict.fromkeys(("ja", "zh", "yue"), _UNSPACED),
        "th": _THAI,
        "lo": _LAO,
        **dict.fromkeys(("km", "my", "bo", "dz", "shn"), _UNSPACED),
        # The reading of Han characters may follow them in parentheses.
        "nan": Language(aside=rf"(?<=[{_HAN}]) ?\([^(){_HAN}]*\)", spaces=False),
    }
)


def rules_of(language: str) -> Language:
    """Return the rules of a language by its code, such as "de", "deu", "zh-CN" or "rm-vallader"."""
    return LANGUAGES.get(main_code(language), Language())


def normalise(
    sentence: str, language: str, left_out: Counter[str] | None = None
) -> tuple[str, str]:
    """Return the spoken words of a sentence in lower case: (text, "") or ("", reason for none).

    Args:
        sentence: the written sentence.
        language: a code such as "en", "zh-CN" or "rm-vallader".
        left_out: a counter to which the characters are added that the text lacks, except
            whitespace, if there is a text.
    """
    lost: Counter[str] = Counter()
    if main_code(language) == "en":
        text, reason = _english(sentence, lost)
    else:
        text, reason = _words(sentence, rules_of(language), lost)
    if text and left_out is not None:
        left_out.update({mark: count for mark, count in lost.items() if not mark.isspace()})
    return text, reason or ("" if text else "empty text")


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
    """Return the words of a sentence in any language but English, or a reason; see `normalise`."""
    text = "".join(map(_folded, unicodedata.normalize("NFC", sentence)))
    text = _VOICED.sub(lambda mark: "\u3099\u309a"[mark[0] == "\u309c"], text)
    if rules.aside:
        lost.update(Counter(text) - Counter(text := re.sub(rules.aside, "", text)))
    text = unicodedata.normalize("NFC", _cleaned(unicodedata.normalize("NFC", text), lost))
    for pattern, spelled in rules.spelling:
        text = re.sub(pattern, partial(_spelled, spelled, lost), text)
    kinds = set(map(_kind, text))
    for reason in _REASONS:
        if reason in kinds:
            return "", reason
    parts, inner = [], "'" + rules.inner
    for mark in text:
        if _kind(mark) == _APOSTROPHE:
            parts.append(mark if mark == _MODIFIER and not rules.edges else "'")
        elif mark in rules.inner + rules.letters or _kind(mark) in (_LETTER, _MARK, _JOINER):
            parts.append(mark)
        else:
            parts.append(" ")
            lost[mark] += 1
    # Two such marks in a row are a quotation mark.
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


def _spelled(template: str, lost: Counter[str], found: re.Match[str]) -> str:
    """Return a match's replacement; count characters as lost if it merely removes some."""
    spelled = found.expand(template)
    if not Counter(spelled.replace(" ", "")) - Counter(found[0]):
        lost.update(Counter(found[0]) - Counter(spelled))
    return spelled


def lower(words: str, language: str) -> str:
    """Return words in lower case, by the rules of a language; "" for no particular rules."""
    return _lower(words, rules_of(language))


def upper(words: str, language: str) -> str:
    """Return words in upper case, likewise; letters without a single capital, such as ß, stay."""
    rules = rules_of(language)
    words = unicodedata.normalize("NFC", words)
    words = words if rules.dots else re.sub("i\u0307+", "i", words)
    for capital, small in rules.capitals:
        words = words.replace(small, capital)
    capitals = (unicodedata.normalize("NFC", mark.upper()) for mark in words)
    pairs = zip(words, capitals, strict=True)
    return "".join(capital if len(capital) == 1 else mark for mark, capital in pairs)


def _lower(word: str, rules: Language) -> str:
    word = unicodedata.normalize("NFC", word)
    for capital, small in rules.capitals:
        word = word.replace(capital, small)
    word = word.lower()
    # Python lowers İ to an i with an additional combining dot.
    return unicodedata.normalize("NFC", word if rules.dots else re.sub("i\u0307+", "i", word))


def _cleaned(text: str, lost: Counter[str]) -> str:
    """Return a text without silent characters, useless joiners, and marks without a letter."""
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
            # After a virama (combining class 9), ZWJ makes a letter, even at the end of a word.
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
    """Return the kind of a character, or the reason for which its sentence has no words."""
    listed: tuple[tuple[str, int | str], ...] = (
        ("\u200c\u200d", _JOINER),
        (_LETTERS, _LETTER),
        (APOSTROPHES, _APOSTROPHE),
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
    kinds: dict[str, int | str] = {"L": _LETTER, "M": _MARK, "N": "digits", "S": "symbols"}
    return kinds.get(category[0], _BLANK)


@cache
def _folded(mark: str) -> str:
    """Return what a compatibility form stands for, and any other character unchanged."""
    if mark == "ŉ":
        return "'n"
    tag, _, codes = unicodedata.decomposition(mark).partition(" ")
    form = tag in _FORMS and unicodedata.category(mark)[0] == "L"
    if not (form or tag in _WIDTHS or _LIGATURES.match(mark)):
        return mark
    plain = "".join(_folded(chr(int(code, 16))) for code in codes.split())
    # Forms of Arabic marks decompose to a blank and a mark, which belongs to the letter before.
    return plain.lstrip() if form else plain
