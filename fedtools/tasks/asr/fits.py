"""Checks that features fit a pretrained model: their kind and their length."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedtools.files.ark import FeatureReader
from fedtools.files.datadir import DataDir
from fedtools.files.errors import UserError

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
