"""Clients that are gone: their archives, or what they kept for themselves, are not there."""

from __future__ import annotations

from pathlib import Path

from fedtools.files.datadir import DataDir


def what_is_gone(data: DataDir, client: str, lost: bool) -> str:
    """Why a client cannot take part in a round that goes on without it; "" if it can.

    Args:
        data: all clients' training data.
        lost: whether nothing is left of personal parameters that the client trained.
    """
    for archive in {_archive(data, name): None for name in data.client_utterances(client)}:
        if not archive.is_file():
            return f"its {archive.name} is gone"
    return "the personal parameters that it trained are gone" if lost else ""


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
