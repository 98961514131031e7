"""False accepts and false rejects of an experiment's last model."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation
from fedtools.federation.kws.clip_scores import logits_after
from fedtools.score.detection import COLUMNS, DET, NEGATIVE, detect, scores_of
from fedtools.score.verification import det_curve
from fedtools.tasks.parts import CLIPS


def measure_detection(federation: Federation, split: str = "test") -> dict[str, object]:
    """Count false accepts and rejects after the last configured round, or the last complete one.

    Writes `EXP/detection_<split>.tsv`, one row for decisions without a threshold, and
    `EXP/det_<split>.tsv`, the rates at all thresholds; `fedtools.score.detection` defines both.

    Args:
        federation: a federation of keyword spotting.
        split: the data to score.

    Returns:
        the row, see `fedtools.score.detection.COLUMNS`; rates in %.

    Raises:
        UserError: if the experiment has another task, or its data have no negative class.
    """
    experiment = federation.experiment
    number = experiment.result_round()
    clips = federation.task.need(CLIPS).features(split).clips
    logits, where = logits_after(federation, split, number), federation.task.data_path(split)
    found = detect(logits.argmax(1), clips.labels, clips.classes, where)
    scores, _ = scores_of(logits, clips.classes)
    curve = det_curve(scores, ~np.isin(clips.classes, NEGATIVE)[clips.labels])
    points = (
        dict(zip(DET, (f"{at:.4f}", f"{rejects:.6f}", f"{accepts:.6f}"), strict=True))
        for at, rejects, accepts in zip(*curve, strict=True)
    )
    write_tsv(experiment.path / f"det_{split}.tsv", DET, points)
    rates = {name: f"{value:.4f}" for name, value in found.rates.items()}
    row = {"round": number, **asdict(found), **rates}
    write_tsv(experiment.path / f"detection_{split}.tsv", COLUMNS, [row])
    return row
