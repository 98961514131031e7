"""How far an experiment has come, and what was measured of it; without its models."""

from __future__ import annotations

from pathlib import Path

from fedtools.files.experiment import Experiment
from fedtools.files.messages import find_messages
from fedtools.files.tables import count, read_tsv
from fedtools.tasks import facts_of
from fedtools.tasks.facts import Facts, data_of


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
    if not options.keep_updates and any(find_messages(experiment.round(complete).path)):
        return False
    if split is None:
        return True
    table = experiment.evaluation(split)
    if split not in options.data or not table.exists():
        return False
    data_of(experiment, split)
    done = read_evaluation(table, facts_of(options.task, experiment.path / "config.yaml"))
    # A model that was measured by client always is.
    clients = {client for _, client in done}
    numbers = filter(experiment.is_measured, range(complete + 1))
    return bool(done) and all((number, client) in done for number in numbers for client in clients)


def read_evaluation(path: Path, facts: Facts) -> dict[tuple[int, str], dict[str, str]]:
    """The rows of `Experiment.evaluation` by round and client; none if it is not there."""
    # Of data without a word or a clip there is no rate.
    unknown = ("nan", "inf")
    rows = read_tsv(path, facts.header, facts.columns, unknown) if path.exists() else []
    return {
        (count(row, "round", path, line), row["client"]): row for line, row in enumerate(rows, 2)
    }
