"""What error rates count: words, or characters where a language is written without spaces.

`utt2lang` of a data directory, as Kaldi has it, says what the language of an utterance is; without
it words are counted, and so they are, with a warning, where a code is not known. Both are in
Unicode's form NFC. Characters are the code points of a text, without its whitespace: a Thai vowel
or a Devanagari sign above or below a letter counts as one, and so does a symbol, as `<unk>`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedtools.files import trn
from fedtools.files.datadir import read_table
from fedtools.files.errors import UserError
from fedtools.files.languages import is_known
from fedtools.files.spoken import rules_of
from fedtools.files.symbols import characters_of, words_of

UTT2LANG = "utt2lang"


@dataclass(frozen=True)
class Unit:
    """What is counted of a text.

    Attributes:
        plural: how tables call it.
        rate: "wer" or "cer", the error rate of it.
        cut: a text to its units.
    """

    plural: str
    rate: str
    cut: Callable[[str], list[str]]

    @property
    def title(self) -> str:
        """How captions call the rate."""
        return self.rate.upper()

    @property
    def note(self) -> str:
        """What captions say beside the rate; "" of words."""
        said = "by character, without spaces: the language is written without them"
        return "" if self is WORD else said


def _characters(text: str) -> list[str]:
    # Of what sclite takes for markup, as `trn.words` has it.
    return characters_of("".join(trn.words("".join(text.split()))))


WORD = Unit("words", "wer", words_of)
CHARACTER = Unit("characters", "cer", _characters)


def unit_of(utt2lang: Mapping[str, str], path: str | Path) -> Unit:
    """What is counted of utterances of such languages, from the file `path`.

    Raises:
        UserError: if some languages have spaces and some do not: their sum has no meaning.
    """
    spaces: dict[bool, str] = {}
    for language in dict.fromkeys(utt2lang.values()):
        if not is_known(language):
            _warn(language, str(path))
        spaces[rules_of(language).spaces] = language
    if len(spaces) > 1:
        problem = f"{spaces[True]!r} is written with spaces, {spaces[False]!r} without"
        raise UserError(problem, path=path, remedy="take each by itself: fedtools subset-data")
    return CHARACTER if False in spaces else WORD


@cache
def _warn(language: str, path: str) -> None:
    problem = f"{language!r} is the code of no language that is known"
    remedy = "words between spaces are counted; of a language without spaces give its own, as in ja"
    print(f"warning: {path}: {problem}; {remedy}", file=sys.stderr)


def read_unit(data_dir: str | Path) -> Unit:
    """What is counted of a data directory; `UserError` as of `unit_of` and `read_table`."""
    path = Path(data_dir) / UTT2LANG
    return unit_of(read_table(path), path) if path.exists() else WORD
