"""Clients that are gone, and took the archives of their features with them."""

from __future__ import annotations

from pathlib import Path

from fedtools.files.datadir import DataDir


def missing_archive(data: DataDir, client: str) -> Path | None:
    """The first of a client's archives that is not there; None if all are."""
    archives = dict.fromkeys(_archive(data, name) for name in data.client_utterances(client))
    return next((archive for archive in archives if not archive.is_file()), None)


def first_there(data: DataDir) -> list[str]:
    """The first utterance whose archive is there; the first of all if none is."""
    gone: set[Path] = set()
    for name in data.utterances:
        archive = _archive(data, name)
        if archive not in gone:
            if archive.is_file():
                return [name]
            gone.add(archive)
    return data.utterances[:1]


def _archive(data: DataDir, utterance: str) -> Path:
    return Path(data.feats_scp[utterance].rpartition(":")[0])
