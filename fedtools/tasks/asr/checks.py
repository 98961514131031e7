"""Checks of the splits of a new experiment, and of a site's data where the site trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedtools.client.options import UtteranceTraining
from fedtools.core.config import option_error
from fedtools.core.errors import UserError
from fedtools.lm.tokens import Tokenizer, warn_of_unspelled
from fedtools.lm.whisper_tokens import WhisperTokens
from fedtools.methods.base import Method
from fedtools.models.acoustic.asr import input_kind_of, input_size_of, longest_input
from fedtools.tasks.asr.data import check_words, read_data
from fedtools.tasks.asr.fits import check_lengths
from fedtools.tasks.asr.unfit import report_unfit
from fedtools.tasks.base import NewExperiment


def check_split(
    split: str,
    folder: Path,
    config: Mapping[str, Any],
    model: nn.Module,
    tokenizer: Tokenizer | WhisperTokens,
    training: UtteranceTraining,
    tokens: Path,
    of_site: bool = False,
) -> None:
    """Check that a model can be trained or measured on a split, and print what it leaves out.

    Args:
        split, folder: its name, and its data directory.
        config: the section `model`.
        tokens: the folder of the tokens, for messages.
        of_site: whether others have data, too, so that all of these may be left out.

    Raises:
        UserError: if it cannot.
    """
    check_lengths(folder, input_kind_of(config), longest_input(model))
    if split != "train":
        check_words(folder)
    reads = split != "train" or training.reads_transcripts
    if reads and not isinstance(tokenizer, WhisperTokens):
        warn_of_unspelled(tokenizer, folder / "text", tokens)
    if split != "train" or training.labels == "transcripts":
        data = read_data(folder, config, "text")
        report_unfit(data, model, tokenizer, training, split == "train", of_site)


def check_told(new: NewExperiment[Method], training: UtteranceTraining) -> None:
    """Raise a `UserError` if a model does not fit the features that sites tell of.

    The lengths of utterances are checked where they are.
    """
    assert new.known
    found, config = new.known, new.options.model
    if (wanted := input_size_of(config)) != found.values:
        problem = f"{found.values} values in a frame at the sites, the model's input_size is"
        remedy = "extract other features, or begin with another model.input_size"
        raise UserError(f"{problem} {wanted}", path=new.where, remedy=remedy)
    takes, kind = input_kind_of(config), found.kind.split(",")[0]
    special = kind in ("log_mel", "wave")
    if kind and (kind != takes if takes else special):
        problem = f"the features of the sites are {kind}, the model takes {takes or 'others'}"
        remedy = f"extract them with --kind {takes or 'fbank'}"
        raise UserError(problem, path=new.where, remedy=remedy)
    if training.server_labels == "transcripts":
        problem = "server_labels: transcripts needs the clients' transcripts at the server"
        raise option_error(problem, f"{new.where}: training", "server_labels", "transcripts")
