"""Subsets of data directories, and data directories with replaced transcripts."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path

from fedtools.core.errors import UserError, some
from fedtools.data.datadir import DataDir, read_table


def first_of_speakers(data: DataDir, seconds: float) -> list[str]:
    """Return the first utterances of every speaker, in C order, until they last `seconds`.

    A speaker's last utterance is never included, so that some speech is left over. Speakers with a
    single utterance are therefore left out.

    Raises:
        UserError: if utt2dur is missing, lacks an utterance or has an invalid number, or if every
            speaker has a single utterance.
    """
    total: dict[str, float] = {}
    path, chosen = data.path / "utt2dur", []
    last = {speaker: utt for utt, speaker in data.utt2spk.items()}
    for utt, speaker in data.utt2spk.items():
        try:
            duration = float(data.utt2dur[utt])
        except (KeyError, ValueError):
            duration = math.nan
        if not 0 <= duration < math.inf:
            raise UserError(f"no duration of utterance {utt!r}", path=path)
        if total.get(speaker, 0.0) < seconds and utt != last[speaker]:
            chosen.append(utt)
        total[speaker] = total.get(speaker, 0.0) + duration
    if not chosen:
        raise UserError("every speaker has only one utterance", path=data.path / "utt2spk")
    return chosen


def rest_of_speakers(data: DataDir, first: Iterable[str]) -> list[str]:
    """Return the other utterances of the speakers of `first`, to test newcomers who have adapted.

    Speakers without an utterance in `first` are in neither part, and are named on stderr.
    """
    taken = set(first)
    speakers = {data.utt2spk[utt] for utt in taken}
    if single := sorted({*data.utt2spk.values()} - speakers):
        note = f"speakers with one utterance, left out: {some(single)}"
        print(f"{data.path}: {note}", file=sys.stderr)
    return [
        utt for utt, speaker in data.utt2spk.items() if speaker in speakers and utt not in taken
    ]


def relabel(data_path: str | Path, text_path: str | Path, out: str | Path) -> str:
    """Write a data directory with other transcripts, without utterances whose transcript is empty.

    Clients that lose all utterances are named on stderr.

    Args:
        text_path: a Kaldi `text`, such as that of `fedtools best-path`; an id alone is an empty
            transcript.

    Returns:
        A sentence with the number of remaining utterances.

    Raises:
        UserError: if no utterance remains.
    """
    data, found = DataDir.read(data_path), read_table(text_path, values="optional")
    keep = [utt for utt in data.utterances if found.get(utt)]
    if not keep:
        raise UserError(f"no words for any utterance of {data_path}", path=text_path)
    part = data.restrict(keep, Path(out))
    part.text = {utt: found[utt] for utt in keep}
    part.write(remove_others=True)
    if lost := sorted({*data.utt2client.values()} - {*part.utt2client.values()}):
        print(f"{out}: no words for any utterance of {some(lost)}: left out", file=sys.stderr)
    return f"{out}: {len(keep)} of {len(data.utterances)} utterances"
