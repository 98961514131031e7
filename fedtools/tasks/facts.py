"""What is known of a task without its models, and of the data of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtools.files.config import read_yaml, unknown
from fedtools.files.datadir import DataDir, invert
from fedtools.files.errors import Missing, UserError
from fedtools.files.experiment import Experiment
from fedtools.methods.base import TaskPart
from fedtools.tasks import facts_of

# The one "client" of data that are measured as a whole.
ALL = "all"


@dataclass(frozen=True)
class Facts:
    """What a federation learns, and the form of its data.

    Attributes:
        opens: "module:class" of the task, a `fedtools.tasks.base.Task`.
        parts: what it has of what methods need.
        columns: what `Task.measure` gives, in the order of a table.
        rate: the column by which models are compared, and ...
        sign: ... 1 if less of it is better, -1 if more is.
        counted: the column of what `errors` are counted of, where there are errors.
        identity: (data directory, whether labels are read) to what tells the data from others.
        reads_labels: the section `training` of the options to whether training reads labels.
        files: (folders by split, assets by name, where the options were read from) to the files
            that an experiment keeps a copy of; raises a UserError if one is not given.
        clients: data directory to its clients, in C order; [] where it names none.
        frozen_model: the section `model` to what an experiment keeps of it, with sums of the files
            that it names.
        by_client: whether models are measured on each client's data also where all clients have
            the same model.
    """

    opens: str
    parts: tuple[TaskPart, ...]
    columns: tuple[str, ...]
    rate: str
    sign: int
    identity: Callable[[Path, bool], dict[str, str]]
    files: Callable[[Mapping[str, Path], Mapping[str, Path], str | Path], list[Path]]
    clients: Callable[[Path], list[str]]
    by_client: bool
    reads_labels: Callable[[Mapping[str, object]], bool] = lambda training: True
    frozen_model: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda model: model
    counted: str = ""

    @property
    def header(self) -> tuple[str, ...]:
        """The columns of the tables of models and rounds."""
        return ("round", "client", *self.columns)


def check_frozen(experiment: Experiment) -> None:
    """Fail with a `UserError` unless all that an experiment began with is as it was.

    A folder that its section `model` names is part of that.
    """
    experiment.check_frozen()
    facts = facts_of(experiment.options.task, experiment.path / "config.yaml")
    facts.frozen_model(experiment.options.model)


def check_assets(
    assets: Mapping[str, Path],
    known: tuple[str, ...],
    where: str | Path,
    optional: tuple[str, ...] = (),
) -> None:
    """Fail with a `UserError` unless the assets are the known ones, and maybe optional ones."""
    for name in assets:
        if name not in known + optional:
            raise UserError(unknown(name, known + optional, "asset"), path=where)
    for name in known:
        if name not in assets:
            raise UserError(f"no {name}", path=where, remedy=f"give --asset {name}=FOLDER")


def clients_of_utterances(folder: Path) -> list[str]:
    """The clients of a data directory of utterances."""
    if not (folder / "utt2client").exists():
        return []
    return list(invert(DataDir.read(folder, "utt2client").utt2client))


def data_of(experiment: Experiment, split: str, may_lack: bool = False) -> Path:
    """The folder of a split's data ("train", "valid", "test").

    Args:
        may_lack: archives may be gone; then what is left is not looked at either.

    Raises:
        UserError: if there are none, or they are not those that the experiment began with.
    """
    options, where = experiment.options, experiment.path / "config.yaml"
    if split not in options.data:
        raise UserError(
            f"no {split} data", path=where, remedy=f"there are {', '.join(options.data)}"
        )
    folder = Path(options.data[split])
    facts = facts_of(options.task, where)
    try:
        found = facts.identity(folder, split != "train" or facts.reads_labels(options.training))
    except Missing:
        if may_lack:
            return folder
        raise
    known = read_yaml(experiment.path / "data.yaml").get(split)
    if found != known:
        known = known if isinstance(known, dict) else {}
        names = sorted(found.keys() | known.keys())
        differing = [name for name in names if found.get(name) != known.get(name)]
        problem = f"not the {', '.join(differing)} that {experiment.path} began with"
        remedy = "make those again, or begin another experiment"
        raise UserError(problem, path=folder, remedy=remedy)
    return folder
