"""The clients of one round as a table: loss, norm of the update, and share in the mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import SERVER_ROW, read_round
from fedtools.files.messages import COLUMNS, COUNTED, paths_of
from fedtools.files.states import read_at, read_layout
from fedtools.files.tables import count, format_table, number, read_tsv
from fedtools.files.values import STATISTICS
from fedtools.methods import make_method
from fedtools.server.shares import most_of

_HEADER = ("client", "utterances", "steps", "loss", "norm", "share", "status")
State = Mapping[str, np.ndarray]


def clients_table(experiment: Experiment, at: int | None = None) -> str:
    """Return the table of a round, by default the last complete one, with the server as last row.

    The norm is that of the difference between the model that a client sent and the one that it
    received, without BatchNorm statistics, and the server's that of the new model and the old one.
    The share is a client's weight in the mean, and the server's loss the mean with these weights.

    Raises:
        UserError: if the round is not complete, or its messages were not kept.
    """
    at = at or experiment.last_round()
    if not 0 < at <= experiment.last_round():
        problem = f"round {at} is not complete" if at else "no round yet"
        raise UserError(problem, path=experiment.path, remedy="run fedtools rounds")
    folder = experiment.round(at)
    statuses = {row.client: row.status for row in read_round(experiment, at)}
    start = folder.shared_state()
    rows = _messages(folder.path, folder.jobs(), start)
    if not rows:
        problem = f"no messages of clients in round {at}"
        raise UserError(problem, path=folder.path, remedy="begin with keep_updates: true")
    counted = [row for row in rows if statuses.get(row["client"]) in COUNTED]
    options = experiment.options
    method = make_method(options.method, options.method_conf, experiment.path / "config.yaml")
    weights = [method.weight(int(row["utterances"])) for row in counted]
    most = most_of(weights, method.max_weight_ratio)
    total = math.fsum(bounded := [min(weight, most) for weight in weights])
    shares = {one["client"]: weight / total for one, weight in zip(counted, bounded, strict=True)}
    lines = [
        [*(row[name] for name in _HEADER[:5]), _percent(shares.get(row["client"])),
         statuses.get(row["client"], "-")]
        for row in rows
    ]  # fmt: skip
    new = experiment.round(at + 1).shared_state()
    loss = math.fsum(shares[one["client"]] * float(one["loss"]) for one in counted)
    step = _norm({name: new[name] for name in start if name in new}, start)
    lines.append(["server", "-", "-", f"{loss:.4g}", step, _percent(sum(shares.values())),
                  statuses.get(SERVER_ROW, "-")])  # fmt: skip
    return format_table(_HEADER, lines, "lrrrrrl")


def _messages(folder: Path, jobs: int, start: State) -> list[dict[str, str]]:
    """Return a row for each message of a round, in the order of clients."""
    found = []
    for job in range(1, jobs + 1):
        tensors, table = paths_of(folder, job)
        if not table.exists():
            continue
        for line, row in enumerate(read_tsv(table, COLUMNS), 2):
            loss = number(row, "loss", table, line)
            found.append(
                {
                    **row,
                    "utterances": str(count(row, "utterances", table, line)),
                    "loss": f"{loss:.4g}",
                    "norm": _norm(_sent(tensors, line - 2), start) if tensors.exists() else "-",
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
