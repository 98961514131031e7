"""Clients that are gone: their archives, or what they kept for themselves, are not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.files.datadir import DataDir

if TYPE_CHECKING:
    from fedtools.federation.asr import AsrFederation


def what_is_gone(federation: AsrFederation, client: str, number: int) -> str:
    """Why a client cannot take part in a round that goes on without it; "" if it can.

    Raises:
        UserError: if nobody's archives are there: then it is not a client that is gone.
    """
    data = federation.read("train")
    for archive in {_archive(data, name): None for name in data.client_utterances(client)}:
        if not archive.is_file():
            return f"its {archive.name} is gone"
    lost = federation.lost(client, number)
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
