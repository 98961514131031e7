"""Units of error rates: words, or characters in languages that are written without spaces.

`utt2lang` of a data directory, as in Kaldi, has the language of each utterance; words are counted
without it, and also, with a warning, if a code is not known. Both units are in Unicode's form NFC.
Characters are the code points of a text, without its whitespace: a Thai vowel or a Devanagari sign
above or below a letter counts as one, and so does a symbol such as `<unk>`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.data import trn
from fedtools.data.datadir import read_table
from fedtools.data.languages import is_known
from fedtools.data.symbols import characters_of, words_of
from fedtools.data.written_to_spoken import rules_of

UTT2LANG = "utt2lang"


@dataclass(frozen=True)
class TextUnit:
    """The units that are counted in a text.

    Attributes:
        plural: the units' name in tables.
        rate: the name of the error rate, "wer" or "cer".
        cut: splits a text into units.
    """

    plural: str
    rate: str
    cut: Callable[[str], list[str]]

    @property
    def title(self) -> str:
        """Return the name of the rate in captions."""
        return self.rate.upper()

    @property
    def note(self) -> str:
        """Return the explanation of the rate in captions; "" for words."""
        text = "by character, without spaces: the language is written without them"
        return "" if self is WORD else text


def _characters(text: str) -> list[str]:
    # `trn.words` replaces markup of sclite.
    return characters_of("".join(trn.words("".join(text.split()))))


WORD = TextUnit("words", "wer", words_of)
CHARACTER = TextUnit("characters", "cer", _characters)


def text_unit_of(utt2lang: Mapping[str, str], path: str | Path) -> TextUnit:
    """Return the unit for utterances with these languages, which were read from `path`.

    Raises:
        UserError: if only some languages are written with spaces: a sum would be meaningless.
    """
    spaces: dict[bool, str] = {}
    for language in dict.fromkeys(utt2lang.values()):
        if not is_known(language):
            _warn(language, str(path))
        spaces[rules_of(language).spaces] = language
    if len(spaces) > 1:
        problem = f"{spaces[True]!r} is written with spaces, {spaces[False]!r} without"
        raise UserError(problem, path=path, remedy="separate them with fedtools subset-data")
    return CHARACTER if False in spaces else WORD


@cache
def _warn(language: str, path: str) -> None:
    problem = f"{language!r} is not the code of a known language"
    remedy = "words are counted; for a language without spaces, give its own code, such as ja"
    print(f"warning: {path}: {problem}; {remedy}", file=sys.stderr)


def read_text_unit(data_dir: str | Path) -> TextUnit:
    """Return the unit for a data directory; errors as in `text_unit_of` and `read_table`."""
    path = Path(data_dir) / UTT2LANG
    return text_unit_of(read_table(path), path) if path.exists() else WORD
