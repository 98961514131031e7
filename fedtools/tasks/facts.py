"""Facts of tasks that need no model, and checks of an experiment's data and assets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtools.core.config import read_yaml, unknown
from fedtools.core.errors import Missing, UserError
from fedtools.data.datadir import DataDir, invert
from fedtools.exchange.experiment import LOCAL, Experiment
from fedtools.methods.base import TaskPart
from fedtools.tasks import facts_of
from fedtools.tasks.identity import KIND, SUM, combined
from fedtools.tasks.site_facts import SiteFacts

# (the section `model`, the section `training`, where they were read from) -> options.
FixedTraining = Callable[[Mapping[str, Any], Mapping[str, Any], str | Path], Mapping[str, Any]]

# Stands for a client's name where data is measured as a whole.
ALL = "all"


@dataclass(frozen=True)
class Facts:
    """A task's columns, requirements and data format.

    Attributes:
        opens: "module:class" of the task, a `fedtools.tasks.base.Task`.
        parts: the parts that methods can need and that this task has.
        columns: what `Task.measure` returns, in the order of a table.
        rate: the column by which models are compared.
        sign: 1 if a lower `rate` is better, -1 if a higher one is.
        counted: the column with the total that `errors` are counted in; "" without errors.
        identity: (data directory, whether labels are read) -> sums that identify the data.
        reads_labels: the section `training` of the options -> whether training reads labels.
        files: (folders by split, assets by name, where the options were read from) -> the files
            that an experiment keeps a copy of; raises a UserError if an asset is missing.
        sizes: data directory -> the utterances or clips of its clients, in C order of their names;
            {} if it names none.
        fixed_model: the section `model` -> what an experiment keeps of it, with sums of the files
            that it names.
        fixed_training: the sections `model` and `training` -> what an experiment keeps of the
            latter.
        by_client: whether models are measured on each client's data even if all clients have the
            same model.
        of_site: data directory -> what a site tells the server of its clients, without sums; None
            if the server must have the data itself.
    """

    opens: str
    parts: tuple[TaskPart, ...]
    columns: tuple[str, ...]
    rate: str
    sign: int
    identity: Callable[[Path, bool], dict[str, str]]
    files: Callable[[Mapping[str, Path], Mapping[str, Path], str | Path], list[Path]]
    sizes: Callable[[Path], dict[str, int]]
    by_client: bool
    reads_labels: Callable[[Mapping[str, object]], bool] = lambda training: True
    fixed_model: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda model: model
    fixed_training: FixedTraining = lambda model, training, where: training
    counted: str = ""
    of_site: Callable[[Path], SiteFacts] | None = None

    def clients(self, folder: Path) -> list[str]:
        """Return the clients of a data directory, in C order; [] if it names none."""
        return list(self.sizes(folder))

    @property
    def header(self) -> tuple[str, ...]:
        """Return the columns of the tables of models and rounds."""
        return ("round", "client", *self.columns)


def check_fixed(experiment: Experiment) -> None:
    """Raise a `UserError` if anything that an experiment began with has changed.

    This includes a folder that its section `model` names.
    """
    experiment.check_fixed()
    facts = facts_of(experiment.options.task, experiment.path / "config.yaml")
    facts.fixed_model(experiment.options.model)


def check_assets(
    assets: Mapping[str, Path],
    known: tuple[str, ...],
    where: str | Path,
    optional: tuple[str, ...] = (),
) -> None:
    """Raise a `UserError` unless the assets are the known ones and at most the optional ones."""
    for name in assets:
        if name not in known + optional:
            raise UserError(unknown(name, known + optional, "asset"), path=where)
    for name in known:
        if name not in assets:
            raise UserError(f"no {name}", path=where, remedy=f"give --asset {name}=FOLDER")


def sizes_of_utterances(folder: Path) -> dict[str, int]:
    """Return the number of utterances of each client of a data directory; {} if it names none."""
    if not (folder / "utt2client").exists():
        return {}
    found = invert(DataDir.read(folder, "utt2client").utt2client)
    return {client: len(utterances) for client, utterances in found.items()}


def data_of(experiment: Experiment, split: str, may_lack: bool = False) -> Path:
    """Return the folder of a split's data ("train", "valid", "test").

    Args:
        may_lack: archives may be missing; if one is, the others are not checked.

    Raises:
        UserError: if the split has no data, or not the data that the experiment began with.
    """
    options, where = experiment.options, experiment.path / "config.yaml"
    if split == "train":
        check_at_hand(experiment)
    if split not in options.data:
        raise UserError(
            f"no {split} data", path=where, remedy=f"there are {', '.join(options.data) or 'none'}"
        )
    folder = Path(options.data[split])
    if not folder.exists():
        remedy = "run it where fedtools init ran" if not folder.is_absolute() else "put it back"
        raise Missing(f"the {split} data are not there", path=folder, remedy=remedy)
    try:
        check_identity(experiment, split, folder)
    except Missing:
        if not may_lack:
            raise
    return folder


def check_folders(folders: Mapping[str, Path]) -> None:
    """Raise a `UserError` if the data directory of a split is not there."""
    for split, folder in folders.items():
        if not folder.is_dir():
            remedy = f"check --data {split}=FOLDER"
            raise UserError("no such data directory", path=folder, remedy=remedy)


def identities(
    facts: Facts, training: Mapping[str, object], folders: Mapping[str, Path]
) -> dict[str, dict[str, str]]:
    """Return the sums of what is read of the data, by split.

    Args:
        facts: of the task.
        training: the section `training` of the options.
        folders: data directories by split.
    """
    reads = facts.reads_labels(training)
    return {
        split: facts.identity(folder, split != "train" or reads)
        for split, folder in folders.items()
    }


def check_identity(experiment: Experiment, split: str, folder: Path) -> None:
    """Raise a `UserError` unless a folder has the data of a split that an experiment began with."""
    options = experiment.options
    facts = facts_of(options.task, experiment.path / "config.yaml")
    found = identities(facts, options.training, {split: folder})[split]
    known = known_sums(experiment, split)
    if SUM in known:
        found = told_of(facts, folder)
    # The kind of features may have become known, or lost, since the experiment began.
    names = sorted((found.keys() | known.keys()) - ({KIND} - (found.keys() & known.keys())))
    if differing := [name for name in names if found.get(name) != known.get(name)]:
        problem = f"not the {', '.join(differing)} that {experiment.path} began with"
        remedy = "restore the data, or begin another experiment"
        raise UserError(problem, path=folder, remedy=remedy)


def known_sums(experiment: Experiment, split: str) -> dict[str, str]:
    """Return the sums of a split's data as they were at first; {} if none are known.

    A site's capsule has those of data that the server does not know in a file of its own.
    """
    places = (experiment.path / "data.yaml", ()), (experiment.path / LOCAL, ("sums",))
    for path, sections in places:
        found = read_yaml(path) if path.exists() else {}
        for name in (*sections, split):
            inner = found.get(name)
            found = inner if isinstance(inner, dict) else {}
        if found:
            return found
    return {}


def told_of(facts: Facts, folder: Path) -> dict[str, str]:
    """Return the sum by which a site names its data, and their `KIND` if it is known.

    It covers transcripts if there are any, since a site does not know whether training reads them.
    """
    sums = facts.identity(folder, (folder / "text").is_file())
    return {SUM: combined(sums)} | ({KIND: sums[KIND]} if KIND in sums else {})


def facts_at(facts: Facts, folder: Path, task: str) -> SiteFacts:
    """Return what a site tells the server of its clients.

    Raises:
        UserError: if the data have no clients or are unusable, or the task tells nothing.
    """
    if facts.of_site is None:
        problem = f"task {task} needs everybody's data at the server"
        raise UserError(problem, remedy="begin with --data train=FOLDER")
    found, sums = facts.of_site(folder), told_of(facts, folder)
    return replace(found, sums=(sums[SUM],), kind=sums.get(KIND, ""))


def check_at_hand(experiment: Experiment) -> None:
    """Raise a `UserError` if sites have the training data, and not who has the experiment."""
    if "train" not in experiment.options.data:
        remedy = "let them train: fedtools site here, fedtools site-round at each"
        raise UserError("the clients' data are at their sites", path=experiment.path, remedy=remedy)
