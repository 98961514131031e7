"""Clients that are gone: their archives, or what they kept for themselves, are not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.files.datadir import DataDir
from fedtools.files.ledger import read_round
from fedtools.files.messages import COUNTED
from fedtools.files.private import PERSONAL_STATE

if TYPE_CHECKING:
    from fedtools.federation.asr import AsrFederation


def what_is_gone(federation: AsrFederation, client: str, number: int) -> str:
    """Why a client cannot take part in a round that goes on without it; "" if it can.

    Raises:
        UserError: if nobody's archives are there: then it is not a client that is gone.
    """
    data, experiment = federation.read("train"), federation.experiment
    for archive in {_archive(data, name): None for name in data.client_utterances(client)}:
        if not archive.is_file():
            return f"its {archive.name} is gone"
    kept = not federation.personal or experiment.own(client, number).has(PERSONAL_STATE)
    if not kept and _has_trained(federation, client, number):
        return "the personal parameters that it trained are gone"
    return ""


def first_there(data: DataDir) -> list[str]:
    """The first utterance whose archive is there; the first of all if none is."""
    there: dict[Path, bool] = {}
    for name in data.utterances:
        archive = _archive(data, name)
        if there.setdefault(archive, archive.is_file()):
            return [name]
    return data.utterances[:1]


def _archive(data: DataDir, utterance: str) -> Path:
    return Path(data.feats_scp[utterance].rpartition(":")[0])


def _has_trained(federation: AsrFederation, client: str, number: int) -> bool:
    """Whether a client has trained in an earlier round, and so has kept what it trained."""
    return any(
        row.client == client and row.client_epochs > 0 and row.status in COUNTED
        for at in range(1, number)
        for row in read_round(federation.experiment, at)
    )
