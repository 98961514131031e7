"""What tells the data of an experiment from others of the same name: sums of what training reads.

All tables count in full. Of archives of features, which may be hundreds of gigabytes, all sizes and
a sample of the content do: features that were made again with other options differ everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from fedtools.files.atomic import sha256
from fedtools.files.datadir import DataDir, read_table
from fedtools.files.errors import Missing, UserError

_ARCHIVES, _BLOCKS, _BLOCK_BYTES = 256, 64, 4096


def of_utterances(folder: Path, labels: bool) -> dict[str, str]:
    """Sums of a data directory with features.

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
    return {**found, "feats.scp": _features(folder)}


def of_clips(folder: Path, labels: bool) -> dict[str, str]:
    """The sum of the sums of packed clips, which are of all that training reads."""
    path = folder / "sha256sums"
    if not path.is_file():
        remedy = "run it where fedtools init ran, or make the data"
        raise UserError("missing", path=path, remedy=remedy)
    return {"sha256sums": sha256(path)}


def of_rescored(folder: Path, labels: bool) -> dict[str, str]:
    """Sums of N-best lists and what `fedtools rescore` makes of them, and of who said what when."""
    found = {}
    names = ("utt2client", "segments", "utt2start", "nbest.tsv", "words.txt", "unigram.tsv")
    for name in (*names, "phrases.tsv", "phrases_of"):
        if (folder / name).is_file():
            found[name] = sha256(folder / name)
    for name in ("nnlm.scp", "ngram.scp"):
        if (folder / name).is_file():
            found[name] = _archives(read_table(folder / name))
    return found


def _features(folder: Path) -> str:
    return _archives(DataDir.read(folder, "feats.scp").feats_scp)


def _archives(table: Mapping[str, str]) -> str:
    """The sum of which utterance lies where, and of the archives they lie in."""
    digest = hashlib.sha256()
    archives: dict[str, None] = {}
    for utterance, entry in table.items():
        path, _, offset = entry.rpartition(":")
        archives[path] = None
        # Where the archives lie does not matter.
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
    """At most `count` numbers below `total`, evenly spread, the first included."""
    count = min(total, count)
    return [number * total // count for number in range(count)]
