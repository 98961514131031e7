"""The clients of one round as a table: loss, norm of the update, and share in the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.tables import count, format_table, number, read_tsv
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import SERVER_ROW, read_round
from fedtools.exchange.messages import COLUMNS, COUNTED, paths_of
from fedtools.exchange.states import read_at, read_layout
from fedtools.exchange.values import STATISTICS
from fedtools.methods import make_method
from fedtools.methods.base import COUNTS, Changes, Extracted, Method
from fedtools.privacy.user_plan import UserPlan
from fedtools.server.shares import bounded

_HEADER = ("client", "utterances", "steps", "loss", "norm", "share", "status")
State = Mapping[str, np.ndarray]


def clients_table(experiment: Experiment, at: int | None = None) -> str:
    """Return the table of a round, by default the last complete one, with the server as last row.

    The norm is that of the difference between the model that a client sent and the one that it
    received, or of its clipped change, without BatchNorm statistics, and the server's that of the
    new model and the old one. The share is a client's weight in the mean, or its part of all counts
    or of all utterances with features; the server's loss is the mean with these weights. Robust
    rules but clip give clients no such share.

    Raises:
        UserError: if the round is not complete, or its messages were not kept.
    """
    at = at or experiment.last_round()
    if not 0 < at <= experiment.last_round():
        problem = f"round {at} is not complete" if at else "no round yet"
        raise UserError(problem, path=experiment.path, remedy="run fedtools rounds")
    folder = experiment.round(at)
    ledger = {row.client: row for row in read_round(experiment, at)}
    statuses = {client: row.status for client, row in ledger.items()}
    marked = {client: row.marked for client, row in ledger.items()}
    start = folder.shared_state()
    options = experiment.options
    method = make_method(options.method, options.method_conf, experiment.path / "config.yaml")
    if method.secure_sums:
        problem = "secure sums: nobody sees what one client sends"
        raise UserError(problem, path=experiment.path, remedy="leave --clients out")
    sends = method.phase(at).sends
    step = sends.grid.step if isinstance(sends, Changes) else None
    rows = _messages(folder.path, folder.jobs(), start, step)
    if not rows:
        problem = f"no messages of clients in round {at}"
        raise UserError(problem, path=folder.path, remedy="begin with keep_updates: true")
    counted = [row for row in rows if statuses.get(row["client"]) in COUNTED]
    weights = _weights(method, at, counted)
    total = math.fsum(weights)
    shares = {
        one["client"]: weight / total if total else 0.0
        for one, weight in zip(counted, weights, strict=True)
    }
    if isinstance(sends, Changes):
        # All clients of the list count, whether they sent anything or not.
        shares = dict.fromkeys(shares, 1 / UserPlan.read(experiment.path).expected)
    new = experiment.round(at + 1).shared_state()
    loss = math.fsum(shares[one["client"]] * float(one["loss"]) for one in counted)
    if not method.rule.is_mean:
        shares = {}
    step = _norm({name: new[name] for name in start if name in new}, start)
    lines = [
        [*(row[name] for name in _HEADER[:5]), _percent(shares.get(row["client"])),
         marked.get(row["client"], "-")]
        for row in rows
    ]  # fmt: skip
    whole = _percent(sum(shares.values()) if shares else None)
    own = statuses.get(SERVER_ROW, "-")
    lines.append(["server", "-", "-", f"{loss:.4g}", step, whole, own])
    return format_table(_HEADER, lines, "lrrrrrl")


def _weights(method: Method, at: int, rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Return what the server used of each client's message in a round."""
    sends = method.phase(at).sends
    if sends == COUNTS:
        weights = [float(row["amount"]) for row in rows]
    elif isinstance(sends, Extracted):
        weights = [float(row["utterances"]) for row in rows]
    else:
        weights = [method.weight(int(row["utterances"])) for row in rows]
    return bounded(weights, method.max_weight_ratio) if method.bounds_sums else weights


def _messages(
    folder: Path, jobs: int, start: State, step: float | None = None
) -> list[dict[str, str]]:
    """Return a row for each message of a round, in the order of clients.

    Args:
        step: length of a step, if clients sent changes of `start` in whole steps.
    """
    found = []
    for job in range(1, jobs + 1):
        tensors, table = paths_of(folder, job)
        if not table.exists():
            continue
        for line, row in enumerate(read_tsv(table, COLUMNS), 2):
            loss = number(row, "loss", table, line)
            sent = _sent(tensors, line - 2) if tensors.exists() else {}
            if step is not None:
                sent = {name: start[name] + step * one for name, one in sent.items()}
            found.append(
                {
                    **row,
                    "utterances": str(count(row, "utterances", table, line)),
                    "loss": f"{loss:.4g}",
                    "norm": _norm(sent, start) if tensors.exists() else "-",
                    "amount": repr(math.fsum(float(np.abs(one).sum()) for one in sent.values())),
                }
            )
    return sorted(found, key=lambda row: row["client"])


def _sent(path: Path, row: int) -> State:
    """Read one client's tensors, row `row` of a job's file."""
    layout, found = read_layout(path), {}
    with path.open("rb") as file:
        for name, (shape, kind) in layout.spec.items():
            found[name] = np.empty(shape[1:], kind)
            place = layout.offsets[name] + row * layout.strides[name]
            if row >= shape[0] or not read_at(file.fileno(), found[name], place):
                raise UserError(f"no row {row + 1} of tensor {name!r}", path=path)
    return found


def _norm(new: State, old: State) -> str:
    """Return the norm of the difference of two states, as text; a dash if they have no floats."""
    squares = [
        float(np.square(new[name].astype("f8") - old[name]).sum())
        for name in new
        if name in old and new[name].dtype.kind == "f" and not name.endswith(STATISTICS)
    ]
    return f"{math.sqrt(math.fsum(squares)):.4g}" if squares else "-"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
