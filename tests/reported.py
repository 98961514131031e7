"""Experiments to report on, and helpers that read a page, shared by several test files."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image

from fedtools.core.tables import (
    write_tsv,
)
from fedtools.exchange.experiment import Experiment, write_clients, write_sums
from fedtools.exchange.ledger import COLUMNS as LEDGER
from fedtools.tasks import facts_of

CLIENTS = ("australia", "england", "indian")
FIRST, LEDGER_2 = "round_0001/global.safetensors", "round_0002/ledger.tsv"
CONFIG = """\
method: fedavg
task: asr
method_conf: {}
clients_per_round: null
sampling: fixed
rounds: 4
average: 1
evaluate_every: 1
keep_updates: true
model: {}
training: {}
seed: 7
data: {}
clients: 3
"""


def write_state(experiment: Experiment, number: int) -> None:
    """Write the state that the server sends in a round, with arbitrary content."""
    experiment.round(number).path.mkdir(exist_ok=True)
    experiment.round(number).global_state.write_text(f"state {number}")


def make_experiment(
    path: Path,
    *,
    size: int = 0,
    up: int | None = None,
    client_epochs: float = 0,
    server_epochs: float = 0,
    drop: float = 1,
) -> Path:
    """Make an experiment of three clients and four rounds, with `size` bytes down, `up` bytes up.

    Args:
        up: bytes up; `size` if None.
    """
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG)
    write_clients(path / "clients.txt", CLIENTS)
    (path / "round_0001").mkdir()
    (path / FIRST).write_text("state 1")
    write_sums(path / "sha256sums", {n: path / n for n in ("config.yaml", "clients.txt", FIRST)})
    experiment, evaluation = Experiment(path), []
    up = size if up is None else up
    for at in range(5):
        ledger = []
        for index, client in enumerate(CLIENTS):
            wer = f"{50 + 5 * index - drop * at:.4f}"
            values = (at, client, 10, "1.5", 90, 45, wer)
            evaluation.append(dict(zip(facts_of("asr", "").header, values, strict=True)))
            if at and client_epochs:
                status = "refused: a NaN" if (at, index) == (2, 1) else "ok"
                values = (at, client, size, up, 5, client_epochs, 0, "0.500", status)
                ledger.append(dict(zip(LEDGER, values, strict=True)))
        if at:
            values = (at, "-", 0, 0, 0, 0, server_epochs, "0.250", "ok")
            ledger.append(dict(zip(LEDGER, values, strict=True)))
            write_tsv(experiment.round(at).ledger, LEDGER, ledger)
            write_state(experiment, at + 1)
            experiment.round(at).close()
    write_tsv(path / "evaluate_valid.tsv", facts_of("asr", "").header, evaluation)
    return path


ROWS = {
    "Baseline": ":score/baseline",
    "Client": "exp/client:score/client",
    "Centralized": "exp/centralized:score/centralized",
    "FedAvg": "exp/fedavg:score/fedavg",
}


def arguments(*more: str, mini: bool = True, **rows: str) -> list[str]:
    chosen = [f"--row={name}={paths}" for name, paths in (rows or ROWS).items()]
    name = ["--section=mini", "--mini"] if mini else ["--section=real"]
    corpus = ["--corpus", "Common Voice accents", "--release", "22.0", "--date", "2024-02-03"]
    return ["report", "RESULTS.md", *name, *corpus, *chosen, *more]


def markdown_row(page: str, name: str, nth: int = 0) -> list[str]:
    """Return the cells of a row of the nth table below the summary that has it."""
    lines = [line for line in page.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in lines[nth + 1].split("|")[2:-1]]


def png_chunks(data: bytes) -> list[bytes]:
    chunks, position = [], 8
    while position < len(data):
        (size,) = struct.unpack(">I", data[position : position + 4])
        chunks.append(data[position + 4 : position + 8])
        position += size + 12
    return chunks


def has_blank_edges(path: Path) -> bool:
    """Return whether nothing is drawn at a picture's edges, where it would be cut off."""
    with Image.open(path) as picture:
        grey = np.asarray(picture.convert("L"))
    return min(grey[[0, -1]].min(), grey[:, [0, -1]].min()) > 250
