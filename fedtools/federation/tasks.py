"""The tasks that a federation can have, and what is known of one without its models.

Nothing here imports torch: that takes seconds, and a rerun of a grid of finished experiments only
asks each whether there is anything left to do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fedtools.federation import identity
from fedtools.files import symbols
from fedtools.files.clips import LENGTH, Clips
from fedtools.files.config import read_yaml, unknown
from fedtools.files.datadir import DataDir, invert
from fedtools.files.errors import Missing, UserError
from fedtools.files.experiment import Experiment
from fedtools.files.messages import find_messages
from fedtools.files.tables import count, read_tsv
from fedtools.methods import METHODS

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
        identity: (data directory, whether labels are read) to what tells the data from others.
        reads_labels: the section `training` of the options to whether training reads labels.
        files: (folders by split, assets by name, where the options were read from) to the files
            that an experiment keeps a copy of; raises a UserError if one is not given.
        clients: data directory to its clients, in C order; [] where it names none.
        by_client: whether models are measured on each client's data also where all clients have
            the same model.
    """

    federation: str
    columns: tuple[str, ...]
    rate: str
    sign: int
    identity: Callable[[Path, bool], dict[str, str]]
    files: Callable[[Mapping[str, Path], Mapping[str, Path], str | Path], list[Path]]
    clients: Callable[[Path], list[str]]
    by_client: bool
    reads_labels: Callable[[Mapping[str, object]], bool] = lambda training: True

    @property
    def federation_class(self) -> type:
        """The class that does the work, a `Federation`, imported when it is asked for."""
        module, _, name = self.federation.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def header(self) -> tuple[str, ...]:
        """The columns of the tables of models and rounds."""
        return ("round", "client", *self.columns)


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


def _tokens(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, ("tokens",), where, ("denominator",))
    files = [assets["tokens"] / name for name in symbols.FILES]
    files = [file for file in files if file.exists()]
    # That it is there is seen when it is read.
    return files + [assets[name] / f"{name}.safetensors" for name in assets if name != "tokens"]


def _classes(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, (), where)
    length = data["train"] / LENGTH
    return [data["train"] / "classes.txt", *([length] if length.exists() else [])]


def _nothing(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, (), where)
    return []


def _weights(data: Mapping[str, Path], assets: Mapping[str, Path], where: str | Path) -> list[Path]:
    check_assets(assets, (), where, ("weights",))
    return [assets[name] / "weights.yaml" for name in assets]


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
        identity=identity.of_utterances,
        files=_tokens,
        clients=_speakers,
        by_client=True,
        reads_labels=lambda training: training.get("labels", "transcripts") == "transcripts",
    ),
    "kws": Task(
        federation="fedtools.federation.kws:KwsFederation",
        columns=("clips", "loss", "errors", "accuracy"),
        rate="accuracy",
        sign=-1,
        identity=identity.of_clips,
        files=_classes,
        clients=lambda folder: Clips.read(folder).clients,
        by_client=False,
    ),
    "rescore": Task(
        federation="fedtools.federation.rescore:RescoreFederation",
        columns=("utterances", "words", "errors", "wer"),
        rate="wer",
        sign=1,
        identity=identity.of_rescored,
        files=_nothing,
        clients=_speakers,
        by_client=True,
        reads_labels=lambda training: False,
    ),
}
# The same lists, rescored by models that are trained.
TASKS["lm"] = replace(
    TASKS["rescore"],
    federation="fedtools.federation.language:LmFederation",
    files=_weights,
)


def task_of(name: object, where: str | Path) -> Task:
    """The task of a name; a `UserError` tells the known ones."""
    if str(name) not in TASKS:
        # A file of methods may bring its own.
        METHODS.names()
    if str(name) not in TASKS:
        raise UserError(unknown(str(name), TASKS, "task"), path=where)
    return TASKS[str(name)]


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
    task = task_of(options.task, where)
    try:
        found = task.identity(folder, split != "train" or task.reads_labels(options.training))
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


def is_finished(path: str | Path, last: int | None = None, split: str | None = None) -> bool:
    """Whether `run_rounds` of the same arguments would find nothing to do.

    Raises:
        UserError: if the data of the split are not those that the experiment began with.
    """
    experiment = Experiment(path)
    options = experiment.options
    complete = experiment.last_round()
    if complete < (last or options.rounds):
        return False
    if not options.keep_updates and any(find_messages(experiment.round_dir(complete))):
        return False
    if split is None:
        return True
    table = experiment.evaluation(split)
    if split not in options.data or not table.exists():
        return False
    data_of(experiment, split)
    done = read_evaluation(table, task_of(options.task, experiment.path / "config.yaml"))
    # A model that was measured by client always is.
    clients = {client for _, client in done}
    numbers = filter(experiment.is_measured, range(complete + 1))
    return bool(done) and all((number, client) in done for number in numbers for client in clients)


def read_evaluation(path: Path, task: Task) -> dict[tuple[int, str], dict[str, str]]:
    """The rows of `Experiment.evaluation` by round and client; none if it is not there."""
    # Of data without a word or a clip there is no rate.
    unknown = ("nan", "inf")
    rows = read_tsv(path, task.header, task.columns, unknown) if path.exists() else []
    return {
        (count(row, "round", path, line), row["client"]): row for line, row in enumerate(rows, 2)
    }
