"""I-vectors as input of acoustic models: training an extractor, and appending to feature frames.

This follows Kaldi's recipes for TDNNs (`train_diag_ubm.sh`, `train_ivector_extractor.sh`,
`extract_ivectors_online.sh`), but on the features as they are, without splicing, LDA or
normalisation of means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedtools.audio.feature_kinds import check_same, kind_beside, kind_of, write_kind
from fedtools.audio.features import client_order
from fedtools.core.atomic import sha256
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.core.recipe_sections import Ivectors
from fedtools.core.seeds import seed64
from fedtools.data.ark import FRAMES_PER_HOUR, FeatureReader, write_ark
from fedtools.data.datadir import DataDir
from fedtools.speaker.gmm import Moments, accumulate, train_ubm
from fedtools.speaker.ivector import IvectorExtractor, train_extractor

FILE = "ivectors.safetensors"
# Kaldi's max-remembered-frames.
REMEMBERED = 1000
Per = Literal["utterance", "recording", "speaker"]
Group = tuple[str, str, str, str]


@dataclass(frozen=True)
class Sizes:
    """Options of the training of an extractor.

    Attributes:
        gaussians: number of Gaussians in the background model.
        dimension: dimension of i-vectors.
        hours: most hours of speech to train both models on; utterances are drawn at random.
        seed: random seed of the draw and of both trainings.
    """

    gaussians: int = Ivectors.gaussians
    dimension: int = Ivectors.dimension
    hours: float = Ivectors.hours
    seed: int = 0


class _Frames:
    """The features of some utterances, as an iterable that can be read repeatedly."""

    def __init__(self, data: DataDir, utterances: Sequence[str]):
        self._reader = FeatureReader(data.feats_scp)
        self._utterances = list(utterances)

    def __iter__(self) -> Iterator[np.ndarray]:
        for utt in self._utterances:
            yield self._reader.read(utt)


def train_ivectors(data_dir: str | Path, out: Path, sizes: Sizes) -> tuple[float, float]:
    """Train a background model and an extractor on features.

    Writes OUT/ivectors.safetensors, and beside it the kind of the features.

    Each utterance has an i-vector of its own.

    Returns:
        mean log-likelihoods per frame, of the background model and of the extractor.

    Raises:
        UserError: if there are too few frames.
    """
    data = DataDir.read(data_dir, "utt2spk", "feats.scp")
    chosen = _some(data, sizes)
    frames = _Frames(data, chosen)
    ubm, ubm_history = train_ubm(frames, sizes.gaussians, seed=sizes.seed)
    # Moments are small compared with frames, so those of all utterances fit in memory.
    sets = [ubm.moments(matrix)[0] for matrix in frames]
    extractor, history = train_extractor(ubm, sets, sizes.dimension, seed=sizes.seed)
    out.mkdir(parents=True, exist_ok=True)
    extractor.save(out / FILE)
    write_kind(out / FILE, kind_of(data.feats_scp, data.path / "feats.scp"))
    return ubm_history[-1], history[-1]


def _some(data: DataDir, sizes: Sizes) -> list[str]:
    """Return a random sample of utterances with the requested hours of speech, in C order."""
    data.check_features(data.utterances)
    reader, left = FeatureReader(data.feats_scp), sizes.hours * FRAMES_PER_HOUR
    chosen = []
    for utt in sorted(data.utterances, key=lambda name: seed64(sizes.seed, "ivectors", name)):
        if left <= 0:
            break
        chosen.append(utt)
        left -= reader.num_frames(utt)
    return sorted(chosen)


def append_ivectors(
    data_dir: str | Path,
    extractor_dir: Path,
    out_dir: str | Path,
    ark_dir: str | Path,
    *,
    per: Per = "utterance",
    online: bool = True,
    every: int = 10,
) -> DataDir:
    """Write a data directory whose feature frames have an i-vector appended.

    Args:
        data_dir: data directory with features of the kind that the extractor was trained on.
        extractor_dir: see `train_ivectors`.
        out_dir: data directory to write, with the same tables.
        ark_dir: receives feats.ark.
        per: speech that an i-vector is computed from: the utterance, or all of its speaker in the
            same recording, or all of its speaker. Speech of the same speaker at another client is
            left out, since the client has no access to it; a copy at another speed counts as
            another speaker.
        online: compute i-vectors from the speech so far, a new one every `every` frames, with
            utterances in C order; as in Kaldi at most `REMEMBERED` frames of earlier utterances
            count. Otherwise one i-vector is computed from all frames.
        every: frames between two online i-vectors.

    Raises:
        UserError: if the features have another dimension or kind than the extractor's, or a
            directory would be overwritten.
    """
    data, out, ark = DataDir.read(data_dir), Path(out_dir), Path(ark_dir) / "feats.ark"
    if out.exists() and out.samefile(data.path):
        raise UserError("would be overwritten", path=out, remedy="name another directory")
    extractor = IvectorExtractor.load(extractor_dir / FILE)
    kind = kind_of(data.feats_scp, table := data.path / "feats.scp")
    check_same(kind, kind_beside(extractor_dir / FILE), f"the extractor in {extractor_dir}", table)
    reader, groups = _reader(data, extractor), _groups(data, per)
    order = counted(client_order(data), "i-vectors", "utterances")
    if online:
        matrices = _so_far(groups, order, reader, extractor, every)
    else:
        matrices = _whole(groups, order, reader, extractor)
    scp = write_ark(ark, matrices)
    write_kind(ark, kind and replace(kind, ivectors=sha256(extractor_dir / FILE)))
    result = replace(data, path=out, feats_scp={utt: scp[utt] for utt in data.utterances})
    result.write(remove_others=True)
    return result


def _reader(data: DataDir, extractor: IvectorExtractor) -> FeatureReader:
    """Return a feature reader; raise a `UserError` if the extractor is for another dimension."""
    data.check_features(data.utterances)
    reader, size = FeatureReader(data.feats_scp), extractor.means.shape[1]
    for utt in data.utterances[:1]:
        found = reader.shape(utt)[1]
        if found != size:
            problem = f"{found} values per frame of {utt!r}, but the extractor is for {size}"
            raise UserError(problem, path=data.path / "feats.scp")
    return reader


def _groups(data: DataDir, per: Per) -> dict[Group, list[str]]:
    """Return utterances in C order by the group that shares an i-vector.

    A group's key is client, speaker, recording and utterance; parts that `per` does not use are "".
    """
    groups: dict[Group, list[str]] = {}
    for utt in data.utterances:
        recording = data.segments[utt].split()[0] if utt in data.segments else utt
        group = (
            data.utt2client.get(utt, ""),
            data.utt2spk[utt],
            recording if per == "recording" else "",
            utt if per == "utterance" else "",
        )
        groups.setdefault(group, []).append(utt)
    return {group: sorted(utts) for group, utts in groups.items()}


def _so_far(
    groups: Mapping[Group, Sequence[str]],
    order: Iterable[str],
    reader: FeatureReader,
    extractor: IvectorExtractor,
    every: int,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield utterances with i-vectors of their group's speech up to each frame."""
    group_of = {utt: group for group, utts in groups.items() for utt in utts}
    carried: dict[Group, Moments] = {}
    for utt in order:
        frames, group = reader.read(utt), group_of[utt]
        before = carried.pop(group, None)
        rows = extractor.online(frames, every=every, before=before)
        if utt != groups[group][-1]:
            carried[group] = _remember(before, extractor.ubm.moments(frames)[0])
        yield utt, _append(frames, rows[np.arange(len(frames)) // every])


def _remember(before: Moments | None, current: Moments) -> Moments:
    """Return the moments for the next utterance, scaled down to at most `REMEMBERED` frames."""
    both = current if before is None else before.plus(current)
    share = min(1.0, REMEMBERED / max(float(both.counts.sum()), 1.0))
    return Moments(*(share * one for one in both))


def _whole(
    groups: Mapping[Group, Sequence[str]],
    order: Iterable[str],
    reader: FeatureReader,
    extractor: IvectorExtractor,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield utterances with the i-vector of all frames of their group."""

    def moments() -> Iterator[Moments]:
        for utts in groups.values():
            yield accumulate(extractor.ubm, (reader.read(utt) for utt in utts))[0]

    vectors = zip(groups.values(), extractor.extract(moments()), strict=True)
    of_utterance = {utt: vector for utts, vector in vectors for utt in utts}
    for utt in order:
        frames = reader.read(utt)
        yield utt, _append(frames, np.tile(of_utterance[utt], (len(frames), 1)))


def _append(frames: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.concatenate([frames, vectors.astype(np.float32)], 1)
