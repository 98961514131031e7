"""I-vectors as features of acoustic models: trained on a data directory, and put beside its frames.

As Kaldi's recipes do it for TDNNs (`train_diag_ubm.sh`, `train_ivector_extractor.sh`,
`extract_ivectors_online.sh`), but on the features as they are: there is no splicing, LDA or
normalisation of means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtools.audio.features import client_order
from fedtools.files.ark import FRAMES_PER_HOUR, FeatureReader, write_ark
from fedtools.files.datadir import DataDir, invert
from fedtools.files.errors import UserError
from fedtools.files.progress import counted
from fedtools.files.sections import Ivectors
from fedtools.files.seeds import seed64
from fedtools.speaker.gmm import Moments, accumulate, train_ubm
from fedtools.speaker.ivector import IvectorExtractor, train_extractor

FILE = "ivectors.safetensors"


@dataclass(frozen=True)
class Sizes:
    """What decides an extractor.

    Attributes:
        gaussians: of the background model.
        dimension: of i-vectors.
        hours: of speech that both are trained on, at most; utterances are drawn at random.
        seed: of the draw, and of both trainings.
    """

    gaussians: int = Ivectors.gaussians
    dimension: int = Ivectors.dimension
    hours: float = Ivectors.hours
    seed: int = 0


class _Frames:
    """The features of some utterances, which can be read again and again."""

    def __init__(self, data: DataDir, utterances: Sequence[str]):
        self._reader = FeatureReader(data.feats_scp)
        self._utterances = list(utterances)

    def __iter__(self) -> Iterator[np.ndarray]:
        for utt in self._utterances:
            yield self._reader.read(utt)


def train_ivectors(data_dir: str | Path, out: Path, sizes: Sizes) -> tuple[float, float]:
    """Train a background model and an extractor on features; write OUT/ivectors.safetensors.

    Each utterance is a set of frames with an i-vector of its own.

    Returns:
        the mean log-likelihood of a frame under the background model, and under the extractor.

    Raises:
        UserError: if there are too few frames.
    """
    data = DataDir.read(data_dir, "utt2spk", "feats.scp")
    chosen = _some(data, sizes)
    frames = _Frames(data, chosen)
    ubm, ubm_history = train_ubm(frames, sizes.gaussians, seed=sizes.seed)
    # Moments are small beside frames: each utterance's are kept.
    sets = [ubm.moments(matrix)[0] for matrix in frames]
    extractor, history = train_extractor(ubm, sets, sizes.dimension, seed=sizes.seed)
    out.mkdir(parents=True, exist_ok=True)
    extractor.save(out / FILE)
    return ubm_history[-1], history[-1]


def _some(data: DataDir, sizes: Sizes) -> list[str]:
    """Utterances in an order that the seed decides, up to the hours asked for; in C order."""
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
    online: bool,
    every: int = 10,
) -> DataDir:
    """Write a data directory whose features have an i-vector behind each frame.

    Args:
        data_dir: with the features that the extractor was trained on.
        extractor_dir: see `train_ivectors`.
        out_dir: another data directory, with the same tables.
        ark_dir: gets feats.ark.
        online: of the utterance so far, a new one every so many frames; otherwise of all that the
            speaker says in this directory, at this speed.
        every: frames.

    Raises:
        UserError: if the features are of another size, or a directory would be overwritten.
    """
    data, out, ark = DataDir.read(data_dir), Path(out_dir), Path(ark_dir) / "feats.ark"
    if out.exists() and out.samefile(data.path):
        raise UserError("would be overwritten", path=out, remedy="name another directory")
    extractor = IvectorExtractor.load(extractor_dir / FILE)
    data.check_features(data.utterances)
    reader, size = FeatureReader(data.feats_scp), extractor.means.shape[1]
    for utt in data.utterances[:1]:
        found = reader.shape(utt)[1]
        if found != size:
            problem = f"{found} values in a frame of {utt!r}, the extractor is for {size}"
            raise UserError(problem, path=data.path / "feats.scp")
    order = client_order(data)
    of_speaker = {} if online else _of_speakers(data, reader, extractor)

    def matrices() -> Iterator[tuple[str, np.ndarray]]:
        for utt in counted(order, "i-vectors", "utterances"):
            frames = reader.read(utt)
            if online:
                rows = extractor.online(frames, every=every)
                vectors = rows[np.arange(len(frames)) // every]
            else:
                vectors = np.tile(of_speaker[data.utt2spk[utt]], (len(frames), 1))
            yield utt, np.concatenate([frames, vectors.astype(np.float32)], 1)

    scp = write_ark(ark, matrices())
    result = replace(data, path=out, feats_scp={utt: scp[utt] for utt in data.utterances})
    result.write(remove_others=True)
    return result


def _of_speakers(
    data: DataDir, reader: FeatureReader, extractor: IvectorExtractor
) -> dict[str, np.ndarray]:
    """Speaker -> the i-vector of all its frames. A copy at another speed is another voice."""
    speakers = invert(data.utt2spk)

    def moments() -> Iterator[Moments]:
        for utts in speakers.values():
            yield accumulate(extractor.ubm, (reader.read(utt) for utt in utts))[0]

    vectors = extractor.extract(moments())
    return dict(zip(speakers, vectors, strict=True))
