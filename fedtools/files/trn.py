"""The transcript files that NIST's sclite reads: `words (speaker-utterance)`, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedtools.files.atomic import write_text
from fedtools.files.symbols import SPACE, characters_of, nfc

# What sclite takes for markup in a transcript: ";" begins an attribute, "{ / }" alternatives, "@"
# is the empty word, "(a)" a word that may be missing, "\" quotes, and a trailing "*" is dropped.
# Their full-width twins are ordinary characters to it, so that nothing in a text is lost.
_MARKUP = str.maketrans(";*@{}\\()", "；＊＠｛｝＼（）")
# sclite splits at ASCII whitespace alone; str.split() would also split at a no-break space.
_WORD = re.compile(r"[^ \t\n\v\f\r]+")


def words(text: str) -> list[str]:
    """The words of a transcript, as they stand in a trn file, in Unicode's form NFC."""
    return _WORD.findall(nfc(text).translate(_MARKUP))


def characters(text: str) -> list[str]:
    """The characters of a transcript, a space between words being `<space>`, as ESPnet has it.

    A symbol, as `<unk>`, is one.
    """
    return [SPACE if c == " " else c for c in characters_of(" ".join(words(text)))]


def trn_ids(utt2spk: Mapping[str, str]) -> dict[str, str]:
    """The id of each utterance in a trn file, such that sclite reads the same speakers from it.

    sclite (`-i rm`) ends the speaker at the first "-" and ignores case, so a "-" within a speaker
    id becomes "_", and ids that would then be one are numbered.
    """
    speakers = _distinct({spk: spk.replace("-", "_") for spk in utt2spk.values()})
    return _distinct({utt: f"{speakers[spk]}-{utt}" for utt, spk in utt2spk.items()})


def write_trn(path: str | Path, lines: Iterable[tuple[Sequence[str], str]]) -> None:
    """Write (tokens, id) pairs as a trn file, atomically; no token leaves the id alone."""
    write_text(path, "".join(f"{' '.join([*tokens, f'({name})'])}\n" for tokens, name in lines))


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    if len({name.lower() for name in names.values()}) == len(names):
        return dict(names)
    return {key: f"{name}.{number}" for number, (key, name) in enumerate(names.items(), 1)}
