"""Differences of accuracy between settings, on the same test speakers and with the same seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from runs import Run

from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv
from fedtools.score.crossed import Effects, effects
from fedtools.score.last_evaluations import SPEAKER_COLUMNS, last_of

REMEDY = "run fedtools clip-scores again"


def accuracy_effects(runs: Sequence[Run], others: Sequence[Run]) -> Effects | None:
    """Return the accuracy of some runs minus that of others, in percentage points.

    Runs are paired by seed. Returns None if they have no seed in common, or are the same runs.

    Raises:
        UserError: if counts by speaker are missing, or are of other rounds than the accuracy or of
            other clips.
    """
    pairs = [(run, other) for run in runs for other in others if run.seed == other.seed]
    if not pairs or any(run.path == other.path for run, other in pairs):
        return None
    ours, theirs = ([_of_speakers(run) for run in side] for side in zip(*pairs, strict=True))
    clips = {name: number for name, (number, _) in ours[0].items()}
    for (run, other), *counts in zip(pairs, ours, theirs, strict=True):
        for path, found in zip((run.path, other.path), counts, strict=True):
            if {name: number for name, (number, _) in found.items()} != clips:
                raise UserError(f"test clips differ from those of {pairs[0][0].path}", path=path)
    errors, before = (
        np.array([[found[name][1] for name in clips] for found in side]) for side in (ours, theirs)
    )
    # Accuracy is the negative of errors, hence the order; all clips count as one client's.
    return effects(before, errors, np.array([*clips.values()]), np.zeros(len(clips), int))


def _of_speakers(run: Run) -> dict[str, tuple[int, float]]:
    """Return speaker -> clips, and errors averaged over the evaluations of `Run.lasting`."""
    path, wanted = run.path / "speakers_test.tsv", last_of(run.accuracy)
    if not path.exists():
        remedy = "run fedtools clip-scores"
        raise UserError("no counts by speaker, for differences", path=path, remedy=remedy)
    sums: dict[str, list[int]] = {}
    errors, clips = dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
    for line, row in enumerate(read_tsv(path, SPEAKER_COLUMNS), 2):
        number, spoken, wrong = (count(row, name, path, line) for name in ("round", *_COUNTS))
        if number not in errors:
            raise UserError(f"round {number} is not one of {wanted}", path=path, remedy=REMEDY)
        errors[number] += wrong
        clips[number] += spoken
        of_speaker = sums.setdefault(row["speaker"], [0, 0])
        of_speaker[0] += spoken
        of_speaker[1] += wrong
    for number in wanted:
        accuracy = 100 * (1 - errors[number] / max(1, clips[number]))
        # Recorded accuracies have four digits.
        if abs(accuracy - run.accuracy[number]) > 1e-4:
            problem = f"accuracy {accuracy:.4f} in round {number}"
            problem += f", but evaluate_test.tsv has {run.accuracy[number]:.4f}"
            raise UserError(problem, path=path, remedy=REMEDY)
    rounds = len(wanted)
    return {name: (spoken // rounds, wrong / rounds) for name, (spoken, wrong) in sums.items()}


_COUNTS = SPEAKER_COLUMNS[2:]
