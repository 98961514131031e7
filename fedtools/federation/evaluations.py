"""Progress and evaluation results of an experiment, read without its models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv, write_tsv
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.messages import find_messages
from fedtools.tasks import facts_of
from fedtools.tasks.facts import Facts, data_of

AVERAGED = ("client", "rounds")


def is_finished(path: str | Path, last: int | None = None, split: str | None = None) -> bool:
    """Return whether `run_rounds` with these arguments would have nothing to do.

    Raises:
        UserError: if the data of the split have changed since the experiment began.
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
    # A model evaluated by client is evaluated by client in all rounds.
    clients = {client for _, client in done}
    numbers = filter(experiment.is_measured, range(complete + 1))
    return bool(done) and all((number, client) in done for number in numbers for client in clients)


def write_averaged(experiment: Experiment, rounds: Mapping[str, Sequence[int]]) -> None:
    """Write the rounds whose models were averaged, for `ALL` and for clients with their own."""
    rows = [
        {"client": client, "rounds": " ".join(map(str, numbers))}
        for client, numbers in rounds.items()
    ]
    write_tsv(experiment.averaged, AVERAGED, rows)


def read_averaged(experiment: Experiment) -> dict[str, list[int]]:
    """Read the table of `write_averaged`; return {} if there is none."""
    path, found = experiment.averaged, dict[str, list[int]]()
    for line, row in enumerate(read_tsv(path, AVERAGED) if path.exists() else [], 2):
        numbers = row["rounds"].split(" ")
        if not all(re.fullmatch(r"[0-9]{1,9}", number) for number in numbers):
            problem = f"{row['rounds']!r} is not a list of rounds"
            raise UserError(problem, path=path, line=line, remedy="run fedtools average")
        found[row["client"]] = [int(number) for number in numbers]
    return found


def read_evaluation(path: Path, facts: Facts) -> dict[tuple[int, str], dict[str, str]]:
    """Read the rows of `Experiment.evaluation` by round and client; return {} if it is missing."""
    # Data without words or clips have no rate.
    unknown = ("nan", "inf")
    rows = read_tsv(path, facts.header, facts.columns, unknown) if path.exists() else []
    return {
        (count(row, "round", path, line), row["client"]): row for line, row in enumerate(rows, 2)
    }
