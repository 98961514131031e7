"""The tasks that a federation can have, by the name in its configuration."""

from __future__ import annotations

from pathlib import Path

from fedtools.federation.federation import Federation
from fedtools.files.config import read_yaml, unknown
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment


def federation_class(task: str, where: str | Path) -> type[Federation]:
    """The class of a task; a `UserError` names the known ones."""
    if task == "asr":
        from fedtools.federation.asr import AsrFederation

        return AsrFederation
    if task == "kws":
        from fedtools.federation.kws import KwsFederation

        return KwsFederation
    raise UserError(f"task: {unknown(str(task), ['asr', 'kws'])}", path=where)


def open_federation(path: str | Path, device: str = "cpu") -> Federation:
    """Open the experiment in a folder."""
    where = Experiment(path).path / "config.yaml"
    return federation_class(read_yaml(where)["task"], where)(path, device)
