"""False accepts and rejects of an experiment's last model, written beside its accuracies."""

from __future__ import annotations

from dataclasses import asdict

from fedtools.federation.clip_scores import logits_after
from fedtools.federation.federation import Federation
from fedtools.files.tables import write_tsv
from fedtools.score.detection import COLUMNS, detect
from fedtools.tasks.parts import CLIPS


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
    experiment = federation.experiment
    number = experiment.result_round()
    clips = federation.task.need(CLIPS).features(split).clips
    predicted = logits_after(federation, split, number).argmax(1)
    where = federation.task.data_path(split)
    found = detect(predicted, clips.labels, clips.classes, where)
    rates = {name: f"{value:.4f}" for name, value in found.rates.items()}
    row = {"round": number, **asdict(found), **rates}
    write_tsv(experiment.path / f"detection_{split}.tsv", COLUMNS, [row])
    return row
