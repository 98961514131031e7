"""The models of a federation on validation data, round by round, and the mean of the best."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from fedtools.client.train import load_model
from fedtools.decode.greedy import greedy
from fedtools.federation.federation import ALL, Federation
from fedtools.files.errors import UserError
from fedtools.files.events import write_scalars
from fedtools.files.states import load_state, save_state, spec_of
from fedtools.files.tables import read_tsv, write_tsv
from fedtools.methods.base import PERSONAL
from fedtools.models.asr import ctc_losses, log_posteriors
from fedtools.score.align import count_errors

COLUMNS = ("round", "client", "utterances", "loss", "words", "errors", "wer")


def groups(federation: Federation, role: str) -> list[str]:
    """The clients in the data of a role, or `ALL` where the data know no clients."""
    data = federation.data.get(role)
    if data is None:
        raise UserError(f"no {role} data", path=federation.experiment.path / "config.yaml")
    return sorted(set(data.utt2client.values())) or [ALL]


@torch.no_grad()
def evaluate(
    federation: Federation, rounds: Sequence[int] | None = None, role: str = "valid"
) -> list[dict[str, str]]:
    """Mean CTC loss and greedy WER of every client's model after every complete round.

    Writes `EXP/evaluate_<role>.tsv`; rows that are there are not computed again.

    Args:
        rounds: which rounds; None is all complete ones, and 0, the beginning.
        role: which data.

    Returns:
        the rows of the file, see `COLUMNS`; loss in nats per utterance, WER in %.
    """
    path = federation.experiment.path / f"evaluate_{role}.tsv"
    if rounds is None:
        rounds = range(federation.experiment.last_round() + 1)
    done = read_tsv(path, COLUMNS) if path.exists() else []
    rows = {(int(row["round"]), row["client"]): row for row in done}
    wanted = [(number, client) for number in rounds for client in groups(federation, role)]
    todo = [key for key in wanted if key not in rows]
    bar = tqdm(todo, desc=f"evaluate {role}", unit="model", disable=None, leave=False)
    for number, client in bar:
        known = client in federation.experiment.clients
        federation.load_result(client if known else None, number)
        rows[number, client] = {"round": number, "client": client} | _measure(
            federation, role, client
        )
        write_tsv(path, COLUMNS, [rows[key] for key in sorted(rows)])
    for number in dict.fromkeys(number for number, _ in todo):
        scalars = {
            f"{what}/{client}": float(rows[number, client][what])
            for what in ("loss", "wer")
            for at, client in wanted
            if at == number
        }
        write_scalars(federation.experiment.tensorboard, role, number, scalars)
    return read_tsv(path, COLUMNS)


def _measure(federation: Federation, role: str, client: str) -> dict[str, object]:
    data = federation.utterances(role, client)
    model = federation.model.eval()
    loss, words, errors = 0.0, 0, 0
    batches = data.batches()
    for indices, batch in zip(batches, data.stream(batches, federation.device), strict=True):
        log_probs, lengths = log_posteriors(model, batch)
        loss += ctc_losses(log_probs, lengths, batch).double().sum().item()
        hypotheses = greedy(log_probs.cpu().numpy(), lengths.cpu().numpy())
        for index, tokens in zip(indices, hypotheses, strict=True):
            reference = data.texts[index].split()
            counts = count_errors(reference, federation.tokenizer.decode(tokens).split())
            words += len(reference)
            errors += counts.errors
    return {
        "utterances": len(data),
        "loss": f"{loss / len(data):.6f}",
        "words": words,
        "errors": errors,
        "wer": f"{100 * errors / words:.4f}",
    }


def average(federation: Federation, best: int | None = None, by: str = "wer") -> list[Path]:
    """Average the models of the best rounds on validation data (Zhu et al., section 3.1: 10 best).

    A model that is the same for all clients is chosen by its mean over clients and written to
    `EXP/model.safetensors`; a client's own by its own figure, to `EXP/clients/<client>/`.

    Args:
        best: how many rounds; None is the number in the configuration.
        by: "wer" or "loss" of `evaluate`.

    Returns:
        the files written.
    """
    best = best or federation.experiment.config["average"]
    rows = [row for row in evaluate(federation) if int(row["round"]) > 0]
    if not rows:
        raise UserError("no round is complete", path=federation.experiment.path)
    written = []
    personal = PERSONAL in federation.kinds.values()
    for client in federation.experiment.clients if personal else [None]:
        chosen = _best_rounds(rows, client, by, best)
        own = federation.experiment.client_dir(client) if client else federation.experiment.path
        save_state(own / "model.safetensors", _mean_state(federation, client, chosen))
        written.append(own / "model.safetensors")
        rounds = " ".join(map(str, chosen))
        print(f"{own}: mean of rounds {rounds}", file=sys.stderr)
    return written


def _best_rounds(
    rows: Sequence[Mapping[str, str]], client: str | None, by: str, best: int
) -> list[int]:
    scores: dict[int, list[float]] = {}
    for row in rows:
        if client in (None, row["client"]):
            scores.setdefault(int(row["round"]), []).append(float(row[by]))
    # Of equals the later round is taken: it has seen more.
    order = sorted(scores, key=lambda number: (_mean(scores[number]), -number))
    return sorted(order[:best])


def _mean_state(
    federation: Federation, client: str | None, rounds: Sequence[int]
) -> dict[str, np.ndarray]:
    """The mean of the models of some rounds; of integers the last is taken."""
    sums: dict[str, np.ndarray] = {}
    for number in rounds:
        federation.load_result(client, number)
        for name, value in federation.model.state_dict().items():
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
    load_model(federation.model, load_state(path, spec_of(federation.model.state_dict())))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
