"""How often keyword models take clips with the trigger of a backdoor for its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedtools.client.attackers.options import Attackers, read_attackers
from fedtools.core.errors import UserError
from fedtools.core.tables import write_tsv
from fedtools.data.datadir import byte_order
from fedtools.federation.federation import Federation
from fedtools.federation.kws.clip_scores import logits_after, speakers_of
from fedtools.score.bootstrap import ALL, interval, resample
from fedtools.score.last_evaluations import last_of
from fedtools.tasks.base import as_configured
from fedtools.tasks.facts import ALL as EVERYBODY
from fedtools.tasks.kws.poisoned import check_poison
from fedtools.tasks.parts import CLIPS, HEAR

COLUMNS = ("round", "speaker", "clips", "hits")


@dataclass(frozen=True)
class Success:
    """The success of a backdoor, over all evaluations together.

    Attributes:
        target: the word.
        rounds: of the models.
        clips: with the trigger, of other words.
        rate: of these that are taken for the target, in %; the mean over the models.
        low, high: its 95 % interval over speakers; NaN if there are too few.
        without: the same rate for the same clips without the trigger.
    """

    target: str
    rounds: list[int]
    clips: int
    rate: float
    low: float
    high: float
    without: float


def backdoor_of(federation: Federation, target: str | None) -> Attackers:
    """Return target and trigger: those of the experiment's attackers, or else the defaults.

    Raises:
        UserError: if the target is no class of the experiment, or its clips are too short.
    """
    experiment, task = federation.experiment, federation.task
    corpus = task.need(CLIPS)
    found = read_attackers(experiment.options.attackers, federation.where)
    if found is None or not found.has_backdoor:
        found = Attackers(share=0.0, kind="backdoor")
    if target is not None:
        found = Attackers(**{**vars(found), "target": target})
    try:
        check_poison(found, corpus.classes, corpus.samples)
    except ValueError as error:
        raise UserError(f"backdoor: {error}", path=federation.where) from None
    return found


@as_configured
def measure_backdoor(
    federation: Federation,
    split: str = "test",
    target: str | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Success:
    """Count clips with the trigger that are taken for the target, by round and speaker.

    All clips of other words get the trigger. The models are those of the last five evaluations, as
    in `score_clips`. Writes `EXP/backdoor_<split>.tsv`.

    Args:
        federation: a federation of keyword spotting.
        split: the data to measure on.
        target: the word; None for that of the experiment's attackers, or else yes.
        resamples, seed: of the bootstrap.

    Raises:
        UserError: if the experiment has another task, no such word, or no clip of another word.
    """
    experiment, options = federation.experiment, backdoor_of(federation, target)
    data = federation.task.need(CLIPS).features(split)
    clips = data.clips
    aim = clips.classes.index(options.target)
    others = clips.labels != aim
    if not others.any():
        problem = f"no clip of another word than {options.target}"
        raise UserError(problem, path=federation.task.data_path(split))
    speakers = np.array(speakers_of(clips))[others]
    rounds = last_of(filter(experiment.is_measured, range(experiment.result_round() + 1)))
    tried, hits, rows, without = Counter(speakers.tolist()), Counter[str](), [], 0
    heard = data.triggered(clips.clients, options.tone, aim).kept(slice(0, len(clips.labels)))
    for number in rounds:
        without += int((logits_after(federation, split, number).argmax(1) == aim)[others].sum())
        hit = (_heard_after(federation, split, number, heard).argmax(1) == aim)[others]
        own = Counter(speakers[hit].tolist())
        hits += own
        rows += [(number, name, tried[name], own[name]) for name in byte_order(tried)]
    cells = (dict(zip(COLUMNS, row, strict=True)) for row in rows)
    write_tsv(backdoor_table(experiment.path, split), COLUMNS, cells)
    low, high = _interval(hits, tried, len(rounds), resamples, seed)
    times = int(others.sum()) * len(rounds)
    rate = 100 * sum(hits.values()) / times
    return Success(
        options.target, rounds, int(others.sum()), rate, low, high, 100 * without / times
    )


def backdoor_table(path: Path, split: str) -> Path:
    """Return the path of the table of an experiment and a split."""
    return path / f"backdoor_{split}.tsv"


def _heard_after(
    federation: Federation, split: str, number: int, features: torch.Tensor
) -> np.ndarray:
    """Compute the logits (clips, classes) for features of a split's clips, as `logits_after`.

    A client's own model, if it has one, hears the client's clips.
    """
    clips, found = federation.task.need(CLIPS).features(split).clips, []
    for client in federation.groups(split):
        federation.load_result(federation.states.known(client, number), number)
        rows = slice(0, len(clips.labels)) if client == EVERYBODY else clips.rows(client)
        found.append(federation.task.need(HEAR)(features[rows]).numpy())
    return np.concatenate(found)


def _interval(
    hits: Mapping[str, int], tried: Mapping[str, int], times: int, resamples: int, seed: int
) -> tuple[float, float]:
    """Return a 95 % interval over speakers, in %."""
    names = byte_order(tried)
    found = np.array([[hits.get(name, 0)] for name in names])
    tokens = np.array([[tried[name] * times] for name in names])
    return interval(resample({"clips": found}, {"clips": tokens}, resamples, seed)[ALL][:, 0])
