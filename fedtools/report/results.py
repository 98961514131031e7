"""Costs and error rates of one method, read from its experiment and its scores."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from fedtools.core.errors import UserError, some
from fedtools.core.tables import count, format_table, number, read_tsv, size_text
from fedtools.core.text_files import stream_lines
from fedtools.data.text_units import TextUnit
from fedtools.decode.lists import TunedWeights, used_weights
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import SERVER_ROW, read_ledger
from fedtools.exchange.messages import COLLAPSED, COLLAPSED_FROM, COUNTED
from fedtools.federation.evaluations import read_averaged
from fedtools.methods import METHODS
from fedtools.report.done import rounds_text, seconds_of, server_share, speech_text
from fedtools.score.bootstrap import ALL, AVERAGE
from fedtools.score.crossed import mean_bounds
from fedtools.score.pairs import cuts_of
from fedtools.score.utterances import FILE, Utterances
from fedtools.score.wer import columns_of, text_unit_of_columns
from fedtools.tasks import facts_of
from fedtools.tasks.facts import Facts

# Follows the name of a method in tables if its pseudo-labels collapsed.
MARK = "†"
DONE = ("Computation", "Steps", "Speech", "Averaged")


@dataclass(frozen=True)
class Interval:
    """A rate in percent with its 95 % interval; None for a bound that is not known."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Cost:
    """The cost of a federation: bytes in both directions, epochs of training, rounds.

    `client_bytes` and `client_epochs` are means over the clients in the ledger of sums over rounds.
    `steps` and `speech`, in seconds, cover all training, including the server's; `server_share` is
    the share of the model that the server trains.
    """

    bytes: float = 0
    client_bytes: float = 0
    client_epochs: float = 0.0
    server_epochs: float = 0.0
    rounds: int = 0
    steps: float = 0
    speech: float = 0.0
    server_share: float = 1.0

    @property
    def computation(self) -> float:
        """Return the epochs of a whole model, the mean client's and the server's together."""
        return self.client_epochs + self.server_share * self.server_epochs


@dataclass(frozen=True)
class Run:
    """A method with one seed.

    Attributes:
        name: as the table shows it.
        cost: all zero for a model that no federation trained.
        seed: of the experiment, if there is one.
        unit: what the error rates count.
        scored: client -> (speakers, utterances, words or characters).
        rates: "wer" or "cer" -> client -> rate; the last client is `average`. The unit's rate comes
            first; for characters it is the only one.
        curve: round -> client -> its rate on validation data in percent; empty if not evaluated.
        experiment: its folder, if there is one.
        scores: the folder of its scores.
        counts: errors by utterance.
        weights: of the language model and of words, if hypotheses were re-ranked.
        collapsed: client, or "the server" -> the number of rounds in which its pseudo-labels
            collapsed.
        averaged: client -> rounds whose models were averaged for its own, see `read_averaged`.
    """

    name: str
    cost: Cost
    seed: int | None
    unit: TextUnit
    scored: dict[str, tuple[int, int, int]]
    rates: dict[str, dict[str, Interval]]
    curve: dict[int, dict[str, float]]
    experiment: Path | None
    scores: Path
    counts: Utterances
    weights: TunedWeights | None
    collapsed: dict[str, int]
    averaged: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """One row of the tables: a method with its runs, one for each seed."""

    name: str
    runs: list[Run]

    @property
    def marked(self) -> str:
        """Return the name, marked if pseudo-labels collapsed in any run; see `collapse_note`."""
        return f"{self.name} {MARK}" if any(run.collapsed for run in self.runs) else self.name

    @property
    def cost(self) -> Cost:
        """Return the mean cost over the seeds."""
        costs = [astuple(run.cost) for run in self.runs]
        return Cost(*(statistics.fmean(values) for values in zip(*costs, strict=True)))

    def values(self, rate: str, client: str) -> list[float]:
        """Return a rate of a client with each seed, in %."""
        return [run.rates[rate][client].value for run in self.runs]

    def interval(self, rate: str, client: str) -> Interval:
        """Return the mean over the seeds of a rate, with its interval over seeds and speakers."""
        found = [astuple(run.rates[rate][client]) for run in self.runs]
        values, *bounds = zip(*found, strict=True)
        mean = statistics.fmean(values)
        if any(None in ends for ends in bounds):
            return Interval(mean, None, None)
        low, high = mean_bounds(values, *bounds)
        return Interval(mean, max(0.0, float(low)), float(high))

    @property
    def curve(self) -> dict[int, list[float]]:
        """Return round -> mean over clients of the rate on validation data in %, for each seed."""
        curves = [run.curve for run in self.runs]
        shared = set.intersection(*map(set, curves))
        return {at: [statistics.fmean(c[at].values()) for c in curves] for at in sorted(shared)}


def group(runs: Sequence[Run]) -> list[Method]:
    """Group runs of the same name into one method, in the order in which names first appear.

    Raises:
        UserError: if a seed is duplicated, or the methods have different numbers of runs.
    """
    methods: dict[str, Method] = {}
    for run in runs:
        found = methods.setdefault(run.name, Method(run.name, []))
        for other in found.runs:
            if (other.experiment is None) != (run.experiment is None) or (
                other.scores == run.scores if run.seed is None else other.seed == run.seed
            ):
                seed = "the same scores" if run.seed is None else f"seed {run.seed}"
                problem = f"{run.name!r} is duplicated, with {seed}"
                remedy = "give another seed of it, or a name: --row NAME=EXP_DIR:SCORE_DIR"
                raise UserError(problem, remedy=remedy)
        found.runs.append(run)
    for method in methods.values():
        if len(method.runs) != len(runs) / len(methods):
            counts = ", ".join(f"{one.name} {len(one.runs)}" for one in methods.values())
            remedy = "give --row once for each method and seed"
            raise UserError(f"not all methods have the same seeds: {counts}", remedy=remedy)
    return list(methods.values())


def read_run(name: str, experiment: Path | None, scores: Path) -> Run:
    """Read what a row of the tables needs.

    Args:
        name: the method's name in the tables, with {} for the method's title, which is the default.
        experiment: its folder, or None for a model that no federation trained.
        scores: the folder that `fedtools score` wrote. If it is in another experiment, in which
            newcomers adapted, collapses of pseudo-labels in both are counted.

    Raises:
        UserError: if a file is missing or malformed.
    """
    unit, scored, rates = _read_scores(scores / "wer.tsv")
    counts = _read_counts(scores / FILE, unit, scored, rates)
    weights = used_weights(scores)
    if experiment is None:
        return Run(name, Cost(), None, unit, scored, rates, {}, None, scores, counts, weights, {})
    opened = Experiment(experiment)
    title = METHODS.get(opened.options.method, experiment / "config.yaml").title
    name = name.replace("{}", title) or title
    evaluation = opened.evaluation("valid")
    curve = read_curve(evaluation, facts_of("asr", evaluation)) if evaluation.exists() else {}
    cost, collapsed = read_cost(opened), Counter(read_collapsed(opened))
    adapted = scores.parent
    if (adapted / "config.yaml").exists() and not adapted.samefile(experiment):
        # The scores are of newcomers, who train in an experiment of their own.
        collapsed.update(read_collapsed(Experiment(adapted)))
    return Run(
        name,
        cost,
        opened.seed,
        unit,
        scored,
        rates,
        curve,
        experiment,
        scores,
        counts,
        weights,
        collapsed,
        read_averaged(opened),
    )


def read_cost(experiment: Experiment) -> Cost:
    """Sum a ledger up; the bytes of refused updates count too, since they were sent."""
    size, server_epochs, rounds, steps = 0, 0.0, 0, 0
    clients: dict[str, float] = {}
    rows = list(read_ledger(experiment))
    for row in rows:
        steps += row.steps
        size += row.bytes_down + row.bytes_up
        server_epochs += row.server_epochs
        rounds = max(rounds, row.round)
        if row.client != SERVER_ROW:
            clients[row.client] = clients.get(row.client, 0.0) + row.client_epochs
    each = max(1, len(clients))
    epochs = math.fsum(clients.values()) / each
    share, speech = server_share(experiment), seconds_of(experiment, rows)
    return Cost(size, size / each, epochs, server_epochs, rounds, steps, speech, share)


def read_collapsed(experiment: Experiment) -> dict[str, int]:
    """Count the rounds in which pseudo-labels collapsed, by client, or "the server"."""
    found: dict[str, int] = {}
    for row in read_ledger(experiment):
        if row.status == COLLAPSED:
            who = "the server" if row.client == SERVER_ROW else row.client
            found[who] = found.get(who, 0) + 1
    return found


def collapse_note(methods: Sequence[Method]) -> str:
    """Return a note on the mark, with the counts of collapsed pseudo-labels; "" without any."""
    counts = [
        f"{method.name}, seed {run.seed}: {_rounds_of(run.collapsed)}"
        for method in methods
        for run in method.runs
        if run.collapsed
    ]
    share = f"{100 * COLLAPSED_FROM:.0f} %"
    meaning = f"{MARK} pseudo-labels collapsed: in a round at least {share} of them were empty."
    return f"{meaning} Training went on. {'; '.join(counts)}." if counts else ""


def _rounds_of(collapsed: Mapping[str, int]) -> str:
    """Return in how many rounds the labels of each collapsed, for the first few by name."""
    named = [f"{who} in {times} round{'s' * (times != 1)}" for who, times in collapsed.items()]
    return some(named)


def read_curve(path: Path, facts: Facts) -> dict[int, dict[str, float]]:
    """Read a task's `evaluate_<split>.tsv`: round -> client -> its rate in %, by rising rounds."""
    curve: dict[int, dict[str, float]] = {}
    for line, row in enumerate(read_tsv(path, facts.header), 2):
        of_round = curve.setdefault(count(row, "round", path, line), {})
        if row["client"] in of_round:
            problem = f"round {row['round']} of {row['client']!r} is duplicated"
            raise UserError(problem, path=path, line=line)
        of_round[row["client"]] = number(row, facts.rate, path, line)
    first = next(iter(curve.values()), {})
    for at, of_round in curve.items():
        if of_round.keys() != first.keys():
            problem = f"round {at} has other clients than the first"
            raise UserError(problem, path=path, remedy="run fedtools evaluate again")
    return dict(sorted(curve.items()))


def cost_table(experiment: Experiment) -> str:
    """Sum up an experiment's ledger by client, as an aligned table (`fedtools show`)."""
    sums: dict[str, list[float]] = {}
    for row in read_ledger(experiment):
        sizes, epochs = (row.bytes_down, row.bytes_up), (row.client_epochs, row.server_epochs)
        marks = row.status not in COUNTED, row.status == COLLAPSED
        # A collapse in the server's training does not count as a round of the client.
        part = row.status != COLLAPSED or row.client_epochs > 0 or row.client == SERVER_ROW
        values = (part, *sizes, *epochs, row.seconds, *marks)
        before = sums.get(row.client, [0] * len(values))
        sums[row.client] = [old + new for old, new in zip(before, values, strict=True)]
    if not sums:
        raise UserError("no round yet", path=experiment.path, remedy="run fedtools rounds")
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    total[0] = max(values[0] for values in sums.values())
    header = ["client", "rounds", "down", "up", "client epochs", "server epochs", "s"]
    header += ["refused", "collapsed"]
    texts = (str, size_text, size_text, epochs_text, epochs_text, "{:.1f}".format, str, str)
    rows = [
        [client, *(text(value) for text, value in zip(texts, values, strict=True))]
        for client, values in [*sums.items(), ("total", total)]
    ]
    return format_table(header, [["server", *r[1:]] if r[0] == SERVER_ROW else r for r in rows])


def epochs_text(epochs: float) -> str:
    """Format epochs with at most two decimals; a dash for none."""
    return f"{round(epochs, 2):g}" if epochs else "-"


def server_text(cost: Cost) -> str:
    """Format the server's epochs, with the share of the model if it trains only a part."""
    text = epochs_text(cost.server_epochs)
    return f"{cost.server_share:.2g} * {text}" if cost.server_share < 1 and text != "-" else text


def computation_text(method: Method, methods: Sequence[Method]) -> str:
    """Format a method's computation relative to the largest of all methods; a dash for none."""
    own, most = method.cost.computation, max(one.cost.computation for one in methods)
    return relative_text(own, most)


def relative_text(own: float, most: float) -> str:
    """Format computation relative to the largest in a table; a dash for none."""
    return f"{100 * own / most:.0f} %" if own else "-"


def done_cells(method: Method, methods: Sequence[Method]) -> list[str]:
    """Return a row's cells in the columns `DONE`, on the training behind it.

    Args:
        methods: all methods of the table.
    """
    cost = method.cost
    return [
        computation_text(method, methods),
        f"{cost.steps:.0f}" if cost.steps else "-",
        speech_text(cost.speech),
        rounds_text([run.averaged for run in method.runs]),
    ]


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise a `UserError` unless all runs have the same clients, speakers, utterances and words."""
    for run in runs[1:]:
        if (run.unit, run.scored) != (runs[0].unit, runs[0].scored):
            problem = f"{run.name!r} was not scored on the same test data as {runs[0].name!r}"
            raise UserError(problem, remedy="score both on one data directory")


def _read_counts(
    path: Path,
    unit: TextUnit,
    scored: Mapping[str, tuple[int, int, int]],
    rates: Mapping[str, Mapping[str, Interval]],
) -> Utterances:
    """Read errors by utterance; raise a `UserError` unless they give the rates of `wer.tsv`."""
    remedy = "run fedtools score again"
    counts = Utterances.read(path, cuts_of(unit), remedy)
    stated = {
        rate: {client: f"{one.value:.2f}" for client, one in of.items()}
        for rate, of in rates.items()
    }
    found = {
        rate: {client: f"{value:.2f}" for client, value in of.items()}
        for rate, of in counts.rates(path).items()
    }
    if counts.sizes(unit.rate) != scored or found != stated:
        problem = "not the utterances and errors of wer.tsv"
        raise UserError(problem, path=path, remedy=remedy)
    return counts


def _read_scores(
    path: Path,
) -> tuple[TextUnit, dict[str, tuple[int, int, int]], dict[str, dict[str, Interval]]]:
    unit = text_unit_of_columns(next(stream_lines(path), "").split("\t"))
    rows = read_tsv(path, columns_of(unit))
    if [row["client"] for row in rows[-2:]] != [AVERAGE, ALL]:
        problem = f"the last rows are not {AVERAGE} and {ALL}"
        raise UserError(problem, path=path, remedy="run fedtools score")
    for column in ("utterances", unit.plural):
        *clients, _, total = (count(row, column, path, line) for line, row in enumerate(rows, 2))
        # Without clients, there is only the total.
        if clients and sum(clients) != total:
            problem = f"the clients' {column} are {sum(clients)}, {ALL} has {total}"
            raise UserError(problem, path=path, remedy="run fedtools score again")
    scored: dict[str, tuple[int, int, int]] = {}
    rates: dict[str, dict[str, Interval]] = {rate: {} for rate in cuts_of(unit)}
    for line, row in enumerate(rows[:-1], 2):
        client = row["client"]
        counts = (count(row, name, path, line) for name in ("speakers", "utterances", unit.plural))
        scored[client] = tuple(counts)
        for rate, of_client in rates.items():
            columns = (f"{rate}_low", f"{rate}_high")
            bounds = (None if row[c] == "-" else number(row, c, path, line) for c in columns)
            of_client[client] = Interval(number(row, rate, path, line), *bounds)
    return unit, scored, rates
