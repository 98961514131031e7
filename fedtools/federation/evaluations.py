"""How far an experiment has come, and what was measured of it; without its models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.messages import find_messages
from fedtools.files.tables import count, read_tsv, write_tsv
from fedtools.tasks import facts_of
from fedtools.tasks.facts import Facts, data_of

AVERAGED = ("client", "rounds")


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


def write_averaged(experiment: Experiment, rounds: Mapping[str, Sequence[int]]) -> None:
    """Keep which rounds' models were averaged: those of `ALL`, and of each client with its own."""
    rows = [
        {"client": client, "rounds": " ".join(map(str, numbers))}
        for client, numbers in rounds.items()
    ]
    write_tsv(experiment.averaged, AVERAGED, rows)


def read_averaged(experiment: Experiment) -> dict[str, list[int]]:
    """What `write_averaged` wrote; {} where nothing was averaged, or before it was written."""
    path, found = experiment.averaged, dict[str, list[int]]()
    for line, row in enumerate(read_tsv(path, AVERAGED) if path.exists() else [], 2):
        numbers = row["rounds"].split(" ")
        if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers):
            problem = f"{row['rounds']!r} are no rounds"
            raise UserError(problem, path=path, line=line, remedy="run fedtools average")
        found[row["client"]] = [int(number) for number in numbers]
    return found


def read_evaluation(path: Path, facts: Facts) -> dict[tuple[int, str], dict[str, str]]:
    """The rows of `Experiment.evaluation` by round and client; none if it is not there."""
    # Of data without a word or a clip there is no rate.
    unknown = ("nan", "inf")
    rows = read_tsv(path, facts.header, facts.columns, unknown) if path.exists() else []
    return {
        (count(row, "round", path, line), row["client"]): row for line, row in enumerate(rows, 2)
    }
