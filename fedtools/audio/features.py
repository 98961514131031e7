"""Features on disk: Kaldi's make_fbank.sh and make_mfcc.sh, for data directories with clients.

Every job writes `feats.J.ark`, `feats.J.yaml` with their kind, and `feats.J.scp` (and the small
tables `utt2dur.J`, `mixed.J` and `dropped.J`) to the ark directory; merging checks that all are
complete and joins them to the data directory's `feats.scp`. Utterances are written client by
client, so that a client's data can be read in one go. The bytes of a matrix depend on its audio and
on the options alone, not on the number of jobs. A job that was killed leaves no scp, and starts
again from the beginning.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kaldi_native_fbank
import numpy as np

from fedtools.audio.feature_kinds import FeatureConfig, kind_of, write_kind
from fedtools.audio.mel import mel_bank
from fedtools.audio.perturb import speed_of, volume_of
from fedtools.audio.wave import AudioError, read_wave, resample
from fedtools.core.errors import UserError, some
from fedtools.core.progress import counted
from fedtools.data.ark import AUTOMATIC, FeatureReader, write_ark
from fedtools.data.audio_files import audio_place
from fedtools.data.datadir import (
    DataDir,
    byte_order,
    parse_segment,
    read_table,
    write_table,
)

# Kaldi computes on 16-bit integers; soundfile returns them divided by this.
INT16_SCALE = 32768.0
MESSAGES_SHOWN = 10
# Upper edge of the mel filters, in Hz relative to half the sample rate.
MFCC_HIGH = -400.0
# Kinds of features for pretrained models, and the longest input of Whisper in seconds.
PRETRAINED = ("log_mel", "wave")
WHISPER_SECONDS = 30


@dataclass
class Extraction:
    """Counts of utterances: kept, mixed down from two channels, and dropped by reason."""

    kept: int
    mixed: int
    dropped: Counter[str]

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(self.dropped.items()))
        total = f"kept {self.kept}, dropped {self.dropped.total()}"
        mixed = f"; mixed down from stereo: {self.mixed}" if self.mixed else ""
        return f"{total} ({reasons}){mixed}" if reasons else f"{total}{mixed}"


def most_mel_bins(config: FeatureConfig) -> int:
    """Return the largest number of mel filters, up to the config's, of which none is empty.

    A filter without a frequency of the Fourier transform is one that Kaldi refuses; versions of
    kaldi-native-fbank before 1.23 do not.
    """
    rate, most = config.sample_rate, config.num_mel_bins
    if config.kind in PRETRAINED:
        return most
    size = 1 << (int(rate * 0.025) - 1).bit_length()
    high = MFCC_HIGH if config.kind == "mfcc" else 0.0
    full = (n for n in range(most, 0, -1) if mel_bank(n, size, rate, high).any(axis=0).all())
    return next(full, 0)


def compute(samples: np.ndarray, config: FeatureConfig) -> np.ndarray:
    """Compute features as Kaldi's compute-fbank-feats or compute-mfcc-feats with dither 0.

    Args:
        samples: float32 (N,) in [-1, 1), at `config.sample_rate`.
        config: the options.

    Returns:
        float32 (T, num_mel_bins), one frame every 10 ms as long as its whole 25 ms window is within
        the samples; T may be 0.
    """
    if config.kind in PRETRAINED:
        return _of_pretrained(samples, config)
    mfcc = config.kind == "mfcc"
    options = kaldi_native_fbank.MfccOptions() if mfcc else kaldi_native_fbank.FbankOptions()
    options.frame_opts.samp_freq = config.sample_rate
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = True
    options.mel_opts.num_bins = config.num_mel_bins
    if mfcc:
        options.num_ceps = config.num_mel_bins
        options.use_energy = False
        options.mel_opts.high_freq = MFCC_HIGH
    kind = kaldi_native_fbank.OnlineMfcc if mfcc else kaldi_native_fbank.OnlineFbank
    computer = kind(options)
    computer.accept_waveform(config.sample_rate, (samples * INT16_SCALE).tolist())
    computer.input_finished()
    features = np.empty((computer.num_frames_ready, config.num_mel_bins), dtype=np.float32)
    for index in range(len(features)):
        features[index] = computer.get_frame(index)
    return features


@cache
def _front_end(kind: str, bins: int) -> Callable[[Any], Any]:
    """Return the front end of a kind of features, made once for all utterances."""
    from fedtools.audio.front_end import front_end

    return front_end(kind, bins)


def _of_pretrained(samples: np.ndarray, config: FeatureConfig) -> np.ndarray:
    import torch

    if not len(samples):
        return np.empty((0, 1), np.float32)
    seconds = len(samples) / config.sample_rate
    if config.kind == "log_mel" and seconds > WHISPER_SECONDS:
        problem = f"{seconds:.3f} s of audio; Whisper takes at most {WHISPER_SECONDS} s"
        raise AudioError("too long", problem)
    front = _front_end(config.kind, config.num_mel_bins)
    found: np.ndarray = front(torch.from_numpy(samples * INT16_SCALE)[None])[0].numpy()
    return found


def client_order(data: DataDir) -> list[str]:
    """Return utterances client by client, in C order within each and where there are no clients.

    Raises:
        UserError: if some utterances have a client and others have none.
    """
    if not data.utt2client:
        return data.utterances
    for utt in data.utterances:
        if utt not in data.utt2client:
            raise UserError(f"{utt!r} has no client", path=data.path / "utt2client")
    position = {client: i for i, client in enumerate(byte_order(set(data.utt2client.values())))}
    return sorted(data.utterances, key=lambda utt: position[data.utt2client[utt]])


def extract_features(
    data_dir: str | Path,
    ark_dir: str | Path,
    config: FeatureConfig,
    *,
    job: int = 1,
    jobs: int = 1,
    compress: bool = False,
) -> Extraction:
    """Compute the features of one job's share of a data directory.

    Utterances whose audio cannot be used are dropped and counted; `merge_features` decides how many
    are too many.

    Args:
        data_dir: needs utt2spk and wav.scp; segments, utt2client, utt2speed and utt2volume are used
            if they exist.
        ark_dir: receives feats.JOB.ark, .yaml and .scp, utt2dur.JOB, mixed.JOB and dropped.JOB.
        config: the options of the features.
        job: number of the share, from 1 to `jobs`: consecutive utterances of `client_order`.
        jobs: number of equal shares that the data directory is cut into.
        compress: see `write_ark`.

    Raises:
        UserError: if the tables do not fit together.
    """
    data, ark_dir = DataDir.read(data_dir), Path(ark_dir)
    order = client_order(data)
    share = order[len(order) * (job - 1) // jobs : len(order) * job // jobs]
    places = audio_places(data, share)
    speeds = {utt: speed_of(data, utt) for utt in share}
    volumes = {utt: volume_of(data, utt) for utt in share}
    # Left by a killed run of this job; a job never runs twice at the same time.
    for left_over in ark_dir.glob(f".feats.{job}.*.tmp"):
        left_over.unlink()
    (ark_dir / f"feats.{job}.scp").unlink(missing_ok=True)

    durations: dict[str, str] = {}
    dropped: dict[str, str] = {}
    mixed: dict[str, str] = {}
    upsampled = 0

    def matrices() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal upsampled
        for utt in counted(share, f"extract {data.path.name}", "utterances"):
            try:
                samples, recorded, channels = read_wave(*places[utt])
                # As sox' `speed`: another sample rate for the same samples, then one resampling.
                rate = recorded * speeds[utt]
                heard = resample(samples, rate, config.sample_rate) * np.float32(volumes[utt])
                features = compute(heard, config)
                if not len(features):
                    problem = f"{len(samples) / rate:.3f} s of audio are less than one frame"
                    raise AudioError("too short", problem, path=places[utt][0])
            except AudioError as error:
                dropped[utt] = error.reason
                if len(dropped) <= MESSAGES_SHOWN:
                    print(f"dropped {utt}: {error}", file=sys.stderr)
                continue
            upsampled += recorded < config.sample_rate
            durations[utt] = f"{len(samples) / rate:.3f}"
            if channels > 1:
                mixed[utt] = str(channels)
            yield utt, features

    ark, method = ark_dir / f"feats.{job}.ark", AUTOMATIC if compress else None
    scp = write_ark(ark, matrices(), compress=method)
    write_kind(ark, config)
    if upsampled:
        below = f"recorded below {config.sample_rate} Hz, so their upper filters are empty"
        print(f"{data_dir}: warning: {upsampled} utterances were {below}", file=sys.stderr)
    write_table(ark_dir / f"utt2dur.{job}", durations)
    write_table(ark_dir / f"mixed.{job}", mixed)
    write_table(ark_dir / f"dropped.{job}", dropped)
    write_table(ark_dir / f"feats.{job}.scp", scp)
    return Extraction(len(scp), len(mixed), Counter(dropped.values()))


def merge_features(
    data_dir: str | Path, ark_dir: str | Path, *, jobs: int, max_drop: float = 0.02
) -> Extraction:
    """Join the features of all jobs to those of the data directory.

    Checks every matrix against its file, removes the dropped utterances from all tables of the data
    directory, and writes feats.scp, utt2num_frames, and utt2dur as measured.

    Args:
        data_dir: as for `extract_features`.
        ark_dir: as for `extract_features`.
        jobs: number of jobs.
        max_drop: largest share of utterances that may have been dropped, 0 to 1.

    Raises:
        UserError: if a job is missing or was run on other data, an ark is damaged, or more than
            `max_drop` or all utterances were dropped. The data directory then stays unchanged.
    """
    data, ark_dir = DataDir.read(data_dir), Path(ark_dir)
    scp: dict[str, str] = {}
    durations: dict[str, str] = {}
    dropped: dict[str, str] = {}
    mixed: dict[str, str] = {}
    for job in range(1, jobs + 1):
        if not (path := ark_dir / f"feats.{job}.scp").exists():
            raise UserError("missing", path=path, remedy=f"job {job} of {jobs} has to run first")
        scp.update(read_table(path))
        durations.update(read_table(ark_dir / f"utt2dur.{job}"))
        mixed.update(read_table(ark_dir / f"mixed.{job}"))
        dropped.update(read_table(ark_dir / f"dropped.{job}"))
    _check_complete(data, ark_dir, scp, dropped, jobs)
    extraction = Extraction(len(scp), len(mixed), Counter(dropped.values()))
    if not scp or len(dropped) > max_drop * (len(scp) + len(dropped)):
        remedy = f"see {ark_dir}/dropped.*, mend the audio or raise --max-drop"
        raise UserError(f"{extraction}: over {max_drop:.1%}", path=data_dir, remedy=remedy)
    frames = _frames(scp)
    kind_of(scp, ark_dir)
    clients = set(data.utt2client.values())
    data = data.restrict(scp)
    if lost := byte_order(clients - set(data.utt2client.values())):
        print(f"{data_dir}: no usable utterance of {some(lost)}: left out", file=sys.stderr)
    data.feats_scp = scp
    data.utt2num_frames = {utt: str(count) for utt, count in frames.items()}
    data.utt2dur = durations
    data.write()
    return extraction


def audio_places(data: DataDir, utts: list[str]) -> dict[str, tuple]:
    """Return the arguments of `read_wave` by utterance."""
    for number, spec in enumerate(data.wav_scp.values(), 1):
        audio_place(spec, data.path / "wav.scp", number)
    line = {utt: number for number, utt in enumerate(data.segments, 1)}
    places: dict[str, tuple] = {}
    for utt in utts:
        recording, interval = utt, ()
        if data.segments:
            if utt not in data.segments:
                raise UserError(f"{utt!r} is missing", path=data.path / "segments")
            recording, *interval = parse_segment(
                data.segments[utt], data.path / "segments", line[utt]
            )
        if recording not in data.wav_scp:
            raise UserError(f"{recording!r} is missing", path=data.path / "wav.scp")
        places[utt] = (data.wav_scp[recording], *interval)
    return places


def _check_complete(
    data: DataDir, ark_dir: Path, scp: dict[str, str], dropped: dict[str, str], jobs: int
) -> None:
    """Check that the jobs' outputs hold exactly the utterances of the data directory.

    Dropped utterances may be missing from the directory: an earlier merge removed them.
    """
    remedy = f"run all {jobs} jobs of extract-features again on this data directory"
    for utt in data.utterances:
        if utt not in scp and utt not in dropped:
            raise UserError(f"no job has utterance {utt!r}", path=ark_dir, remedy=remedy)
    if foreign := next((utt for utt in scp if utt not in data.utt2spk or utt in dropped), None):
        problem = f"the jobs were run on other data: utterance {foreign!r}"
        raise UserError(problem, path=ark_dir, remedy=remedy)


def _frames(scp: dict[str, str]) -> dict[str, int]:
    """Return the number of frames by utterance; raise a `UserError` if dimensions differ."""
    reader = FeatureReader(scp)
    shapes = {utt: reader.shape(utt) for utt in scp}
    first, (_, wanted) = next(iter(shapes.items()))
    for utt, (_, dimension) in shapes.items():
        if dimension != wanted:
            problem = f"{dimension} values per frame, but {wanted} in {scp[first]}"
            remedy = "run all jobs of extract-features with the same options"
            raise UserError(problem, path=scp[utt], remedy=remedy)
    return {utt: frames for utt, (frames, _) in shapes.items()}
