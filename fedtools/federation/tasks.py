"""The tasks that a federation can have, and what is known of one without its models.

Nothing here imports torch: that takes seconds, and a rerun of a grid of finished experiments only
asks each whether there is anything left to do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.files.atomic import sha256
from fedtools.files.clips import Clips
from fedtools.files.config import read_yaml, unknown
from fedtools.files.datadir import DataDir, invert
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.tables import count, read_tsv

if TYPE_CHECKING:
    from fedtools.federation.federation import Federation

# The one "client" of data that are measured as a whole.
ALL = "all"


@dataclass(frozen=True)
class Task:
    """What a federation learns, and the form of its data.

    Attributes:
        federation: "module:class" of those who have this task.
        columns: what `Federation.measure` gives, in the order of a table.
        rate: the column by which models are compared, and ...
        sign: ... 1 if less of it is better, -1 if more is.
        identity: the file of a data directory that tells it from others.
        needed: (training data, folder of tokens, where the options were read from) to the files
            that an experiment keeps a copy of; raises a UserError if one is not given.
        clients: data directory to its clients, in C order; [] where it names none.
        by_client: whether models are measured on each client's data, or on `ALL`.
    """

    federation: str
    columns: tuple[str, ...]
    rate: str
    sign: int
    identity: str
    needed: Callable[[Path, Path | None, str | Path], list[Path]]
    clients: Callable[[Path], list[str]]
    by_client: bool

    @property
    def federation_class(self) -> type[Federation]:
        """The class that does the work, imported when it is asked for."""
        module, _, name = self.federation.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def header(self) -> tuple[str, ...]:
        """The columns of the tables of models and rounds."""
        return ("round", "client", *self.columns)

    def groups(self, data: str | Path) -> list[str]:
        """The clients by which a data directory is measured, or `ALL`."""
        return (self.clients(Path(data)) if self.by_client else []) or [ALL]


def _tokens(train: Path, tokens: Path | None, where: str | Path) -> list[Path]:
    if tokens is None:
        raise UserError("no tokens", path=where, remedy="give --tokens FOLDER")
    files = [tokens / "tokens.txt", tokens / "bpe.model"]
    return [file for file in files if file.exists()]


def _classes(train: Path, tokens: Path | None, where: str | Path) -> list[Path]:
    if tokens is not None:
        raise UserError("keyword spotting has no tokens", path=where, remedy="no --tokens")
    return [train / "classes.txt"]


def _speakers(folder: Path) -> list[str]:
    if not (folder / "utt2client").exists():
        return []
    return list(invert(DataDir.read(folder, "utt2client").utt2client))


TASKS = {
    "asr": Task(
        federation="fedtools.federation.asr:AsrFederation",
        columns=("utterances", "loss", "words", "errors", "wer"),
        rate="wer",
        sign=1,
        identity="text",
        needed=_tokens,
        clients=_speakers,
        by_client=True,
    ),
    "kws": Task(
        federation="fedtools.federation.kws:KwsFederation",
        columns=("clips", "loss", "errors", "accuracy"),
        rate="accuracy",
        sign=-1,
        identity="sha256sums",
        needed=_classes,
        clients=lambda folder: Clips.read(folder).clients,
        by_client=False,
    ),
}


def task_of(name: object, where: str | Path) -> Task:
    """The task of a name; a `UserError` tells the known ones."""
    if not isinstance(name, str) or name not in TASKS:
        raise UserError(f"task: {unknown(str(name), TASKS)}", path=where)
    return TASKS[name]


def data_of(experiment: Experiment, role: str) -> Path:
    """The folder of a role's data ("train", "valid", "test").

    Raises:
        UserError: if there are none, or they are not those that the experiment began with.
    """
    config, where = experiment.config, experiment.path / "config.yaml"
    if role not in config["data"]:
        raise UserError(f"no {role} data", path=where)
    folder = Path(config["data"][role])
    identity = folder / task_of(config["task"], where).identity
    if identity_of(identity) != read_yaml(experiment.path / "data.yaml").get(role):
        remedy = "make those again, or begin another experiment"
        problem = f"not the data that {experiment.path} began with"
        raise UserError(problem, path=identity, remedy=remedy)
    return folder


def identity_of(path: Path) -> str:
    """The SHA-256 of the file that tells a data directory from others."""
    if not path.exists():
        raise UserError(
            "missing", path=path, remedy="run it where fedtools init ran, or make the data"
        )
    return sha256(path)


def open_federation(path: str | Path, device: str = "cpu") -> Federation:
    """Open the experiment in a folder."""
    experiment = Experiment(path)
    task = task_of(experiment.config["task"], experiment.path / "config.yaml")
    return task.federation_class(path, device)


def is_finished(path: str | Path, last: int | None = None, role: str | None = None) -> bool:
    """Whether `run_rounds` of the same arguments would find nothing to do."""
    experiment = Experiment(path)
    config = experiment.config
    complete = experiment.last_round()
    if complete < (last or config["rounds"]):
        return False
    if role is None:
        return True
    table = experiment.evaluation(role)
    if role not in config["data"] or not table.exists():
        return False
    task = task_of(config["task"], experiment.path / "config.yaml")
    done = read_evaluation(table, task)
    groups = task.groups(data_of(experiment, role))
    numbers = filter(experiment.is_measured, range(complete + 1))
    return all((number, client) in done for number in numbers for client in groups)


def read_evaluation(path: Path, task: Task) -> dict[tuple[int, str], dict[str, str]]:
    """The rows of `Experiment.evaluation` by round and client; none if it is not there."""
    rows = read_tsv(path, task.header) if path.exists() else []
    return {
        (count(row, "round", path, line), row["client"]): row for line, row in enumerate(rows, 2)
    }
