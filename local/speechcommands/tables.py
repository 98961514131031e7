"""The tables of keyword spotting, in Markdown, like those of X.-C. Li et al., Interspeech 2022.

Figures are means over seeds +- their sample standard deviation, the number of seeds in brackets;
a dash stands for experiments that were not run.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from differences import accuracy_effects
from options import SERVER_CLIPS, changes_of
from runs import (
    COSTS,
    Run,
    Runs,
    is_federated,
    network_title,
    title_of,
)

from fedtools.core.errors import UserError
from fedtools.core.tables import format_markdown, read_tsv, size_text, with_deviation
from fedtools.models.training import OPTIMIZERS
from fedtools.report.differences import cells, note_of
from fedtools.report.page import embolden
from fedtools.report.results import epochs_text
from fedtools.score.crossed import Difference, differences
from fedtools.score.detection import RATES

# Options that figure 3 varies -> their symbols in the paper.
SYMBOLS = {"smoothing": "mu", "adversarial": "lambda"}

PUBLISHED_COLUMNS = ("source", "classes", "network", "method", "quantity", "value", "note")


class Published:
    """Published figures, from a table with `PUBLISHED_COLUMNS`; classes identify a task."""

    def __init__(self, path: str | Path | None):
        self._rows = read_tsv(path, PUBLISHED_COLUMNS) if path else []

    def value(self, source: str, classes: int, network: str, method: str, quantity: str) -> str:
        """Return a published figure, or a dash."""
        place = (source, str(classes), network, method, quantity)
        wanted = dict(zip(PUBLISHED_COLUMNS[:5], place, strict=True))
        found = (row["value"] for row in self._rows if wanted.items() <= row.items())
        return next(found, "-")

    def table(self, source: str, classes: Container[str]) -> str:
        """Return a table of the figures from one place in the paper, "" without any."""
        rows = [
            [
                row["classes"],
                "-" if row["network"] == "-" else network_title(row["network"]),
                "-" if row["method"] == "-" else title_of(row["method"]),
                row["value"],
                row["note"],
            ]
            for row in self._rows
            if row["source"] == source and row["classes"] in classes
        ]
        header = ["Classes", "Network", "Method", "Accuracy (%)", "Note"]
        return format_markdown(header, rows, "lllrl") if rows else ""


def clients_table(runs: Runs, published: Published, here: str) -> str:
    """Return table 1: the distribution of clips over clients; `here` names our own figures."""
    rows = []
    for task in runs.tasks:
        classes, sizes, test, _ = runs.data[task]
        total = sum(sizes.values())
        mean = f"{total / len(sizes):.1f}"
        rows.append([task, here, classes, len(sizes), total, mean, max(sizes.values()), test])
        names = ("clients", "clips", "clips per client", "most clips", "test clips")
        values = [published.value("table 1", classes, "-", "-", name) for name in names]
        if set(values) != {"-"}:
            rows.append([task, "published", classes, *values])
    header = ["Task", "Figures", "Classes", "Clients", "Clips"]
    header += ["Clips per client", "Most clips", "Test clips"]
    return format_markdown(header, rows, "ll" + "r" * 6)


def centralized_table(runs: Runs, published: Published, here: str) -> str:
    """Return table 2: parameters, and accuracy after centralised training."""
    rows = []
    for task, network in runs.columns:
        parameters = runs.having(task=task, network=network)[0].parameters
        ours = cell([run.final for run in runs.get(task, network, "centralized")])
        theirs = [
            published.value("table 2", runs.data[task].classes, network, "centralized", name)
            for name in ("parameters", "accuracy")
        ]
        name = network_title(network)
        rows.append([name, task, _thousands(parameters), theirs[0], ours, theirs[1]])
    header = ["Network", "Task"]
    for name in ("Parameters", "Accuracy (%)"):
        header += [f"{name}, {here}", f"{name}, published"]
    return format_markdown(header, rows, "lrrrrr")


def settings_table(runs: Runs) -> str:
    """Return the table of the networks' training settings, with the values of all runs."""
    rows = []
    for network in runs.networks:
        for federated in (True, False):
            found = runs.having(network=network)
            if found := [run for run in found if is_federated(run.setting.method) == federated]:
                name = "federated" if federated else "centralised"
                cells = (_values(map(value, found)) for value in _SETTINGS.values())
                rows.append([network_title(network), name, *cells])
    return format_markdown(["Network", "Training", *_SETTINGS], rows, "ll" + "r" * len(_SETTINGS))


def _clients_per_round(run: Run) -> str:
    count = run.options.clients_per_round if run.options.clients else "-"
    return f"{100 * count:g} %" if isinstance(count, float) else str(count or "all")


def _weight_decay(run: Run) -> object:
    default = inspect.signature(OPTIMIZERS[run.training.optim]).parameters["weight_decay"].default
    return run.training.optim_conf.get("weight_decay", default)


def _sizes(run: Run) -> str:
    options = run.options.model.get("network_conf") or {}
    return " ".join(f"{name}={value}" for name, value in options.items()) or "-"


_SETTINGS: dict[str, Callable[[Run], object]] = {
    "Rounds": lambda run: run.options.rounds,
    "Clients a round": _clients_per_round,
    # With 0, clients train by epochs instead.
    "Local steps": lambda run: run.method.local_steps or "-",
    "Clips a step": lambda run: run.training.batch_size,
    "Optimiser": lambda run: run.training.optim,
    "Learning rate": lambda run: run.training.optim_conf.get("lr", "-"),
    "Weight decay": _weight_decay,
    "Network options": _sizes,
}


def _values(found: Iterable[object]) -> str:
    return ", ".join(sorted({str(value) for value in found}))


@dataclass(frozen=True)
class AccuracyTable:
    """Accuracies of rows by task and network, and columns of differences to reference rows.

    Attributes:
        runs: all experiments.
        rows: name -> the runs of each of `runs.columns`.
        references: names of reference rows, as for `named`, of this table or another.
        best: whether the best accuracy is in bold if there are no references.
    """

    runs: Runs
    rows: Mapping[str, Sequence[Sequence[Run]]]
    references: Sequence[str] = ()
    best: bool = True

    @cached_property
    def differences(self) -> list[list[list[Difference | None]]]:
        """Return, for each reference, task and network, a difference for each row."""
        found = []
        for name in self.references:
            others = named(self.runs, name)
            columns = zip(zip(*self.rows.values(), strict=True), others, strict=True)
            found.append(
                [
                    differences([accuracy_effects(one, other) for one in own])
                    for own, other in columns
                ]
            )
        return found

    def markdown(self) -> str:
        """Return the table; figures that are better than a reference are in bold."""
        table = [[name, *map(_lasting, found)] for name, found in self.rows.items()]
        header = ["Method", *_headings(self.runs)]
        for column in range(1, len(header) if self.best and not self.references else 1):
            embolden(table, column, max)
        # All differences in this table are one family of tests.
        flat = [[one for column in found for one in column] for found in self.differences]
        texts = cells(flat, 1)
        for place in reversed(range(len(self.runs.columns))):
            at = place + 2
            header[at:at] = [f"to {name}" for name in self.references]
            for index, row in enumerate(table):
                row[at:at] = [text[place * len(table) + index] for text in texts]
        return format_markdown(header, table)

    @property
    def note(self) -> str:
        """Return a note on how to read the columns of differences, "" without any."""
        if not self.references:
            return ""
        found = [[one for column in of for one in column] for of in self.differences]
        several = any(len(own) > 1 for row in self.rows.values() for own in row)
        text = note_of(self.references, found, several, "accuracy")
        return f" {text}" + " Only seeds that both have are compared." * several


def named(runs: Runs, name: str) -> list[list[Run]]:
    """Return the runs of the row with a name, for each task and network.

    Raises:
        UserError: if there is no such row.
    """
    settings = {at[2:] for at in runs.complete}
    for one in settings:
        if varied(*one) == name:
            return [runs.get(*place, *one) for place in runs.columns]
    rows = ", ".join(sorted(f"{varied(*one)!r}" for one in settings))
    raise UserError(f"no row {name!r} to compare with", remedy=f"choose one of {rows}")


def accuracy_table(runs: Runs, references: Sequence[str] = ()) -> AccuracyTable:
    """Return the table of figure 2: final accuracy of every method, network and task.

    Servers that train alone come first, the one with the fewest clips at the beginning.
    """
    settings = [*runs.alone, *((one, "", "") for one in runs.methods(True))]
    rows = {varied(*one): [runs.get(*place, *one) for place in runs.columns] for one in settings}
    return AccuracyTable(runs, rows, references)


def ablations(runs: Runs) -> list[str]:
    """Return what figure 3 can show: "alt", and the options of `SYMBOLS` that were varied."""
    found = {(setting.method, setting.option) for setting in runs.complete}
    shown = {"alt": ("alt", ""), **{option: ("fedkws_ui", option) for option in SYMBOLS}}
    return [name for name, place in shown.items() if place in found]


def ablation_table(runs: Runs, references: Sequence[str] = ()) -> AccuracyTable:
    """Return the table of figure 3: ALT alone and FedAvg, and FedKWS-UI by mu and lambda."""
    rows = {
        title_of(method): [runs.get(*place, method) for place in runs.columns]
        for method in ("fedavg", "alt", "alo", "fedkws_ui")
    }
    changed = {(at.method, at.option) for at in runs.complete if at.option and not at.alone}
    # The paper's options first, in its order.
    ranks = {pair: (pair[0], [*SYMBOLS, pair[1]].index(pair[1]), pair[1]) for pair in changed}
    for method, option in sorted(changed, key=ranks.__getitem__):
        found = [ablation(runs, *place, method, option) for place in runs.columns]
        values = {value for one in found for value in one}
        for value in sorted(values, key=by_value):
            rows[varied(method, option, value)] = [one.get(value, []) for one in found]
    return AccuracyTable(
        runs, {name: row for name, row in rows.items() if any(row)}, references, False
    )


def ablation(runs: Runs, task: str, network: str, method: str, option: str) -> dict[str, list[Run]]:
    """Return value of a method's option -> runs that differ only in it, in order of values.

    The method as configured is included with its runs of the same seeds only, since a mean over
    more seeds could not be compared. Without runs of changed values, the result is empty.
    """
    found = {
        setting.value: seeds
        for setting, seeds in runs.complete.items()
        if (setting.task, setting.network, setting.method) == (task, network, method)
        and setting.option == option
    }
    numbers = {run.seed for seeds in found.values() for run in seeds}
    plain = [run for run in runs.get(task, network, method) if run.seed in numbers]
    if plain and "=" not in option:
        found.setdefault(plain[0].value_of(option), plain)
    return {value: found[value] for value in sorted(found, key=by_value)}


def by_value(text: str) -> tuple[float, str]:
    """Return a sort key that orders numbers by value, before words."""
    try:
        return float(text), ""
    except ValueError:
        return math.inf, text


def detection_table(runs: Runs, published: Published, here: str) -> str:
    """Return table 3: false accepts and rejects, "" if they were not measured."""
    rows = []
    for task, network, method in runs.places:
        found = [run.detection() for run in runs.get(task, network, method)]
        if found := [rates for rates in found if rates is not None]:
            ours = [cell([rates[name] for rates in found]) for name in RATES]
            place = runs.data[task].classes, network, method
            theirs = [published.value("table 3", *place, name) for name in RATES[:2]]
            rows.append([task, network_title(network), title_of(method), *ours, *theirs])
    header = ["Task", "Network", "Method"]
    header += [
        f"{name}, {here}" for name in ("FA", "FR", "FA in % of negatives", "FR in % of positives")
    ]
    header += ["FA, published", "FR, published"]
    return format_markdown(header, rows, "lll" + "r" * 6) if rows else ""


def private_table(runs: Runs) -> str:
    """Return the table of private models' accuracies, "" if they were not measured."""
    rows = []
    for place in runs.places:
        found = {at: seeds for at, seeds in runs.complete.items() if at[:3] == place}
        for at in sorted(found, key=lambda at: (at.option, by_value(at.value))):
            measured = [row for run in found[at] if (row := run.private_models())]
            if measured:
                values = [cell([row[name] for row in measured]) for name in measured[0]]
                rows.append([at.task, network_title(at.network), varied(*at[2:]), *values])
    header = ["Task", "Network", "Method", "Private, own clips", "Private, test clips"]
    header += ["Shared, own clips", "Shared, test clips"]
    return format_markdown(header, rows, "lll" + "r" * 4) if rows else ""


def cost_table(runs: Runs) -> str:
    """Return the table of costs from the ledgers: means over seeds, also for changed options."""
    rows = []
    for place in runs.places:
        found = {at: seeds for at, seeds in runs.complete.items() if at[:3] == place}
        for at in sorted(found, key=lambda at: (at.option, by_value(at.value))):
            costs = [run.costs(runs.data[at.task].sizes) for run in found[at]]
            cells = [epochs_text(statistics.fmean(cost[name] for cost in costs)) for name in COSTS]
            cells[-2] = epochs_text(sum(cost["Left out"] for cost in costs))
            cells[-1] = size_text(statistics.fmean(cost["Comm."] for cost in costs))
            rows.append([at.task, network_title(at.network), varied(*at[2:]), *cells])
    return format_markdown(["Task", "Network", "Method", *COSTS], rows, "lll" + "r" * len(COSTS))


def varied(method: str, option: str, value: str) -> str:
    """Return a method's name in tables, with its changed options."""
    if (method, option) == ("centralized", SERVER_CLIPS):
        return f"Server alone, {value} clips"
    changed = changes_of(f"{option}={value}").items()
    return "".join([title_of(method), *(f", {SYMBOLS.get(one, one)} = {v}" for one, v in changed)])


def _headings(runs: Runs) -> list[str]:
    return [f"{task} {network_title(network)}" for task, network in runs.columns]


def _lasting(runs: Sequence[Run]) -> str:
    return cell([run.lasting for run in runs])


def cell(values: Sequence[float]) -> str:
    """Format mean, standard deviation and number of seeds, "81.20 ± 0.45 (3)"; "-" if none."""
    if not values:
        return "-"
    return f"{with_deviation(values, '{:.2f}'.format)} ({len(values)})"


def _thousands(number: int) -> str:
    return f"{number / 1000:.1f}k"
