"""Sums of what training reads, by which an experiment recognises its data.

Tables are summed in full. Archives of features may take hundreds of gigabytes, so their sizes and a
sample of their content are summed: features made again with other options differ everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from fedtools.audio.feature_kinds import kind_of
from fedtools.core.atomic import sha256
from fedtools.core.errors import Missing, UserError
from fedtools.data.datadir import DataDir, read_table

# The kind of features among the sums: see `fedtools.audio.feature_kinds`.
KIND = "features"
# Where a site has told of its data: one sum for all others, see `combined`.
SUM = "sum"
_ARCHIVES, _BLOCKS, _BLOCK_BYTES = 256, 64, 4096


def of_utterances(folder: Path, labels: bool) -> dict[str, str]:
    """Return sums of a data directory with features, and their `KIND` if it is known.

    Args:
        labels: whether training reads `text`.
    """
    found = {}
    for name in ("utt2client", *(("text",) if labels else ())):
        if (folder / name).is_file():
            found[name] = sha256(folder / name)
        elif name == "text":
            remedy = "add it: training and measuring read transcripts"
            raise UserError("missing", path=folder / name, remedy=remedy)
    places = DataDir.read(folder, "feats.scp").feats_scp
    kind = kind_of(places, folder / "feats.scp")
    return {**found, "feats.scp": _archives(places)} | ({KIND: str(kind)} if kind else {})


def of_clips(folder: Path, labels: bool) -> dict[str, str]:
    """Return the sum of the file of sums of packed clips, which covers all that training reads."""
    path = folder / "sha256sums"
    if not path.is_file():
        remedy = "run it where fedtools init ran, or make the data"
        raise UserError("missing", path=path, remedy=remedy)
    return {"sha256sums": sha256(path)}


def of_rescored(folder: Path, labels: bool) -> dict[str, str]:
    """Return sums of rescored N-best lists and of the tables of clients, times and phrases."""
    found = {}
    names = ("utt2client", "segments", "utt2start", "nbest.tsv", "words.txt", "unigram.tsv")
    for name in (*names, "phrases.tsv", "phrases_of"):
        if (folder / name).is_file():
            found[name] = sha256(folder / name)
    if (folder / "nnlm.scp").is_file():
        found["nnlm.scp"] = _archives(read_table(folder / "nnlm.scp"))
    return found


def combined(sums: Mapping[str, str]) -> str:
    """Return one sum for the sums of a data directory, but not the kind of features.

    A sum of transcripts alone could be guessed by who sees it; this one covers audio or features.
    """
    lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums) if name != KIND)
    return hashlib.sha256(lines.encode()).hexdigest()


def _archives(table: Mapping[str, str]) -> str:
    """Return a sum of the utterances' places in archives, and of samples of the archives."""
    digest = hashlib.sha256()
    archives: dict[str, None] = {}
    for utterance, entry in table.items():
        path, _, offset = entry.rpartition(":")
        archives[path] = None
        # By name alone: archives may have moved to another folder.
        digest.update(f"{utterance} {Path(path).name} {offset}\n".encode())
    chosen = set(_spread(len(archives), _ARCHIVES))
    for number, path in enumerate(archives):
        try:
            size = Path(path).stat().st_size
            digest.update(f"{size}\n".encode())
            if number in chosen and Path(path).is_file():
                _add_sample(digest, path, size)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
            raise Missing(problem, path=path, remedy="run it where fedtools init ran") from None
    return digest.hexdigest()


def _add_sample(digest: hashlib._Hash, path: str, size: int) -> None:
    with open(path, "rb") as file:
        for begin in _spread(size, _BLOCKS):
            digest.update(os.pread(file.fileno(), _BLOCK_BYTES, begin))


def _spread(total: int, count: int) -> list[int]:
    """Return at most `count` numbers below `total`, evenly spread, 0 included."""
    count = min(total, count)
    return [number * total // count for number in range(count)]
