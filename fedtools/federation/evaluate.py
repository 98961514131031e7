"""The models of a federation on validation data, round by round, and the mean of the best."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fedtools.federation.federation import Federation
from fedtools.federation.tasks import read_evaluation
from fedtools.files.errors import UserError
from fedtools.files.events import write_scalars
from fedtools.files.states import load_state, save_state, spec_of
from fedtools.files.tables import read_tsv, write_tsv
from fedtools.methods.base import PERSONAL


def evaluate(
    federation: Federation, rounds: Sequence[int] | None = None, role: str = "valid"
) -> list[dict[str, str]]:
    """Measure every client's model after every complete round.

    Writes `EXP/evaluate_<role>.tsv`; rows that are there are not computed again.

    Args:
        rounds: which rounds; None is all complete ones, and 0, the beginning.
        role: which data.

    Returns:
        the rows of the file, see `Task.header`; loss in nats per utterance, rates in %.
    """
    path, header = federation.experiment.evaluation(role), federation.task.header
    if rounds is None:
        rounds = range(federation.experiment.last_round() + 1)
    rows = read_evaluation(path, federation.task)
    groups = federation.groups(role)
    wanted = itertools.product(rounds, groups)
    todo = [key for key in wanted if key not in rows]
    bar = tqdm(todo, desc=f"evaluate {role}", unit="model", disable=None, leave=False)
    for number, client in bar:
        known = client in federation.experiment.clients
        federation.load_result(client if known else None, number)
        rows[number, client] = {"round": number, "client": client} | federation.measure(
            role, client
        )
        if all((number, other) in rows for other in groups):
            # Before the last row: a run that is killed between the two does both again.
            scalars = {
                f"{what}/{other}": float(rows[number, other][what])
                for what in ("loss", federation.task.rate)
                for other in groups
            }
            write_scalars(federation.experiment.tensorboard, role, number, scalars)
        # What another command has written meanwhile stays.
        rows = read_evaluation(path, federation.task) | rows
        write_tsv(path, header, [rows[key] for key in sorted(rows)])
    return read_tsv(path, header)


def average(federation: Federation, best: int | None = None, by: str = "rate") -> list[Path]:
    """Average the models of the best rounds on validation data (Zhu et al., section 3.1: 10 best).

    A model that is the same for all clients is chosen by its mean over clients and written to
    `EXP/model.safetensors`; a client's own by its own figure, to `EXP/clients/<client>/`.

    Args:
        best: how many rounds; None is the number in the configuration.
        by: "rate" (of errors, or the accuracy) or "loss" of `evaluate`.

    Returns:
        the files written.
    """
    best = best or federation.experiment.config["average"]
    rows = [row for row in evaluate(federation) if int(row["round"]) > 0]
    if not rows:
        raise UserError("no round is complete", path=federation.experiment.path)
    task = federation.task
    column, sign = ("loss", 1) if by == "loss" else (task.rate, task.sign)
    written = []
    personal = PERSONAL in federation.kinds.values()
    for client in federation.experiment.clients if personal else [None]:
        chosen = sorted(_best_rounds(rows, client, column, sign)[:best])
        own = federation.experiment.client_dir(client) if client else federation.experiment.path
        save_state(own / "model.safetensors", _mean_state(federation, client, chosen))
        written.append(own / "model.safetensors")
        rounds = " ".join(map(str, chosen))
        print(f"{own}: mean of rounds {rounds}", file=sys.stderr)
    return written


def _best_rounds(
    rows: Sequence[Mapping[str, str]], client: str | None, column: str, sign: int
) -> list[int]:
    """The rounds, best first; `sign` is -1 where more is better."""
    scores: dict[int, list[float]] = {}
    for row in rows:
        if client in (None, row["client"]):
            scores.setdefault(int(row["round"]), []).append(sign * float(row[column]))
    # Of equals the later round is taken: it has seen more.
    return sorted(scores, key=lambda number: (_mean(scores[number]), -number))


def _mean_state(
    federation: Federation, client: str | None, rounds: Sequence[int]
) -> dict[str, np.ndarray]:
    """The mean of the models of some rounds; of integers the last is taken."""
    sums: dict[str, np.ndarray] = {}
    for number in rounds:
        federation.load_result(client, number)
        for name, value in federation.tensors().items():
            array = value.cpu().numpy()
            if array.dtype.kind != "f":
                sums[name] = array.copy()
            else:
                sums[name] = sums.get(name, 0) + array.astype(np.float64)
    return {
        name: (value / len(rounds)).astype(np.float32) if value.dtype.kind == "f" else value
        for name, value in sums.items()
    }


def load_average(federation: Federation, client: str) -> None:
    """Put the averaged model of `client` into the model."""
    path = federation.experiment.path / "model.safetensors"
    if PERSONAL in federation.kinds.values():
        path = federation.experiment.client_dir(client) / "model.safetensors"
    if not path.exists():
        raise UserError("missing", path=path, remedy="run fedtools average")
    federation.load(load_state(path, spec_of(federation.tensors())))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
