"""Features that a client sends: features.<client>.ark and .scp in the folder of a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.files.ark import FeatureReader, write_ark
from fedtools.files.datadir import check_id, read_table, write_table
from fedtools.files.errors import UserError
from fedtools.files.tables import check_regular, check_table_size


@dataclass(frozen=True)
class Features:
    """Bounds on the features that a client may send.

    Attributes:
        size: values of a frame.
        utterances, frames: the largest number of each, in all.
    """

    size: int
    utterances: int = 10**6
    frames: int = 10**9


def feature_paths(round_dir: Path, client: str) -> tuple[Path, Path]:
    """The ark and the scp of a client."""
    return round_dir / f"features.{client}.ark", round_dir / f"features.{client}.scp"


def write_features(round_dir: Path, client: str, matrices: Iterable[tuple[str, np.ndarray]]) -> int:
    """Write utterances and their matrices (T, D) as a client sends them; their bytes."""
    ark, scp = feature_paths(round_dir, client)
    entries = write_ark(ark, matrices)
    # The file's name alone: where the experiment lies is nobody's business.
    write_table(scp, {utt: f"{ark.name}:{at.rpartition(':')[2]}" for utt, at in entries.items()})
    return ark.stat().st_size + scp.stat().st_size


def check_features(round_dir: Path, client: str, bounds: Features) -> int:
    """The bytes of a client's features; a `UserError` if headers or ids are not within bounds."""
    ark, scp = feature_paths(round_dir, client)
    entries = _entries(round_dir, client, bounds.utterances)
    check_regular(ark)
    if len(entries) > bounds.utterances:
        raise UserError(f"{len(entries)} utterances, over {bounds.utterances}", path=scp)
    reader, frames = FeatureReader(entries), 0
    for line, utterance in enumerate(entries, 1):
        check_id(utterance, "utterance", scp, line)
        length, size = reader.shape(utterance)
        frames += length
        if size != bounds.size or frames > bounds.frames:
            problem = f"{length} frames of {size} values, {frames} in all"
            remedy = f"at most {bounds.frames} of {bounds.size} are taken"
            raise UserError(problem, path=scp, line=line, remedy=remedy)
    return ark.stat().st_size + scp.stat().st_size


def open_features(round_dir: Path, client: str) -> FeatureReader:
    """The features that a client sent, which `check_features` has accepted."""
    return FeatureReader(_entries(round_dir, client, Features.utterances))


def _entries(round_dir: Path, client: str, most: int) -> dict[str, str]:
    """utterance -> "path:offset" in the client's own ark, whatever path the client wrote."""
    ark, scp = feature_paths(round_dir, client)
    check_table_size(scp, most)
    entries = {}
    for line, (utterance, value) in enumerate(read_table(scp).items(), 1):
        name, _, offset = value.rpartition(":")
        if name != ark.name or not (offset.isascii() and offset.isdecimal()):
            raise UserError(f"{value[:80]!r} is not in {ark.name}", path=scp, line=line)
        entries[utterance] = f"{ark}:{offset}"
    return entries
