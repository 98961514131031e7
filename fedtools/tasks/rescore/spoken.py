"""Streams of utterances that are measured as they are rescored, group by group."""

from __future__ import annotations

from collections.abc import Mapping

from fedtools.core.errors import UserError
from fedtools.data.symbols import words_of
from fedtools.exchange.experiment import Experiment
from fedtools.score.align import count_errors


def check_split(split: str, experiment: Experiment) -> None:
    """Raise a `UserError` for a split other than "train", which has the clients' streams."""
    if split != "train":
        problem = f"{split!r} is not a stream that clients rescore"
        remedy = "measure 'train', whose utterances are rescored with what came before them"
        raise UserError(problem, path=experiment.path, remedy=remedy)


def check_planned(experiment: Experiment, number: int) -> None:
    """Raise a `UserError` for a round beyond those that utterances were split for.

    No utterances are left for it, and another release would cost more privacy than was promised.
    """
    rounds = experiment.options.rounds
    if number > rounds:
        problem = f"round {number}, but utterances are cut into groups for {rounds} rounds"
        remedy = "begin another experiment with more rounds"
        raise UserError(problem, path=experiment.path, remedy=remedy)


def measure_text(hypotheses: Mapping[str, str], text: Mapping[str, str]) -> dict[str, object]:
    """Compute the columns of tasks whose clients rescore: word errors, and WER in %.

    Args:
        hypotheses: utterance -> words of the hypothesis.
        text: utterance -> words of the reference.
    """
    words = errors = 0
    for name, heard in hypotheses.items():
        spoken = words_of(text[name])
        words += len(spoken)
        errors += count_errors(spoken, words_of(heard)).errors
    rate = f"{100 * errors / words:.4f}" if words else "nan"
    return {"utterances": len(hypotheses), "words": words, "errors": errors, "wer": rate}
