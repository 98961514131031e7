"""Utterances whose transcript does not fit: no alignment, or more tokens than a decoder writes.

Their loss means nothing, so they are neither trained on nor counted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from fedtools.client.options import UtteranceTraining
from fedtools.core.errors import UserError, some
from fedtools.data.datadir import DataDir, invert
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.acoustic.asr import longest_input, shortest_input, trained_by
from fedtools.tasks.asr.data import Utterances, Zeros
from fedtools.tasks.base import NoData


def zeros_of(model: nn.Module, training: UtteranceTraining) -> Zeros:
    """Return the frames that a model and the options append to utterances."""
    return Zeros(training.end_frames, shortest_input(model), longest_input(model))


def fit_names(data: Utterances, model: nn.Module) -> list[str]:
    """Return the utterances that fit a model's criterion; raise `NoData` if none does."""
    lost = set(data.unfit(model))
    if len(lost) == len(data):
        what, remedy = trained_by(model).unfit
        problem = f"its {len(data)} utterances all have {what}"
        raise NoData(problem, path=data.path / "text", remedy=remedy)
    return [name for name in data.names if name not in lost]


def report_unfit(
    data: DataDir,
    model: nn.Module,
    tokenizer: Tokenizer | WhisperTokens,
    training: UtteranceTraining,
    trained: bool,
    of_site: bool = False,
) -> None:
    """Print how many utterances do not fit the criterion, and the clients that have no others.

    Args:
        trained: whether clients train on these data, rather than are measured on them.
        of_site: whether other clients train on other data, so that none here need fit.

    Raises:
        UserError: if an utterance lacks features or a transcript, or if clients train on the data
            and no utterance fits.
    """
    zeros, bins = zeros_of(model, training), training.batch_bins
    lost: dict[str, list[str]] = {}
    owned: Mapping[str, list[str]] = invert(data.utt2client) or {"": data.utterances}
    for client, names in owned.items():
        lost[client] = Utterances(data, names, tokenizer, bins, zeros).unfit(model)
    dropped, where = [name for names in lost.values() for name in names], data.path / "text"
    if not dropped:
        return
    empty = [client for client, names in owned.items() if len(lost[client]) == len(names)]
    what, remedy = trained_by(model).unfit
    effect = "dropped from training" if trained else "left out of the loss"
    problem = f"{len(dropped)} of {len(data.utterances)} utterances have {what}: {effect}: "
    problem += some(dropped)
    if trained and len(empty) == len(owned) and not of_site:
        raise UserError(problem, path=where, remedy=remedy)
    print(f"{where}: {problem}", file=sys.stderr)
    if trained and empty:
        print(f"{where}: no others of {some(empty)}, who are left out", file=sys.stderr)
