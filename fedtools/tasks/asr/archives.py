"""Clients whose archives of features are missing, because they have left the federation."""

from __future__ import annotations

from pathlib import Path

from fedtools.data.datadir import DataDir


def missing_archive(data: DataDir, client: str) -> Path | None:
    """Return the first of a client's archives that is missing; None if all exist."""
    archives = dict.fromkeys(_archive(data, name) for name in data.client_utterances(client))
    return next((archive for archive in archives if not archive.is_file()), None)


def first_there(data: DataDir) -> list[str]:
    """Return the first utterance whose archive exists; the first of all if none does."""
    missing: set[Path] = set()
    for name in data.utterances:
        archive = _archive(data, name)
        if archive not in missing:
            if archive.is_file():
                return [name]
            missing.add(archive)
    return data.utterances[:1]


def _archive(data: DataDir, utterance: str) -> Path:
    return Path(data.feats_scp[utterance].rpartition(":")[0])
