"""Transcript files of NIST's sclite: one line `words (speaker-utterance)` per utterance."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedtools.core.atomic import write_text
from fedtools.data.symbols import SPACE, characters_of, nfc

# Markup of sclite in a transcript: ";" begins an attribute, "{ / }" alternatives, "@" is the empty
# word, "(a)" an optional word, "\" quotes, and a trailing "*" is dropped. Their full-width
# counterparts are ordinary characters to sclite, so that nothing in a text is lost.
_MARKUP = str.maketrans(";*@{}\\()", "；＊＠｛｝＼（）")
# sclite splits at ASCII whitespace alone; str.split() would also split at a no-break space.
_WORD = re.compile(r"[^ \t\n\v\f\r]+")


def words(text: str) -> list[str]:
    """Return the words of a transcript as a trn file has them, in Unicode's form NFC."""
    return _WORD.findall(nfc(text).translate(_MARKUP))


def characters(text: str) -> list[str]:
    """Return the characters of a transcript, with `<space>` between words, as in ESPnet.

    A symbol such as `<unk>` is one character.
    """
    return [SPACE if c == " " else c for c in characters_of(" ".join(words(text)))]


def trn_ids(utt2spk: Mapping[str, str]) -> dict[str, str]:
    """Return the ids of utterances in a trn file, from which sclite reads the same speakers.

    sclite (`-i rm`) ends the speaker at the first "-" and ignores case, so a "-" within a speaker
    id becomes "_", and ids that would then be equal are numbered.
    """
    speakers = _distinct({spk: spk.replace("-", "_") for spk in utt2spk.values()})
    return _distinct({utt: f"{speakers[spk]}-{utt}" for utt, spk in utt2spk.items()})


def write_trn(path: str | Path, lines: Iterable[tuple[Sequence[str], str]]) -> None:
    """Write (tokens, id) pairs as a trn file, atomically; tokens may be empty."""
    write_text(path, "".join(f"{' '.join([*tokens, f'({name})'])}\n" for tokens, name in lines))


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    if len({name.lower() for name in names.values()}) == len(names):
        return dict(names)
    return {key: f"{name}.{number}" for number, (key, name) in enumerate(names.items(), 1)}
