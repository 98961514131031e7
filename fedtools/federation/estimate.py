"""The time that an experiment's rounds take, from two of them in a temporary copy."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.federation.evaluate import evaluate
from fedtools.federation.federation import Federation
from fedtools.federation.rounds import trainer
from fedtools.federation.steps import aggregate, sample
from fedtools.federation.user_privacy import UserProtection
from fedtools.tasks.facts import check_at_hand

# The second round is timed: the first also reads data, and fills caches.
TIMED = 2


@dataclass(frozen=True)
class Estimate:
    """What is left of an experiment: rounds and evaluations, and the seconds of one of each."""

    rounds: int
    round: float
    evaluations: int
    evaluation: float

    @property
    def seconds(self) -> float:
        """Return the time of all of them, without the start of the process."""
        return self.rounds * self.round + self.evaluations * self.evaluation


def estimate(
    path: str | Path, jobs: int = 1, device: str = "cpu", split: str | None = None
) -> Estimate:
    """Time the next two rounds of an experiment, and an evaluation, in a copy of it.

    All rounds that are left count like the second one, also those of another phase of the method.

    Args:
        path: the folder of the experiment, which is only read.
        jobs: the number of processes that train clients in parallel.
        device: "cpu" or "cuda".
        split: data for evaluation; None means that models are not evaluated.

    Raises:
        UserError: if there is no experiment, or all its rounds are complete.
    """
    begun = Experiment(path)
    check_at_hand(begun)
    last, rounds = begun.last_round(), begun.options.rounds
    if last >= rounds:
        raise UserError("all rounds are complete", path=begun.path)
    # Beside the experiment, because the copy's files are links where nothing changes.
    with tempfile.TemporaryDirectory(prefix=".estimate-", dir=begun.path.absolute().parent) as made:
        copy = Path(made) / begun.path.absolute().name
        ignored = shutil.ignore_patterns(".locks")
        shutil.copytree(begun.path, copy, copy_function=_link, ignore=ignored)
        federation = Federation(copy, device)
        _check_quiet(federation, begun.path)
        each = _time_rounds(federation, range(last, min(last + TIMED, rounds)), jobs, device)
        if split is None:
            return Estimate(rounds - last, each, 0, 0.0)
        # The first evaluation is not timed, because it reads the data.
        evaluate(federation, [0], split)
        start = time.monotonic()
        evaluate(federation, [federation.experiment.last_round()], split)
        measured = time.monotonic() - start
    # Round 0 is the initial state.
    evaluations = sum(map(begun.is_measured, range(last + 1 if last else 0, rounds + 1)))
    return Estimate(rounds - last, each, evaluations, measured)


def _check_quiet(federation: Federation, path: Path) -> None:
    """Raise a `UserError` if rounds are releases, which count, too, if they are thrown away."""
    if federation.method.secure_sums:
        problem = "its clients bind themselves to the sum of each round, also if it is only timed"
        remedy = "time an experiment with method_conf.sums=plain"
        raise UserError(problem, path=path, remedy=remedy)
    protection = federation.protection
    if isinstance(protection, UserProtection) and protection.releases.plan.deviation:
        problem = "its rounds release noisy sums, which count, too, if they are only timed"
        remedy = "time an experiment with method_conf.noise=0 and epsilon=null"
        raise UserError(problem, path=path, remedy=remedy)


def _link(source: str, target: str) -> None:
    """Link a file, since all are replaced and none is written to; where that fails, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _time_rounds(federation: Federation, done: range, jobs: int, device: str) -> float:
    """Run the rounds that follow these, and return the seconds of the last one."""
    experiment, seconds = federation.experiment, 0.0
    with trainer(federation, max(1, min(jobs, len(experiment.clients))), device) as train:
        for number in (one + 1 for one in done):
            start = time.monotonic()
            if sample(experiment, federation.method, number, jobs):
                train(number, experiment.round(number).jobs())
            aggregate(federation, number)
            seconds = time.monotonic() - start
    return seconds
