"""Checks that data fit a pretrained model: kind and length of features and tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from fedtools.core.errors import UserError
from fedtools.data.ark import FeatureReader
from fedtools.data.datadir import DataDir
from fedtools.lm.whisper_tokens import FILES, WhisperTokens
from fedtools.models.pretrained.whisper import Whisper

# Frames per second of log_mel, and a bound on the range of its values.
_SECOND, _RANGE = 100, 2.01


def check_kind(reader: FeatureReader, name: str, wanted: str | None, path: Path) -> None:
    """Raise a `UserError` unless an utterance's features are of the kind that a model takes.

    Whisper's features are recognised by two properties that others lack: they have whole seconds of
    frames, and a range of at most 2, since values are clipped at 80 dB below the loudest.

    Args:
        reader: of the features.
        name: of the utterance.
        wanted: "log_mel", "wave", or None for neither.
        path: the table that lists them, for messages.
    """
    frames, size = reader.shape(name)
    found = "wave" if size == 1 else "fbank or mfcc"
    if size > 1 and frames % _SECOND == 0 and np.ptp(reader.read(name)) < _RANGE:
        found = "log_mel"
    if found != wanted if wanted else found == "log_mel":
        takes = wanted or "fbank or mfcc"
        problem = f"the features of {name!r} are {found}, the model takes {takes}"
        raise UserError(problem, path=path, remedy=f"extract them with --kind {takes}")


def check_lengths(path: Path, kind: str | None, longest: int | None) -> None:
    """Raise a `UserError` unless a model accepts all utterances of a data directory.

    Args:
        path: the data directory.
        kind: see `wanted` of `check_kind`.
        longest: the most frames of an utterance; None for any number.
    """
    if kind != "log_mel":
        return
    data = DataDir.read(path, "utt2spk", "feats.scp")
    reader = FeatureReader(data.feats_scp)
    data.check_features(data.utterances)
    for name in data.utterances:
        frames = reader.num_frames(name)
        if frames % _SECOND:
            problem = f"{frames} frames of {name!r} are not whole seconds, so not log_mel"
            remedy = "extract them with --kind log_mel"
            raise UserError(problem, path=path / "feats.scp", remedy=remedy)
        check_length(name, frames, longest, path / "feats.scp")


def check_length(name: str, frames: int, longest: int | None, path: Path) -> None:
    """Raise a `UserError` that names an utterance if it has more frames than a model accepts."""
    if longest is not None and frames > longest:
        problem = f"{frames} frames of {name!r}, the model accepts {longest}"
        remedy = "cut it by segments, or leave it out"
        raise UserError(problem, path=path, remedy=remedy)


def check_tokens(tokens: WhisperTokens, given: Path, model: nn.Module) -> None:
    """Raise a `UserError` unless tokens, read in the folder `given`, are those of a Whisper."""
    assert isinstance(model, Whisper)
    if given.resolve() == model.path.resolve():
        return
    if all((model.path / name).is_file() for name in FILES):
        same = WhisperTokens.load(model.path) == tokens
    else:
        same = len(tokens) <= model.decoder.embed_tokens.num_embeddings
    if not same:
        problem = f"not the tokens of the model in {model.path}"
        raise UserError(problem, path=given, remedy=f"give --asset tokens={model.path}")
