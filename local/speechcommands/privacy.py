"""Accuracy by epsilon: the table and the picture of models trained with user-level privacy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runs import Run, Runs, Setting, network_title
from tables import cell, varied

from fedtools.core.tables import format_markdown
from fedtools.methods.dpfedavg import DpFedAvg
from fedtools.privacy.user_plan import FILE, UserPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "Network", "A round's clients", "Users", "Server", "Rounds", "Clip", "Noise", "Epsilon",
    "Of the clients", "Accuracy",
)  # fmt: skip
NOTE = (
    "Accuracy on the test clips, the mean of the last evaluations; means over seeds ± standard "
    "deviations, the number of seeds in brackets. Epsilon is that of all rounds of one experiment, "
    "from a federation in which one client's data are empty; other seeds, and other rows on the "
    "same clients, add to it (`fedtools privacy`). Server: its optimiser and rate. Clip: C. Noise: "
    "its deviation on a sum, in multiples of C (and of the norm of the coefficients). Of "
    "simulated users, the noise on the mean is that of as many users with this epsilon, and the "
    "next column has the epsilon of the clients that there are. Outside of epsilon are the data "
    "of a pretrained model, and the server's clips, which a projection is fitted on."
)


class Private(NamedTuple):
    """A row with user-level privacy, or with its clipping alone.

    Attributes:
        setting: its place and options.
        runs: of all seeds.
        plan: what was planned, which seeds share.
    """

    setting: Setting
    runs: Sequence[Run]
    plan: UserPlan

    @property
    def epsilon(self) -> float | None:
        """Return the epsilon that was asked for, or what given noise spends; None without noise."""
        method = self.runs[0].method
        assert isinstance(method, DpFedAvg)
        return self.plan.epsilon if method.epsilon is None else method.epsilon

    @property
    def taking_part(self) -> str:
        """Return who takes part in a round."""
        if self.plan.cohorts:
            bands = len(self.plan.coefficients)
            noise = "independent noise" if bands == 1 else f"noise of {bands} bands"
            return f"one of {self.plan.cohorts} cohorts, {noise}"
        share = self.plan.share
        return "all" if share == 1 else f"a secret {100 * share:.3g} %"

    @property
    def users(self) -> str:
        """Return their number, real or simulated."""
        real, factor = self.plan.clients, self.plan.simulated_users
        return f"{real:,}" if factor == 1 else f"{real * factor:,.0f} simulated"

    @property
    def server(self) -> str:
        """Return the server's optimiser and rate."""
        method = self.runs[0].method
        assert isinstance(method, DpFedAvg)
        return f"{method.optimizer} {method.learning_rate:g}"

    @property
    def cells(self) -> list[str]:
        """Return the row of the table."""
        plan, runs = self.plan, self.runs
        found = {run.options.rounds for run in runs}
        return [
            network_title(self.setting.network), self.taking_part, self.users,
            self.server, " and ".join(map(str, sorted(found))),
            f"{plan.clip:g}", f"{plan.noise:.3g}",
            _number(self.epsilon), _number(plan.epsilon), cell([run.lasting for run in runs]),
        ]  # fmt: skip


class Accuracies:
    """The rows of a task with user-level privacy, and what they are compared with.

    Args:
        runs: all experiments.
        task: one of their tasks.
    """

    def __init__(self, runs: Runs, task: str):
        self.runs, self.task = runs, task

    @cached_property
    def rows(self) -> list[Private]:
        """Return the rows: by network, who takes part, number of users, and epsilon falling."""
        found = [
            Private(setting, runs, UserPlan.read(runs[0].path))
            for setting, runs in self.runs.complete.items()
            if setting.task == self.task and (runs[0].path / FILE).exists()
        ]
        order = self.runs.networks
        return sorted(found, key=lambda one: (
            order.index(one.setting.network), one.plan.cohorts, one.plan.share,
            len(one.plan.coefficients), one.plan.simulated_users, -(one.epsilon or 1e300),
            one.plan.rounds, one.server,
        ))  # fmt: skip

    @property
    def shown(self) -> bool:
        """Return whether there are several epsilons to compare."""
        return len({one.epsilon for one in self.rows} - {None}) > 1

    @property
    def table(self) -> str:
        """Return the table in Markdown."""
        return format_markdown(COLUMNS, [one.cells for one in self.rows], "llll" + "r" * 6)

    def draw(self, path: Path, title: str) -> None:
        """Draw accuracy by epsilon, a panel a network, and levels of what has no epsilon."""
        from fedtools.core.drawing import drawing

        networks = list(
            dict.fromkeys(one.setting.network for one in self.rows if one.epsilon is not None)
        )
        with drawing(path, (3.0 * len(networks) + 0.4, 4.2)) as figure:
            (panels,) = figure.subplots(1, len(networks), squeeze=False)
            for axes, network in zip(panels, networks, strict=True):
                self._panel(axes, network)
            panels[0].set_ylabel("Test accuracy (%)")
            figure.suptitle(title, fontsize=10, wrap=True)

    def _panel(self, axes: Axes, network: str) -> None:
        from figures import level, points
        from matplotlib.ticker import FuncFormatter

        own = [one for one in self.rows if one.setting.network == network]
        series: dict[str, list[Private]] = {}
        for one in own:
            if one.epsilon is not None:
                users = "" if one.plan.simulated_users == 1 else f", {one.users}"
                name = f"{one.taking_part}{users}"
                # Of rows with the same epsilon, the second begins a line of its own.
                if one.epsilon in [other.epsilon for other in series.get(name, [])]:
                    name += f", server {one.server}"
                series.setdefault(name, []).append(one)
        for index, (name, found) in enumerate(series.items()):
            epsilons = [one.epsilon or 0.0 for one in found]
            points(axes, epsilons, [one.runs for one in found], name, index, "-")
        silent = [one.runs for one in own if one.epsilon is None]
        levels = {"no noise": silent[0]} if silent else {}
        for setting in self.runs.alone:
            levels[varied(*setting)] = self.runs.get(self.task, network, *setting)
        for index, (name, runs) in enumerate(levels.items(), len(series)):
            if runs:
                level(axes, runs, name, index)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xticks(sorted({one.epsilon for one in own if one.epsilon is not None}))
        axes.minorticks_off()
        axes.set_xlabel("epsilon")
        axes.set_title(f"{network_title(network)}, task {self.task}", fontsize=9)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=8)


def _number(epsilon: float | None) -> str:
    return "-" if epsilon is None else f"{epsilon:.3g}"
