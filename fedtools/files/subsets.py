"""Subsets of data directories, and data directories with other transcripts."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path

from fedtools.files.datadir import DataDir, read_table
from fedtools.files.errors import UserError, some


def first_of_speakers(data: DataDir, seconds: float) -> list[str]:
    """The first utterances of every speaker, in C order, until they last so many seconds.

    A speaker's last utterance is never among them: something has to be left over. So there is
    nothing of a speaker with one utterance.

    Raises:
        UserError: if there is no utt2dur, or it lacks an utterance or has no number, or if every
            speaker has one utterance.
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
        raise UserError("every speaker has one utterance alone", path=data.path / "utt2spk")
    return chosen


def rest_of_speakers(data: DataDir, first: Iterable[str]) -> list[str]:
    """What else there is of the speakers of some utterances, as of a newcomer who has adapted.

    Speakers without any of these are in neither part, and are named on stderr.
    """
    taken = set(first)
    speakers = {data.utt2spk[utt] for utt in taken}
    if single := sorted({*data.utt2spk.values()} - speakers):
        said = f"speakers with one utterance, left out: {some(single)}"
        print(f"{data.path}: {said}", file=sys.stderr)
    return [
        utt for utt, speaker in data.utt2spk.items() if speaker in speakers and utt not in taken
    ]


def relabel(data_path: str | Path, text_path: str | Path, out: str | Path) -> str:
    """Write a data directory with other transcripts; utterances with an empty one are left out.

    Clients of whom nothing is left are named on stderr.

    Args:
        text_path: Kaldi `text`, such as `fedtools best-path` writes; an id alone is an empty one.

    Returns:
        how many utterances are left, in words.

    Raises:
        UserError: if none is left.
    """
    data, found = DataDir.read(data_path), read_table(text_path, values="optional")
    keep = [utt for utt in data.utterances if found.get(utt)]
    if not keep:
        raise UserError(f"no words for any utterance of {data_path}", path=text_path)
    part = data.restrict(keep, Path(out))
    part.text = {utt: found[utt] for utt in keep}
    part.write(remove_others=True)
    if gone := sorted({*data.utt2client.values()} - {*part.utt2client.values()}):
        print(f"{out}: no words for any utterance of {some(gone)}: left out", file=sys.stderr)
    return f"{out}: {len(keep)} of {len(data.utterances)} utterances"
