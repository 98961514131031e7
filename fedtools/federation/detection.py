"""False accepts and rejects of an experiment's last model, written beside its accuracies."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from fedtools.federation.federation import Federation
from fedtools.files.tables import write_tsv
from fedtools.score.detection import COLUMNS, detect
from fedtools.tasks.parts import CLIPS, LOGITS


def measure_detection(federation: Federation, split: str = "test") -> dict[str, object]:
    """Count false accepts and rejects after the last configured round, or the last complete one.

    Writes `EXP/detection_<split>.tsv`, one row; `fedtools.score.detection` defines the rates.

    Args:
        federation: of keyword spotting.
        split: which of its data.

    Returns:
        the row, see `fedtools.score.detection.COLUMNS`; rates in %.

    Raises:
        UserError: if the experiment is of another task, or its data have no negative class.
    """
    logits_of = federation.task.need(LOGITS)
    experiment = federation.experiment
    number = experiment.result_round()
    predicted, labels = [], []
    for client in federation.groups(split):
        federation.load_result(federation.states.known(client, number), number)
        logits, own = logits_of(split, client)
        predicted.append(logits.argmax(1).numpy())
        labels.append(own.numpy())
    classes = federation.task.need(CLIPS).features(split).clips.classes
    where = federation.task.data_path(split)
    found = detect(np.concatenate(predicted), np.concatenate(labels), classes, where)
    rates = {name: f"{value:.4f}" for name, value in found.rates.items()}
    row = {"round": number, **asdict(found), **rates}
    write_tsv(experiment.path / f"detection_{split}.tsv", COLUMNS, [row])
    return row
