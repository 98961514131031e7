"""Evaluation of a federation's models by round, and the average of the best models."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError, some
from fedtools.core.events import write_scalars
from fedtools.core.locks import lock
from fedtools.core.progress import counted
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.exchange.private import make_private
from fedtools.exchange.states import check_finite, load_state, save_state
from fedtools.federation.evaluations import read_evaluation, write_averaged
from fedtools.federation.federation import Federation
from fedtools.federation.user_privacy import check_apart, people_of
from fedtools.models.adapt.adaptation import OF_PRODUCTS, combine_of
from fedtools.tasks.facts import ALL
from fedtools.tasks.parts import RESCORED

AVERAGE = "model.safetensors"


def evaluate(
    federation: Federation, rounds: Sequence[int] | None = None, split: str = "valid"
) -> list[dict[str, str]]:
    """Evaluate every client's model after every complete round.

    Writes `EXP/evaluate_<split>.tsv`; existing rows are not computed again.

    Args:
        federation: the federation.
        rounds: the rounds; None means all complete ones and 0, the initial state.
        split: the data.

    Returns:
        the rows of the file, see `Facts.header`; loss in nats per utterance, rates in %. The words
        of languages written without spaces are characters (`fedtools.data.text_units`).
    """
    experiment = federation.experiment
    path, facts = experiment.evaluation(split), federation.facts
    if rounds is None:
        rounds = range(experiment.last_round() + 1)
    rows = read_evaluation(path, facts)
    groups = federation.groups(split)
    wanted = itertools.product(rounds, groups)
    todo = [key for key in wanted if key not in rows]
    apart = todo and federation.personal and "train" not in experiment.options.data
    if own := [client for client in groups if apart and experiment.knows(client)]:
        which = f"personal parameters of {some(own)} are at their sites"
        print(f"{split}: {which}: measured with a newcomer's model", file=sys.stderr)
    for number, client in counted(todo, f"evaluate {split}", "models"):
        federation.load_result(federation.states.known(client, number), number)
        measured = federation.task.measure(split, client)
        figures = {name: str(value) for name, value in measured.items()}
        rows[number, client] = {"round": str(number), "client": client} | figures
        if all((number, other) in rows for other in groups):
            # Before the last row: a run killed between the two writes both again.
            scalars = {
                f"{what}/{other}": float(rows[number, other][what])
                for what in {"loss", facts.rate} & set(facts.columns)
                for other in groups
            }
            write_scalars(experiment.tensorboard, split, number, scalars)
        with lock(experiment.path, f"evaluate-{split}", wait=True):
            # Keeps rows that another command has written meanwhile.
            rows = read_evaluation(path, facts) | rows
            write_tsv(path, facts.header, [rows[key] for key in sorted(rows)])
    return read_tsv(path, facts.header)


def best_text(federation: Federation) -> dict[str, str]:
    """Return each utterance's words after rescoring by its client, including the last group.

    Raises:
        UserError: if the clients of this task do not rescore.
    """
    rescored, found = federation.task.need(RESCORED), dict[str, str]()
    for number in range(federation.experiment.last_round() + 1):
        for client in federation.experiment.clients:
            federation.load_result(client, number)
            found |= rescored(client)
    return found


def average(
    federation: Federation, best: int | None = None, by: str = "loss", shared: bool = False
) -> list[Path]:
    """Average the models of the best rounds on validation data (Zhu et al., section 3.1: 10 best).

    For a method with stages only rounds of the latest stage are used: models of stage 1 may be
    better on validation data than those of stage 2, and a mean over both stages is a model of
    neither.

    The rounds of the model for all clients are chosen by the mean over clients, and the model is
    written to `EXP/model.safetensors`. Those of a client's own model are chosen by the client's
    rate, and the model is written to `EXP/clients/<client>/`. With personal models, the former is
    the model of a newcomer: shared tensors, and personal layers of the initial state. A client
    whose personal layers are missing gets no model. The rounds are written to `EXP/averaged.tsv`.

    Args:
        federation: the federation.
        best: the number of rounds; None means that of the configuration.
        by: "loss" or "rate" (error rate or accuracy) of `evaluate`.
        shared: whether to write only the newcomers' model; those of thousands of clients would fill
            a disk.

    Returns:
        the files written.

    Raises:
        UserError: if no round is complete, or the task has no loss by which to choose models.
    """
    if "loss" not in federation.facts.columns:
        problem = f"models of task {federation.experiment.options.task} are not averaged"
        raise UserError(problem, path=federation.experiment.path)
    best = best or federation.experiment.options.average
    if federation.method.user_privacy:
        facts, task, experiment = federation.facts, federation.task, federation.experiment
        at_hand = "train" in experiment.options.data
        people = people_of(facts, task.data_path("train")) if at_hand else {*experiment.clients}
        valid = task.data_path("valid")
        check_apart(people, facts, valid, "fedtools average", experiment.path)
    if best > 1 and (combine := combine_of(federation.experiment.options.model)) in OF_PRODUCTS:
        problem = f"adapters of {best} rounds cannot be averaged with combine {combine}"
        raise UserError(problem, path=federation.experiment.path, remedy="use --best 1")
    rows = [row for row in evaluate(federation) if int(row["round"]) > 0]
    if not rows:
        raise UserError("no round is complete", path=federation.experiment.path)
    stage = federation.method.stage
    last = max(stage(int(row["round"])) for row in rows)
    rows = [row for row in rows if stage(int(row["round"])) == last]
    lost = _lost(federation)
    # Clients without their personal layers were evaluated with a mixed model, which is not theirs.
    rows = [row for row in rows if row["client"] not in lost] or rows
    facts = federation.facts
    column, sign = ("loss", 1) if by == "loss" else (facts.rate, facts.sign)
    written, averaged = [], dict[str, list[int]]()
    with lock(federation.experiment.path, "average"):
        clients = federation.experiment.clients if federation.personal and not shared else ()
        for client in [None, *clients]:
            if client in lost:
                folder = federation.experiment.client_dir(client)
                print(f"{folder}: personal parameters missing, not averaged", file=sys.stderr)
                continue
            chosen = sorted(_best_rounds(rows, client, column, sign)[:best])
            own = federation.experiment.client_dir(client) if client else federation.experiment.path
            state = _mean_state(federation, client, chosen)
            if client:
                make_private(own)
            check_finite(state, f"{own}, mean of rounds {' '.join(map(str, chosen))}")
            save_state(own / AVERAGE, state)
            written.append(own / AVERAGE)
            averaged[client or ALL] = chosen
            print(f"{own}: mean of rounds {' '.join(map(str, chosen))}", file=sys.stderr)
        write_averaged(federation.experiment, averaged)
    return written


def _lost(federation: Federation) -> set[str]:
    """Return the clients whose personal parameters are missing."""
    last = federation.experiment.last_round()
    return {one for one in federation.experiment.clients if federation.states.lost(one, last + 1)}


def _best_rounds(
    rows: Sequence[Mapping[str, str]], client: str | None, column: str, sign: int
) -> list[int]:
    """Return the rounds, best first; `sign` is -1 if larger values are better."""
    # On data without any alignment, a client's loss is unknown.
    rows = [row for row in rows if not math.isnan(float(row[column]))] or rows
    if client not in {row["client"] for row in rows}:
        # The client was not evaluated, so rounds are chosen by the mean over the others.
        client = None
    scores: dict[int, list[float]] = {}
    found: dict[int, list[str]] = {}
    for row in rows:
        if client in (None, row["client"]):
            scores.setdefault(int(row["round"]), []).append(sign * float(row[column]))
            found.setdefault(int(row["round"]), []).append(row["loss"])
    # A round without training leaves the model of the previous round, which counts only once. Ties
    # go to the later round, whose model has seen more data.
    latest = {tuple(losses): number for number, losses in sorted(found.items())}
    scores = {number: scores[number] for number in latest.values()}
    return sorted(scores, key=lambda number: (_mean(scores[number]), -number))


def _mean_state(
    federation: Federation, client: str | None, rounds: Sequence[int]
) -> dict[str, np.ndarray]:
    """Return the mean of the models of some rounds; integer tensors are taken from the last."""
    sums: dict[str, np.ndarray] = {}
    for number in rounds:
        for name, array in federation.states.result(client, number).items():
            if array.dtype.kind != "f":
                sums[name] = array
            else:
                sums[name] = sums.get(name, 0) + array.astype(np.float64)
    return {
        name: (value / len(rounds)).astype(np.float32) if value.dtype.kind == "f" else value
        for name, value in sums.items()
    }


def has_average(federation: Federation, client: str) -> bool:
    """Return whether a client has an averaged model, its own or the shared one, or can have one."""
    experiment = federation.experiment
    if not experiment.knows(client):
        return False
    own = experiment.client_dir(client) / AVERAGE
    return own.exists() or not federation.states.lost(client, experiment.last_round() + 1)


def load_average(federation: Federation, client: str) -> None:
    """Load the averaged model of `client`, or that of a newcomer, into the task."""
    folder = federation.experiment.path
    if federation.personal and has_average(federation, client):
        folder = federation.experiment.client_dir(client)
    path = folder / AVERAGE
    if not path.exists():
        raise UserError("missing", path=path, remedy="run fedtools average")
    state = load_state(path, federation.states.spec)
    check_finite(state, path)
    federation.task.load(state, federation.experiment.last_round())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
