"""The experiments of the keyword recipe: EXP_ROOT/<task>/<network>/<method>/seed<k>.

A method's folder may name options that differ from the others, `fedkws_ui.smoothing=0.3`, and
`alo.private_steps=50,adversarial=0.01`. What the folders' names say is checked against the
configurations.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from options import OF_EXPERIMENT, ROW, canonical, changes_of

from fedtools.audio.mfcc import frames_of
from fedtools.client.options import ClipTraining
from fedtools.files.clips import Clips, read_classes, read_length
from fedtools.files.config import differences, from_mapping, unknown
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import SERVER_ROW, read_ledger
from fedtools.files.options import Options
from fedtools.files.tables import count, number, read_tsv
from fedtools.methods import METHODS, make_method
from fedtools.methods.base import Method
from fedtools.models.keywords import NETWORKS, build_network
from fedtools.models.pretrained.options import is_pretrained
from fedtools.report.results import read_curve
from fedtools.score.detection import COLUMNS as DETECTION_COLUMNS
from fedtools.score.detection import RATES
from fedtools.score.last_evaluations import last_of
from fedtools.tasks import facts_of
from fedtools.tasks.facts import data_of

BY_ROUND = ("Client steps", "Clips", "Private steps", "Private clips")
# Of the file in which accuracies of private models are kept, see overfit.py.
PRIVATE = ("round", "clients", "private_own", "private_test", "shared_own", "shared_test")
COSTS = (*BY_ROUND, "Client epochs", "Server epochs", "Left out", "Comm.")


class Setting(NamedTuple):
    """What all seeds of an experiment share; `option` is empty, or what its method's folder names.

    Attributes:
        task: its folder, such as "keywords".
        network, method: names in `NETWORKS` and `METHODS`.
        option, value: of the method, as the folder has them; of several, `option` has all but the
            value of the last, "private_steps=50,adversarial".
    """

    task: str
    network: str
    method: str
    option: str = ""
    value: str = ""


@dataclass(frozen=True)
class Run:
    """One experiment.

    Attributes:
        experiment: its files and its frozen configuration.
        setting: what it has in common with runs of other seeds.
        accuracy: round -> accuracy on the test clips, in %, by rising rounds; of those rounds that
            every run of the configuration is measured after, whatever else was measured.
    """

    experiment: Experiment
    setting: Setting
    accuracy: dict[int, float]

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.experiment.path

    @property
    def where(self) -> Path:
        """The file of its configuration, for messages."""
        return self.path / "config.yaml"

    @property
    def seed(self) -> int:
        """That of all random numbers."""
        return self.experiment.seed

    @property
    def options(self) -> Options:
        """Those that the experiment began with."""
        return self.experiment.options

    @property
    def lasting(self) -> float:
        """The accuracy at the end: the mean of the last five evaluations, the start left out."""
        return statistics.fmean(self.accuracy[at] for at in last_of(self.accuracy))

    def value_of(self, option: str) -> str:
        """The value of an option that a folder may name, as folders have it."""
        if option in OF_EXPERIMENT:
            return canonical(getattr(self.options, option))
        if not hasattr(self.method, option):
            known = [*vars(self.method), *OF_EXPERIMENT]
            raise UserError(f"{self.setting.method}: {unknown(option, known)}", path=self.path)
        return canonical(getattr(self.method, option))

    @property
    def final(self) -> float:
        """The accuracy after the last round."""
        return self.accuracy[self.options.rounds]

    @cached_property
    def method(self) -> Method:
        """With its options."""
        return make_method(self.options.method, self.options.method_conf, self.where)

    @cached_property
    def training(self) -> ClipTraining:
        """The options of training."""
        return from_mapping(ClipTraining, self.options.training, self.where)

    @cached_property
    def classes(self) -> int:
        """The number of labels."""
        return len(read_classes(self.path / "classes.txt"))

    @cached_property
    def parameters(self) -> int:
        """The number of the network's parameters."""
        frames, where = frames_of(read_length(self.path)), f"{self.where}: model"
        network = build_network(self.options.model, self.classes, where, frames=frames)
        return sum(value.numel() for value in network.parameters())

    def costs(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """What the run cost, from its ledger, by the names that tables have for it.

        Steps are gradient steps of a client in a round, and clips those that it trains on in these,
        the mean over both; private ones are those of a private model, beside them. Client epochs
        are those of a client in all rounds, without private models, the mean over all clients.
        Left out are updates that were refused, such as those of clients whose training diverged.
        Comm. is in bytes, both ways.

        Args:
            sizes: client -> number of its clips.
        """
        found = dict.fromkeys(COSTS, 0.0)
        rows = 0
        for row in read_ledger(self.experiment):
            if row.round > self.options.rounds:
                continue  # the run went on: its accuracy here is that of the configured rounds
            found["Server epochs"] += row.server_epochs
            if row.client == SERVER_ROW:
                continue
            found["Comm."] += row.bytes_down + row.bytes_up
            found["Left out"] += row.status != "ok"
            if row.client in sizes:
                found["Client epochs"] += row.client_epochs / len(sizes)
            elif row.status == "ok":
                problem = f"client {row.client!r} is not in the training data"
                raise UserError(problem, path=self.path, remedy="pack them again")
            if row.status == "ok":
                rows += 1
                batch = min(sizes[row.client], self.training.batch_size)
                private = self.method.private_training(row.steps)
                counts = (row.steps, row.steps * batch, private, private * batch)
                for name, count_of in zip(BY_ROUND, counts, strict=True):
                    found[name] += count_of
        for name in BY_ROUND:
            found[name] /= max(rows, 1)
        return found

    def detection(self) -> dict[str, float] | None:
        """`RATES` after the last round, in %; None if they were not measured."""
        return self.of_last("detection_test.tsv", DETECTION_COLUMNS, RATES, "fedtools detection")

    def private_models(self) -> dict[str, float] | None:
        """Accuracies, in %, of private models after the last round; None if not measured."""
        return self.of_last("private.tsv", PRIVATE, PRIVATE[2:], "local/overfit.py")

    def of_last(
        self, file: str, columns: Sequence[str], names: Sequence[str], command: str
    ) -> dict[str, float] | None:
        """Figures of a file with one row, which is of the last round; None without the file."""
        path, remedy = self.path / file, f"run {command} again"
        if not path.exists():
            return None
        rows = read_tsv(path, columns)
        if len(rows) != 1:
            raise UserError("not one row", path=path, remedy=remedy)
        if count(rows[0], "round", path, 2) != self.options.rounds:
            problem = f"of round {rows[0]['round']} of {self.options.rounds}"
            raise UserError(problem, path=path, line=2, remedy=remedy)
        return {name: number(rows[0], name, path, 2) for name in names}


class Facts(NamedTuple):
    """A task's data: the number of classes, clips of each client, and the number of test clips.

    `trained_on` is how many of the test clips are in training too.
    """

    classes: int
    sizes: dict[str, int]
    test: int
    trained_on: int


@dataclass(frozen=True)
class Runs:
    """All experiments of a folder.

    Attributes:
        complete: setting -> its runs, by seed.
        unfinished: what is left out of every table, and why.
    """

    complete: dict[Setting, list[Run]]
    unfinished: list[str] = field(default_factory=list)

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks, the one with the fewest classes first."""
        classes = {setting.task: runs[0].classes for setting, runs in self.complete.items()}
        return sorted(classes, key=lambda task: (classes[task], task))

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """Tasks and networks that there are, in the order of the paper."""
        found = {(setting.task, setting.network) for setting in self.complete}
        return [(task, one) for task in self.tasks for one in self.networks if (task, one) in found]

    @cached_property
    def networks(self) -> list[str]:
        """Networks that there are, the paper's first."""
        found = {setting.network for setting in self.complete}
        paper = [name for name in NETWORKS.names() if name in found]
        return paper + sorted(found.difference(paper))

    def get(self, *setting: str) -> list[Run]:
        """The runs of a setting, none if there are none."""
        return self.complete.get(Setting(*setting), [])

    def having(self, **wanted: str) -> list[Run]:
        """The runs of all settings that have these values."""
        chosen = [
            runs for at, runs in self.complete.items() if wanted.items() <= at._asdict().items()
        ]
        return [run for runs in chosen for run in runs]

    def methods(self, federated: bool, plain: bool = True) -> list[str]:
        """The methods that there are, with or without clients; `plain`: with no changed option."""
        found = {setting.method for setting in self.complete if not (plain and setting.option)}
        chosen = [name for name in found if is_federated(name) == federated]
        return sorted(chosen, key=lambda name: (METHODS.get(name, name).rank, name))

    @property
    def places(self) -> Iterator[tuple[str, str, str]]:
        """Task, network and method of every row of a table, those without clients last."""
        methods = self.methods(True, False) + self.methods(False, False)
        return ((*column, method) for column in self.columns for method in methods)

    @cached_property
    def data(self) -> dict[str, Facts]:
        """task -> its data, which all its experiments must share."""
        facts: dict[str, Facts] = {}
        for task in self.tasks:
            runs = self.having(task=task)
            for run in runs[1:]:
                if run.options.data != runs[0].options.data:
                    problem = f"its data are not those of {runs[0].path}"
                    raise UserError(problem, path=run.where, remedy="report them apart")
            for run in runs:
                # Of each: another may have begun when the folders held other clips.
                train, test = (data_of(run.experiment, split) for split in ("train", "test"))
            clips = Clips.read(train)
            sizes = dict(zip(clips.clients, clips.sizes.tolist(), strict=True))
            tested = Clips.read(test).utterances
            both = len(set(tested).intersection(clips.utterances))
            facts[task] = Facts(runs[0].classes, sizes, len(tested), both)
        return facts


def network_title(network: str) -> str:
    """A network's name in tables; one of no paper is called as in the configuration."""
    return NETWORKS.get(network, network).title if network in NETWORKS.names() else network


def is_federated(method: str) -> bool:
    """Whether clients train in a method."""
    return METHODS.get(method, method).federated


def title_of(method: str) -> str:
    """A method's name in tables."""
    return METHODS.get(method, method).title


def read_runs(root: str | Path) -> Runs:
    """Read all experiments of a folder.

    Experiments that were not evaluated up to their last round are left out, and named.

    Args:
        root: the folder that holds <task>/<network>/<method>/seed<k>.

    Raises:
        UserError: if there is none, a file is malformed, or a name contradicts a configuration.
    """
    root = Path(root)
    complete: dict[Setting, list[Run]] = {}
    unfinished = []
    for config in sorted(root.glob("*/*/*/seed*/config.yaml"), key=_natural):
        run = _read_run(config.parent)
        name = config.parent.relative_to(root)
        if run.options.rounds in run.accuracy:
            others = complete.setdefault(run.setting, [])
            if run.seed in (other.seed for other in others):
                problem = f"seed {run.seed} of this setting comes twice"
                raise UserError(problem, path=run.path, remedy=f"remove it or {others[0].path}")
            if others:
                _check_alike(run, others[0])
            others.append(run)
        else:
            last, rounds = max(run.accuracy, default=0), run.options.rounds
            unfinished.append(f"{name} (evaluated up to round {last} of {rounds})")
    if not complete:
        problem = "no experiment <task>/<network>/<method>/seed<k> that was run to its end"
        left = f": {unfinished[0]}" if unfinished else ""
        remedy = "run fedtools init, rounds and evaluate --split test"
        raise UserError(problem + left, path=root, remedy=remedy)
    return Runs(complete, unfinished)


def _read_run(path: Path) -> Run:
    task, network, folder, seed = path.parts[-4:]
    experiment = Experiment(path)
    match = ROW.fullmatch(folder)
    method, option, value = match.groups(default="") if match else (folder, "", "")
    model = experiment.options.model
    known = network in NETWORKS.names() or is_pretrained(model)
    known = known and method in METHODS.names()
    if experiment.options.task != "kws" or not known:
        problem = f"{network}/{folder} is no keyword network and method"
        remedy = "name the folders <task>/<network>/<method>/seed<k>"
        raise UserError(problem, path=path, remedy=remedy)
    evaluation = experiment.evaluation("test")
    found = _read_accuracy(evaluation) if evaluation.exists() else {}
    rounds = [at for at in found if at <= experiment.options.rounds and experiment.is_measured(at)]
    setting = Setting(task, network, method, option, canonical(value))
    run = Run(experiment, setting, {at: found[at] for at in rounds})
    _check_name(run, seed)
    return run


def _read_accuracy(path: Path) -> dict[int, float]:
    """round -> accuracy on all clips, in %; models of clients' own are measured on their own."""
    curve = read_curve(path, facts_of("kws", ""))
    rows = enumerate(read_tsv(path, facts_of("kws", "").header), 2)
    clips = {row["client"]: count(row, "clips", path, line) for line, row in rows}
    return {
        at: float(np.average(list(rates.values()), weights=[clips[client] for client in rates]))
        for at, rates in curve.items()
    }


def _check_name(run: Run, seed: str) -> None:
    """Insist that the folders' names say what the configuration does."""
    options, setting = run.options, run.setting
    # Those of pretrained models are called as the recipe's configuration has them.
    own = is_pretrained(options.model)
    pairs = {
        "network": (setting.network, setting.network if own else options.model.get("network")),
        "method": (setting.method, options.method),
        "seed": (seed.removeprefix("seed"), str(options.seed)),
    }
    for option, value in changes_of(setting.option, setting.value):
        pairs[option] = canonical(value), run.value_of(option)
    for name, (said, found) in pairs.items():
        if said != found:
            raise UserError(f"{name} is {found}, the folder says {said}", path=run.where)


def _check_alike(run: Run, other: Run) -> None:
    """Insist that runs of a setting differ in the seed alone: a mean of others says nothing."""
    theirs = {**vars(other.options), "seed": run.seed}
    if difference := next(differences(theirs, vars(run.options)), ""):
        problem = f"not another seed of {other.path}: {difference}"
        remedy = "train both with the same options, or report them apart"
        raise UserError(problem, path=run.where, remedy=remedy)


def _natural(path: Path) -> list[tuple[int, str]]:
    """A key that puts seed10 after seed2."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D+)(\d*)", str(path))]
