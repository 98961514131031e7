"""What one method cost and how well it did, read from its experiment and its scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtools.federation.tasks import TASKS, Task
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import SERVER_ROW, read_ledger
from fedtools.files.tables import count, format_table, number, read_tsv
from fedtools.methods import METHODS
from fedtools.score.bootstrap import ALL, AVERAGE
from fedtools.score.wer import COLUMNS as SCORE_COLUMNS


@dataclass(frozen=True)
class Interval:
    """A rate in percent with its 95 % interval; None where the bound is not known."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Cost:
    """What a federation cost: bytes in both directions, epochs of training, rounds.

    `client_epochs` is the mean over the clients in the ledger of the sum over rounds.
    """

    bytes: int = 0
    client_epochs: float = 0.0
    server_epochs: float = 0.0
    rounds: int = 0


@dataclass(frozen=True)
class Method:
    """One row of the tables.

    Attributes:
        name: as the table shows it.
        cost: all zero for a model that no federation trained.
        seed: of the experiment, if there is one.
        words: client -> (utterances, words) that were scored.
        rates: "wer" or "cer" -> client -> rate; the last client is `average`.
        curve: round -> client -> WER on validation data in percent; empty if not evaluated.
        experiment: its folder, if there is one.
    """

    name: str
    cost: Cost
    seed: int | None
    words: dict[str, tuple[int, int]]
    rates: dict[str, dict[str, Interval]]
    curve: dict[int, dict[str, float]]
    experiment: Path | None


def read_method(name: str, experiment: Path | None, scores: Path) -> Method:
    """Read what a row of the tables needs.

    Args:
        name: the method's name in the tables; by default its title.
        experiment: its folder, or None for a model that no federation trained.
        scores: the folder that `fedtools score` wrote.

    Raises:
        UserError: if a file is missing or malformed.
    """
    words, rates = _read_scores(scores / "wer.tsv")
    if experiment is None:
        return Method(name, Cost(), None, words, rates, {}, None)
    opened = Experiment(experiment)
    name = name or METHODS.get(opened.config["method"], experiment / "config.yaml").title
    evaluation = opened.evaluation("valid")
    curve = read_curve(evaluation, TASKS["asr"]) if evaluation.exists() else {}
    return Method(name, read_cost(opened), opened.seed, words, rates, curve, experiment)


def read_cost(experiment: Experiment) -> Cost:
    """Sum a ledger up; refused updates count too, since they were computed and sent."""
    size, server_epochs, rounds = 0, 0.0, 0
    clients: dict[str, float] = {}
    for row in read_ledger(experiment):
        size += row.bytes_down + row.bytes_up
        server_epochs += row.server_epochs
        rounds = max(rounds, row.round)
        if row.client != SERVER_ROW:
            clients[row.client] = clients.get(row.client, 0.0) + row.client_epochs
    mean = math.fsum(clients.values()) / len(clients) if clients else 0.0
    return Cost(size, mean, server_epochs, rounds)


def read_curve(path: Path, task: Task) -> dict[int, dict[str, float]]:
    """Read a task's `evaluate_<split>.tsv`: round -> client -> its rate in %, by rising rounds."""
    curve: dict[int, dict[str, float]] = {}
    for line, row in enumerate(read_tsv(path, task.header), 2):
        of_round = curve.setdefault(count(row, "round", path, line), {})
        if row["client"] in of_round:
            problem = f"round {row['round']} of {row['client']!r} comes twice"
            raise UserError(problem, path=path, line=line)
        of_round[row["client"]] = number(row, task.rate, path, line)
    first = next(iter(curve.values()), {})
    for at, of_round in curve.items():
        if of_round.keys() != first.keys():
            problem = f"round {at} has other clients than the first"
            raise UserError(problem, path=path, remedy="run fedtools evaluate again")
    return dict(sorted(curve.items()))


def cost_table(experiment: Experiment) -> str:
    """An experiment's ledger summed up by client, as an aligned table (`fedtools show`)."""
    sums: dict[str, list[float]] = {}
    for row in read_ledger(experiment):
        sizes, epochs = (row.bytes_down, row.bytes_up), (row.client_epochs, row.server_epochs)
        values = (1, *sizes, *epochs, row.seconds, row.status != "ok")
        before = sums.get(row.client, [0] * len(values))
        sums[row.client] = [old + new for old, new in zip(before, values, strict=True)]
    if not sums:
        raise UserError("no round yet", path=experiment.path, remedy="run fedtools rounds")
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    total[0] = max(values[0] for values in sums.values())
    header = ["client", "rounds", "down", "up", "client epochs", "server epochs", "s", "refused"]
    texts = (str, size_text, size_text, epochs_text, epochs_text, "{:.1f}".format, str)
    rows = [
        [client, *(text(value) for text, value in zip(texts, values, strict=True))]
        for client, values in [*sums.items(), ("total", total)]
    ]
    return format_table(header, [["server", *r[1:]] if r[0] == SERVER_ROW else r for r in rows])


def size_text(size: float) -> str:
    """Bytes in the largest decimal unit that leaves a digit before the point; a dash for none."""
    if not size:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"


def epochs_text(epochs: float) -> str:
    """Epochs as short as they can be told; a dash for none."""
    return f"{round(epochs, 2):g}" if epochs else "-"


def check_comparable(methods: Sequence[Method]) -> None:
    """Insist that all methods were scored on the same clients, utterances and words."""
    for method in methods[1:]:
        if method.words != methods[0].words:
            problem = f"{method.name!r} was not scored on the same test data as {methods[0].name!r}"
            raise UserError(problem, remedy="score both on one data directory")


def _read_scores(path: Path) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, Interval]]]:
    rows = read_tsv(path, SCORE_COLUMNS)
    if [row["client"] for row in rows[-2:]] != [AVERAGE, ALL]:
        problem = f"the last rows are not {AVERAGE} and {ALL}"
        raise UserError(problem, path=path, remedy="run fedtools score")
    for column in ("utterances", "words"):
        *clients, _, total = (count(row, column, path, line) for line, row in enumerate(rows, 2))
        # Without clients, the total alone is there.
        if clients and sum(clients) != total:
            problem = f"the clients' {column} are {sum(clients)}, {ALL} has {total}"
            raise UserError(problem, path=path, remedy="run fedtools score again")
    words: dict[str, tuple[int, int]] = {}
    rates: dict[str, dict[str, Interval]] = {"wer": {}, "cer": {}}
    for line, row in enumerate(rows[:-1], 2):
        client = row["client"]
        words[client] = count(row, "utterances", path, line), count(row, "words", path, line)
        for rate, of_client in rates.items():
            columns = (f"{rate}_low", f"{rate}_high")
            bounds = (None if row[c] == "-" else number(row, c, path, line) for c in columns)
            of_client[client] = Interval(number(row, rate, path, line), *bounds)
    return words, rates
