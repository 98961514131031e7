"""Commands that make features and clips of audio."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import typer

from fedtools.cli.app import command, section_option
from fedtools.files.sections import Clips, Ivectors

DATA_DIR = typer.Argument(..., metavar="DATA_DIR", help="A Kaldi data directory.")
OUT_DIR = typer.Argument(..., metavar="OUT_DIR", help="The data directory to write.")
ARK_DIR = typer.Argument(..., metavar="ARK_DIR", help="Where the arks lie.")
MAX_DROP = typer.Option(
    0.02, min=0.0, max=1.0, help="Largest share of utterances that may be unusable."
)


FeatureKind = Literal["fbank", "mfcc", "log_mel", "wave"]


@command("extract-features", "Data")
def extract_features(
    data_dir: Path = DATA_DIR,
    ark_dir: Path = ARK_DIR,
    job: int | None = typer.Option(
        None, min=1, help="Do this share of --nj only, and do not merge."
    ),
    nj: int = typer.Option(1, min=1, help="Number of jobs."),
    kind: FeatureKind = typer.Option(
        "fbank",
        help="mfcc: as many cepstra as mel filters; log_mel: Whisper's; wave: the samples.",
    ),
    num_mel_bins: int = typer.Option(80, min=3, max=256, help="Number of mel filters."),
    sample_rate: int = typer.Option(
        16_000, min=4_000, max=192_000, help="In Hz; other audio is resampled to it."
    ),
    pretrained: Path = typer.Option(None, help="In place of --kind: what this model takes."),
    compress: bool = typer.Option(False, "--compress", help="Kaldi's compression: not exact."),
    max_drop: float = MAX_DROP,
) -> None:
    """Extract log mel filterbanks or MFCC, as Kaldi does.

    Features are as Kaldi's make_fbank.sh makes them, or the high-resolution MFCC of its recipes; or
    those that a pretrained model of a Hugging Face folder takes.
    Without --job: everything in this process, then merge-features.

    Reads: DATA_DIR/wav.scp, segments, utt2spk, utt2client, utt2speed, utt2volume; the audio; the
    config.json of --pretrained.

    Writes: ARK_DIR/feats.<job>.ark and .scp, utt2dur.<job>, mixed.<job>, dropped.<job>.

    Example in egs/commonvoice/asr1: fedtools extract-features data/mini/valid dump/mini/valid
    """
    if job is None and nj > 1:
        raise typer.BadParameter("wants --job too, once for each of 1 to N", param_hint="--nj")
    if job is not None and job > nj:
        raise typer.BadParameter(f"{job} is above --nj {nj}", param_hint="--job")
    from fedtools.audio import features

    if pretrained:
        from fedtools.models.pretrained.folder import Folder

        folder = Folder.open(pretrained)
        kind, num_mel_bins = cast("FeatureKind", folder.inputs), folder.bins
    if kind in features.PRETRAINED and sample_rate != features.FeatureConfig.sample_rate:
        raise typer.BadParameter(f"--kind {kind} is of 16000 Hz", param_hint="--sample-rate")
    config = features.FeatureConfig(num_mel_bins, sample_rate, kind)
    done = features.extract_features(
        data_dir, ark_dir, config, job=job or 1, jobs=nj, compress=compress
    )
    if job is None:
        done = features.merge_features(data_dir, ark_dir, jobs=1, max_drop=max_drop)
    print(done)


@command("merge-features", "Data")
def merge_features(
    data_dir: Path = DATA_DIR,
    ark_dir: Path = ARK_DIR,
    nj: int = typer.Option(..., min=1, help="Number of jobs that extract-features ran."),
    max_drop: float = MAX_DROP,
) -> None:
    """Join the jobs of extract-features, write feats.scp.

    All jobs must be whole. Unusable utterances leave every table of the data directory; over
    --max-drop, it is an error.

    Reads: ARK_DIR/feats.<job>.scp, utt2dur.<job>, mixed.<job>, dropped.<job>; DATA_DIR.

    Writes: DATA_DIR/feats.scp, utt2num_frames, utt2dur, and the other tables where utterances leave
    them.

    Example in egs/commonvoice/asr1: fedtools merge-features data/mini/train dump/mini/train --nj \
        3
    """
    from fedtools.audio import features

    print(features.merge_features(data_dir, ark_dir, jobs=nj, max_drop=max_drop))


@command("pack-clips", "Data")
def pack_clips(
    data_dir: Path = DATA_DIR,
    folder: Path = typer.Argument(..., metavar="OUT", help="Receives clips.npy, clips.tsv, ..."),
    classes: Path = typer.Option(..., metavar="TXT", help="The labels, one a line."),
    noise: Path | None = typer.Option(
        None, metavar="SCP", help="Table of background noise: name and path."
    ),
    max_drop: float = MAX_DROP,
    clip_seconds: float = section_option(
        Clips, "clip_seconds", help="Of every clip: longer ones are cut, shorter ones filled up."
    ),
) -> None:
    """Pack one-word utterances into clips of equal length.

    In one file, client by client. A client is a speaker where DATA_DIR has no utt2client.

    Reads: DATA_DIR/wav.scp, segments, text, utt2spk, utt2client; the audio; the files of --classes
    and --noise.

    Writes: OUT/clips.npy, clips.tsv, labels.npy, classes.txt, clients.tsv, noise.npy; clip_samples
    where clips are not of one second.

    Example in egs/speechcommands/kws1: fedtools pack-clips data/mini/keywords/test \
        dump/mini/keywords/test --classes data/mini/keywords/classes.txt --noise \
        data/mini/noise.scp
    """
    from fedtools.audio.pack import pack_clips
    from fedtools.files.clips import RATE
    from fedtools.files.tables import format_table

    done = pack_clips(
        data_dir, folder, classes, noise, max_drop=max_drop, clip_seconds=clip_seconds
    )
    print(done.extraction)
    header = ["clips", "clients", "classes", "padded", "cut", "noise"]
    seconds = f"{done.noise_samples / RATE:.1f} s"
    row = [done.clips, done.clients, done.classes, done.padded, done.cut, seconds]
    print(format_table(header, [row], "r" * len(row)), end="")


@command("train-ivectors", "Data")
def train_ivectors(
    data_dir: Path = DATA_DIR,
    out: Path = typer.Argument(..., metavar="OUT", help="Gets ivectors.safetensors."),
    gaussians: int = section_option(Ivectors, "gaussians", help="Of the background model."),
    dimension: int = section_option(Ivectors, "dimension", help="Of i-vectors."),
    hours: float = section_option(Ivectors, "hours", help="Of speech, at most; drawn at random."),
    seed: int = typer.Option(0, min=0, help="Of everything random."),
) -> None:
    """Train a background model and an i-vector extractor.

    Reads: DATA_DIR/feats.scp and utt2spk.

    Writes: OUT/ivectors.safetensors.

    Example in egs/tedlium3/attack1: fedtools train-ivectors data/mini/train_g exp/mini/ivectors \
        --gaussians 32 --dimension 20
    """
    from fedtools.audio.ivectors import FILE, Sizes
    from fedtools.audio.ivectors import train_ivectors as train

    ubm, found = train(data_dir, out, Sizes(gaussians, dimension, hours, seed))
    said = f"log-likelihood of a frame {ubm:.2f}, with i-vectors {found:.2f}"
    print(f"{out / FILE}: {gaussians} Gaussians, {dimension} dimensions, {said}")


@command("append-ivectors", "Data")
def append_ivectors(
    data_dir: Path = DATA_DIR,
    extractor: Path = typer.Argument(..., metavar="DIR", help="What train-ivectors has written."),
    out_dir: Path = OUT_DIR,
    ark_dir: Path = ARK_DIR,
    per: Literal["utterance", "recording", "speaker"] = typer.Option(
        "utterance", help="Whose statistics are carried over from one utterance to the next."
    ),
    offline: bool = typer.Option(False, "--offline", help="One of all frames of --per."),
    every: int = typer.Option(10, min=1, help="Frames from one to the next within an utterance."),
) -> None:
    """Append an i-vector to each frame of features.

    Kaldi's TDNN recipes do so. An i-vector is of all frames until then: of the utterance, or also
    of those before it of the same speaker, in all or in one recording, as Kaldi carries them over;
    never of another client's.

    Reads: DATA_DIR with feats.scp, segments, utt2client; DIR/ivectors.safetensors.

    Writes: OUT_DIR; ARK_DIR/feats.ark.

    Example in egs/tedlium3/attack1: fedtools append-ivectors data/mini/valid exp/mini/ivectors \
        data/mini/valid_iv dump/mini/valid_iv
    """
    from fedtools.audio.ivectors import append_ivectors as append

    data = append(data_dir, extractor, out_dir, ark_dir, per=per, online=not offline, every=every)
    print(f"{data.path}: {len(data.utterances)} utterances with i-vectors")
