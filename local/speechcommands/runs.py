"""The experiments of the keyword recipe: EXP_ROOT/<task>/<network>/<method>/seed<k>.

A method's folder may name changed options, as in `fedkws_ui.smoothing=0.3` and
`alo.private_steps=50,adversarial=0.01`. The folders' names are checked against the configurations.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from options import OF_EXPERIMENT, ROW, SERVER_CLIPS, canonical, changes_of

from fedtools.audio.mfcc import frames_of
from fedtools.client.options import ClipTraining
from fedtools.core.config import differences, from_mapping, unknown
from fedtools.core.errors import UserError
from fedtools.core.tables import count, number, read_tsv
from fedtools.data.clips import Clips, read_classes, read_length
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import SERVER_ROW
from fedtools.exchange.options import Options
from fedtools.methods import METHODS, make_method
from fedtools.methods.base import Method
from fedtools.models.keywords import NETWORKS, build_network
from fedtools.models.pretrained.options import PROJECTION, is_pretrained
from fedtools.report.accuracies import costs_of, read_accuracy, read_rows
from fedtools.score.detection import COLUMNS as DETECTION_COLUMNS
from fedtools.score.detection import RATES
from fedtools.score.last_evaluations import last_of
from fedtools.tasks.facts import data_of

BY_ROUND = ("Client steps", "Clips", "Private steps", "Private clips")
# Columns of private.tsv, the accuracies of private models; see overfit.py.
PRIVATE = ("round", "clients", "private_own", "private_test", "shared_own", "shared_test")
COSTS = (*BY_ROUND, "Client epochs", "Server epochs", "Left out", "Comm.")


class Setting(NamedTuple):
    """The setting that all seeds of an experiment share.

    Attributes:
        task: the task's folder, such as "keywords".
        network, method: names in `NETWORKS` and `METHODS`.
        option, value: the changed option that the method's folder names, and its value; empty if
            none. Of several, `option` has all but the last value, "private_steps=50,adversarial".
    """

    task: str
    network: str
    method: str
    option: str = ""
    value: str = ""

    @property
    def alone(self) -> bool:
        """Return whether a server trains on its own clips, without clients'."""
        return (self.method, self.option) == ("centralized", SERVER_CLIPS)


@dataclass(frozen=True)
class Run:
    """One experiment.

    Attributes:
        experiment: its files and its fixed configuration.
        setting: the setting that it shares with runs of other seeds.
        accuracy: round -> accuracy on the test clips, in %, in order of rounds; only of rounds
            after which every run of the configuration is measured.
    """

    experiment: Experiment
    setting: Setting
    accuracy: dict[int, float]

    @property
    def path(self) -> Path:
        """Return the run's folder."""
        return self.experiment.path

    @property
    def where(self) -> Path:
        """Return the file of the run's configuration, for messages."""
        return self.path / "config.yaml"

    @property
    def seed(self) -> int:
        """Return the random seed."""
        return self.experiment.seed

    @property
    def options(self) -> Options:
        """Return the options that the experiment began with."""
        return self.experiment.options

    @property
    def alone(self) -> bool:
        """Return whether a server trains on its own clips, without clients'."""
        return self.setting.alone

    @property
    def lasting(self) -> float:
        """Return the final accuracy: the mean of the last five evaluations, without the start."""
        return statistics.fmean(self.accuracy[at] for at in last_of(self.accuracy))

    def value_of(self, option: str) -> str:
        """Return the value of an option that a folder may name, in the folders' format."""
        if option in OF_EXPERIMENT:
            return canonical(getattr(self.options, option))
        if option == SERVER_CLIPS:
            return canonical(len(Clips.read(data_of(self.experiment, "train")).labels))
        if not hasattr(self.method, option):
            known = [*vars(self.method), *OF_EXPERIMENT, SERVER_CLIPS]
            raise UserError(f"{self.setting.method}: {unknown(option, known)}", path=self.path)
        return canonical(getattr(self.method, option))

    @property
    def final(self) -> float:
        """Return the accuracy after the last round."""
        return self.accuracy[self.options.rounds]

    @cached_property
    def method(self) -> Method:
        """Return the method, with its options."""
        return make_method(self.options.method, self.options.method_conf, self.where)

    @cached_property
    def training(self) -> ClipTraining:
        """Return the options of training."""
        return from_mapping(ClipTraining, self.options.training, self.where)

    @cached_property
    def classes(self) -> int:
        """Return the number of labels."""
        return len(read_classes(self.path / "classes.txt"))

    @cached_property
    def parameters(self) -> int:
        """Return the number of the network's parameters."""
        frames, where = frames_of(read_length(self.path)), f"{self.where}: model"
        network = build_network(
            self.options.model,
            self.classes,
            where,
            frames=frames,
            projection=self.path / PROJECTION,
        )
        return sum(value.numel() for value in network.parameters())

    def costs(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Compute the run's costs from its ledger, by their names in tables.

        Steps are gradient steps of a client in a round, and clips the clips of these steps, both
        means over clients and rounds; private ones are additional ones of a private model. Client
        epochs are epochs of a client in all rounds, without private models, the mean over all
        clients. Left out are refused updates, such as those of clients whose training diverged.
        Comm. is in bytes, both ways.

        Args:
            sizes: client -> number of its clips.
        """
        found = dict.fromkeys(COSTS, 0.0)
        ledger, rows = read_rows(self.experiment), 0
        sums = zip(
            ("Comm.", "Client epochs", "Server epochs"), costs_of(ledger, sizes), strict=True
        )
        found.update(sums)
        for row in ledger:
            if row.client == SERVER_ROW:
                continue
            found["Left out"] += row.status != "ok"
            if row.status == "ok":
                if row.client not in sizes:
                    problem = f"client {row.client!r} is not in the training data"
                    raise UserError(problem, path=self.path, remedy="pack the data again")
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
        """Read `RATES` after the last round, in %; return None if they were not measured."""
        return self.of_last("detection_test.tsv", DETECTION_COLUMNS, RATES, "fedtools detection")

    def private_models(self) -> dict[str, float] | None:
        """Read accuracies, in %, of private models after the last round, or None if unmeasured."""
        return self.of_last("private.tsv", PRIVATE, PRIVATE[2:], "local/overfit.py")

    def of_last(
        self, file: str, columns: Sequence[str], names: Sequence[str], command: str
    ) -> dict[str, float] | None:
        """Read figures of a file's only row, of the last round; return None without the file."""
        path, remedy = self.path / file, f"run {command} again"
        if not path.exists():
            return None
        rows = read_tsv(path, columns)
        if len(rows) != 1:
            raise UserError(f"{len(rows)} rows instead of one", path=path, remedy=remedy)
        if count(rows[0], "round", path, 2) != self.options.rounds:
            problem = f"figures of round {rows[0]['round']}, not of round {self.options.rounds}"
            raise UserError(problem, path=path, line=2, remedy=remedy)
        return {name: number(rows[0], name, path, 2) for name in names}


class Facts(NamedTuple):
    """A task's data: the number of classes, clips of each client, and the number of test clips.

    `trained_on` is the number of test clips that are in training too.
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
        unfinished: names of experiments that all tables leave out, with reasons.
    """

    complete: dict[Setting, list[Run]]
    unfinished: list[str] = field(default_factory=list)

    @cached_property
    def tasks(self) -> list[str]:
        """Return the tasks, the one with the fewest classes first."""
        classes = {setting.task: runs[0].classes for setting, runs in self.complete.items()}
        return sorted(classes, key=lambda task: (classes[task], task))

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """Return the tasks and networks that occur, in the order of the paper."""
        found = {(setting.task, setting.network) for setting in self.complete}
        return [(task, one) for task in self.tasks for one in self.networks if (task, one) in found]

    @cached_property
    def networks(self) -> list[str]:
        """Return the networks that occur, the paper's first."""
        found = {setting.network for setting in self.complete}
        paper = [name for name in NETWORKS.names() if name in found]
        return paper + sorted(found.difference(paper))

    def get(self, *setting: str) -> list[Run]:
        """Return the runs of a setting, [] if there are none."""
        return self.complete.get(Setting(*setting), [])

    def having(self, **wanted: str) -> list[Run]:
        """Return the runs of all settings that have these values."""
        chosen = [
            runs for at, runs in self.complete.items() if wanted.items() <= at._asdict().items()
        ]
        return [run for runs in chosen for run in runs]

    def methods(self, federated: bool, plain: bool = True) -> list[str]:
        """Return the methods that occur, with or without clients; `plain`: no changed option."""
        found = {setting.method for setting in self.complete if not (plain and setting.option)}
        chosen = [name for name in found if is_federated(name) == federated]
        return sorted(chosen, key=lambda name: (METHODS.get(name, name).rank, name))

    @property
    def alone(self) -> list[tuple[str, str, str]]:
        """Return method, option and value of each server that trains alone, by its clips."""
        found = {setting[2:] for setting in self.complete if setting.alone}
        return sorted(found, key=lambda one: float(one[2]))

    @property
    def places(self) -> Iterator[tuple[str, str, str]]:
        """Yield task, network and method of every row of a table, those without clients last."""
        methods = self.methods(True, False) + self.methods(False, False)
        return ((*column, method) for column in self.columns for method in methods)

    @cached_property
    def data(self) -> dict[str, Facts]:
        """Return task -> its data, which all its experiments must share.

        A server that trains alone shares only the data of other splits.
        """
        facts: dict[str, Facts] = {}
        for task in self.tasks:
            runs = self.having(task=task)
            whole = next((run for run in runs if not run.alone), runs[0])
            for run in runs:
                own, shared = dict(run.options.data), dict(whole.options.data)
                if run.alone:
                    for data in (own, shared):
                        data.pop("train", None)
                if own != shared:
                    problem = f"its data differ from those of {whole.path}"
                    raise UserError(problem, path=run.where, remedy="report them separately")
            # Checked for each run, because the folders may have changed between their starts.
            found = {
                run.path: [data_of(run.experiment, split) for split in ("train", "test")]
                for run in runs
            }
            train, test = found[whole.path]
            clips = Clips.read(train)
            sizes = dict(zip(clips.clients, clips.sizes.tolist(), strict=True))
            tested = Clips.read(test).utterances
            both = len(set(tested).intersection(clips.utterances))
            facts[task] = Facts(runs[0].classes, sizes, len(tested), both)
        return facts


def network_title(network: str) -> str:
    """Return a network's name in tables, or its name in the configuration if it has no title."""
    return NETWORKS.get(network, network).title if network in NETWORKS.names() else network


def is_federated(method: str) -> bool:
    """Return whether clients train in a method."""
    return METHODS.get(method, method).federated


def title_of(method: str) -> str:
    """Return a method's name in tables."""
    return METHODS.get(method, method).title


def read_runs(root: str | Path) -> Runs:
    """Read all experiments of a folder.

    Experiments that were not evaluated up to their last round are listed in `unfinished`.

    Args:
        root: the folder that holds <task>/<network>/<method>/seed<k>.

    Raises:
        UserError: if no experiment is complete, a file is malformed, or a name contradicts a
            configuration.
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
                problem = f"seed {run.seed} of this setting appears twice"
                raise UserError(problem, path=run.path, remedy=f"remove it or {others[0].path}")
            if others:
                _check_alike(run, others[0])
            others.append(run)
        else:
            last, rounds = max(run.accuracy, default=0), run.options.rounds
            unfinished.append(f"{name} (evaluated up to round {last} of {rounds})")
    if not complete:
        problem = "no complete experiment <task>/<network>/<method>/seed<k>"
        left = f": {unfinished[0]}" if unfinished else ""
        remedy = "run fedtools init, rounds and evaluate --split test"
        raise UserError(problem + left, path=root, remedy=remedy)
    return Runs(complete, unfinished)


def _read_run(path: Path) -> Run:
    task, network, folder, seed = path.parts[-4:]
    experiment = Experiment(path)
    match = ROW.fullmatch(folder)
    method, changed = match.groups(default="") if match else (folder, "")
    option, _, value = changed.rpartition("=")
    model = experiment.options.model
    known = network in NETWORKS.names() or is_pretrained(model)
    known = known and method in METHODS.names()
    if experiment.options.task != "kws" or not known:
        problem = f"{network}/{folder} is not a keyword network and method"
        remedy = "name the folders <task>/<network>/<method>/seed<k>"
        raise UserError(problem, path=path, remedy=remedy)
    evaluation = experiment.evaluation("test")
    found = read_accuracy(evaluation) if evaluation.exists() else {}
    rounds = [at for at in found if at <= experiment.options.rounds and experiment.is_measured(at)]
    setting = Setting(task, network, method, option, canonical(value))
    run = Run(experiment, setting, {at: found[at] for at in rounds})
    _check_name(run, seed)
    return run


def _check_name(run: Run, seed: str) -> None:
    """Raise `UserError` if the folders' names contradict the configuration."""
    options, setting = run.options, run.setting
    # Pretrained models are named by the recipe's configuration, not by their network.
    own = is_pretrained(options.model)
    pairs = {
        "network": (setting.network, setting.network if own else options.model.get("network")),
        "method": (setting.method, options.method),
        "seed": (seed.removeprefix("seed"), str(options.seed)),
    }
    for option, value in changes_of(f"{setting.option}={setting.value}").items():
        pairs[option] = canonical(value), run.value_of(option)
    for name, (named, found) in pairs.items():
        if named != found:
            raise UserError(f"{name} is {found}, but the folder says {named}", path=run.where)


def _check_alike(run: Run, other: Run) -> None:
    """Raise `UserError` if runs of a setting differ in more than the seed: do not average them."""
    theirs = {**vars(other.options), "seed": run.seed}
    if difference := next(differences(theirs, vars(run.options)), ""):
        problem = f"not another seed of {other.path}: {difference}"
        remedy = "train both with the same options, or report them separately"
        raise UserError(problem, path=run.where, remedy=remedy)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts seed10 after seed2."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D+)(\d*)", str(path))]
