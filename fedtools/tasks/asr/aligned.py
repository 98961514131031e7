"""Utterances without an alignment: their transcript needs more frames than they have.

Their CTC or LF-MMI loss means nothing, so they are neither trained on nor counted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from fedtools.client.options import UtteranceTraining
from fedtools.files.datadir import DataDir, invert
from fedtools.files.errors import UserError, some
from fedtools.lm.tokens import Tokenizer
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.models.asr import longest_input, shortest_input
from fedtools.tasks.asr.data import Utterances, Zeros
from fedtools.tasks.base import NoData

_REMEDY = "check its segments and text, or take tokens of several letters"


def zeros_of(model: nn.Module, training: UtteranceTraining) -> Zeros:
    """Return the frames that a model and the options append to utterances."""
    return Zeros(training.end_frames, shortest_input(model), longest_input(model))


def without_unaligned(data: Utterances, model: nn.Module) -> list[str]:
    """Return the utterances that have an alignment; raise `NoData` if none has."""
    lost = set(data.unaligned(model))
    if len(lost) == len(data):
        problem = (
            f"none of its {len(data)} utterances has an alignment: too few frames for the text"
        )
        raise NoData(problem, path=data.path / "text", remedy=_REMEDY)
    return [name for name in data.names if name not in lost]


def report_unaligned(
    data: DataDir,
    model: nn.Module,
    tokenizer: Tokenizer | WhisperTokens,
    training: UtteranceTraining,
    trained: bool,
) -> None:
    """Print how many utterances have no alignment, and the clients that have no others.

    Args:
        trained: whether clients train on these data, rather than are measured on them.

    Raises:
        UserError: if an utterance lacks features or a transcript, or if clients train on the data
            and no utterance has an alignment.
    """
    zeros, bins = zeros_of(model, training), training.batch_bins
    lost: dict[str, list[str]] = {}
    owned: Mapping[str, list[str]] = invert(data.utt2client) or {"": data.utterances}
    for client, names in owned.items():
        lost[client] = Utterances(data, names, tokenizer, bins, zeros).unaligned(model)
    dropped, where = [name for names in lost.values() for name in names], data.path / "text"
    if not dropped:
        return
    empty = [client for client, names in owned.items() if len(lost[client]) == len(names)]
    problem = f"{len(dropped)} of {len(data.utterances)} utterances have too few frames for their "
    effect = "dropped from training" if trained else "left out of the loss"
    problem += f"text, so no alignment: {effect}: {some(dropped)}"
    if trained and len(empty) == len(owned):
        raise UserError(problem, path=where, remedy=_REMEDY)
    print(f"{where}: {problem}", file=sys.stderr)
    if trained and empty:
        print(f"{where}: no others of {some(empty)}, who are left out", file=sys.stderr)
