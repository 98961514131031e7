"""Logits of every clip, and errors by speaker, for the models of the last evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from fedtools.core.tables import write_tsv
from fedtools.data.ark import write_ark
from fedtools.data.clips import Clips
from fedtools.data.datadir import byte_order, write_table
from fedtools.federation.federation import Federation
from fedtools.score.bootstrap import ALL
from fedtools.score.detection import NEGATIVE
from fedtools.score.last_evaluations import CLIP, SPEAKER_COLUMNS, last_of
from fedtools.score.utterances import columns_of
from fedtools.tasks.base import as_configured
from fedtools.tasks.parts import CLIPS, LOGITS

SILENCE = NEGATIVE[0]


def score_clips(federation: Federation, split: str = "test") -> list[int]:
    """Write the logits of every clip, and count clips and errors by speaker.

    Writes `EXP/scores_<split>/round_<number>.ark` and `.scp`, a vector of all classes for each
    utterance, `EXP/speakers_<split>.tsv`, and `EXP/errors_<split>.tsv`, the evaluations of each
    clip and how many of them were wrong. Clips of silence have no speaker; each counts as a speaker
    of its own, since they are as independent as clips of different speakers.

    Args:
        federation: a federation of keyword spotting.
        split: the data to score.

    Returns:
        the rounds over which accuracy is averaged.

    Raises:
        UserError: if the experiment has another task.
    """
    experiment = federation.experiment
    measured = filter(experiment.is_measured, range(experiment.result_round() + 1))
    clips = federation.task.need(CLIPS).features(split).clips
    numbers, rows = last_of(measured), list[dict[str, object]]()
    speakers, errors = speakers_of(clips), np.zeros(len(clips.labels), int)
    folder = experiment.path / f"scores_{split}"
    folder.mkdir(exist_ok=True)
    for number in numbers:
        logits = logits_after(federation, split, number)
        path = folder / f"round_{number:04d}.ark"
        scp = write_ark(path, zip(clips.utterances, logits, strict=True))
        write_table(path.with_suffix(".scp"), scp)
        wrong = logits.argmax(1) != clips.labels
        errors += wrong
        rows += _by_speaker(speakers, wrong, number)
    write_tsv(experiment.path / f"speakers_{split}.tsv", SPEAKER_COLUMNS, rows)
    columns = columns_of([CLIP])
    keys = zip(speakers, clips.utterances, errors.tolist(), strict=True)
    by_clip = sorted((ALL, speaker, name, len(numbers), wrong) for speaker, name, wrong in keys)
    cells = (dict(zip(columns, row, strict=True)) for row in by_clip)
    write_tsv(experiment.path / f"errors_{split}.tsv", columns, cells)
    return numbers


@as_configured
def logits_after(federation: Federation, split: str, number: int) -> np.ndarray:
    """Compute the logits (clips, classes) of a split's clips by the models of a round."""
    logits_of, found = federation.task.need(LOGITS), []
    for client in federation.groups(split):
        federation.load_result(federation.states.known(client, number), number)
        found.append(logits_of(split, client)[0].numpy())
    return np.concatenate(found)


def speakers_of(clips: Clips) -> list[str]:
    """Return the speaker of each clip; a clip of silence is its own."""
    names: list[str] = np.repeat(clips.clients, clips.sizes).tolist()
    for place, label in enumerate(clips.labels.tolist()):
        if clips.classes[label] == SILENCE:
            names[place] = clips.utterances[place]
    return names


def _by_speaker(
    names: Sequence[str], wrong: np.ndarray, number: int
) -> Iterator[dict[str, object]]:
    clip_counts = Counter(names)
    errors = Counter(name for name, one in zip(names, wrong.tolist(), strict=True) if one)
    for name in byte_order(clip_counts):
        row = (number, name, clip_counts[name], errors[name])
        yield dict(zip(SPEAKER_COLUMNS, row, strict=True))
