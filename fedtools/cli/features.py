"""Commands that make features and clips from audio."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import typer

from fedtools.cli.app import command, section_option
from fedtools.core.recipe_sections import Clips, Ivectors

DATA_DIR = typer.Argument(..., metavar="DATA_DIR", help="A Kaldi data directory.")
OUT_DIR = typer.Argument(..., metavar="OUT_DIR", help="The data directory to write.")
ARK_DIR = typer.Argument(..., metavar="ARK_DIR", help="The folder for archives.")
MAX_DROP = typer.Option(
    0.02, min=0.0, max=1.0, help="Maximum share of utterances that may be unusable."
)


FeatureKind = Literal["fbank", "mfcc", "log_mel", "wave"]


@command("extract-features", "Data")
def extract_features(
    data_dir: Path = DATA_DIR,
    ark_dir: Path = ARK_DIR,
    job: int | None = typer.Option(
        None, min=1, help="Extract only this one of --nj parts, and do not merge."
    ),
    nj: int = typer.Option(1, min=1, help="Number of jobs."),
    kind: FeatureKind = typer.Option(
        "fbank",
        help="mfcc: as many cepstra as mel filters; log_mel: Whisper's; wave: the samples.",
    ),
    num_mel_bins: int = typer.Option(80, min=3, max=256, help="Number of mel filters."),
    sample_rate: int = typer.Option(
        16_000, min=4_000, max=192_000, help="Sampling rate in Hz; other audio is resampled."
    ),
    pretrained: Path = typer.Option(
        None, help="Folder of a pretrained model, whose input replaces --kind."
    ),
    compress: bool = typer.Option(
        False, "--compress", help="Compress as Kaldi does, with a small loss of precision."
    ),
    max_drop: float = MAX_DROP,
) -> None:
    """Extract log mel filterbanks or MFCC, as Kaldi does.

    The features are filterbanks as made by Kaldi's make_fbank.sh, the high-resolution MFCC of its
    recipes, or the input of a pretrained model in a Hugging Face folder. Without --job, one process
    extracts everything and then merges it as merge-features does.

    Reads: DATA_DIR/wav.scp, segments, utt2spk, utt2client, utt2speed, utt2volume; the audio; the
    config.json of --pretrained.

    Writes: ARK_DIR/feats.<job>.ark and .scp, utt2dur.<job>, mixed.<job>, dropped.<job>.

    Example in egs/commonvoice/asr1: fedtools extract-features data/mini/valid dump/mini/valid
    """
    if job is None and nj > 1:
        raise typer.BadParameter("needs --job too, once for each of 1 to N", param_hint="--nj")
    if job is not None and job > nj:
        raise typer.BadParameter(f"{job} is above --nj {nj}", param_hint="--job")
    from fedtools.audio import features

    if pretrained:
        from fedtools.models.pretrained.folder import Folder

        folder = Folder.open(pretrained)
        kind, num_mel_bins = cast("FeatureKind", folder.inputs), folder.bins
    if kind in features.PRETRAINED and sample_rate != features.FeatureConfig.sample_rate:
        raise typer.BadParameter(f"--kind {kind} needs 16000 Hz", param_hint="--sample-rate")
    config = features.FeatureConfig(num_mel_bins, sample_rate, kind)
    if (most := features.most_mel_bins(config)) < num_mel_bins:
        problem = f"some of {num_mel_bins} filters have no frequency at {sample_rate} Hz"
        raise typer.BadParameter(f"{problem}; give at most {most}", param_hint="--num-mel-bins")
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
    """Merge the jobs of extract-features into feats.scp.

    All jobs must be complete. Unusable utterances are removed from every table of the data
    directory; it is an error if their share exceeds --max-drop.

    Reads: ARK_DIR/feats.<job>.scp, utt2dur.<job>, mixed.<job>, dropped.<job>; DATA_DIR.

    Writes: DATA_DIR/feats.scp, utt2num_frames, utt2dur, and the tables from which utterances are
    removed.

    Example in egs/commonvoice/asr1: fedtools merge-features data/mini/train dump/mini/train --nj \
        3
    """
    from fedtools.audio import features

    print(features.merge_features(data_dir, ark_dir, jobs=nj, max_drop=max_drop))


@command("pack-clips", "Data")
def pack_clips(
    data_dir: Path = DATA_DIR,
    folder: Path = typer.Argument(..., metavar="OUT", help="Gets clips.npy, clips.tsv, ..."),
    classes: Path = typer.Option(..., metavar="TXT", help="List of labels, one per line."),
    noise: Path | None = typer.Option(
        None, metavar="SCP", help="Table of noise recordings for augmentation: name and path."
    ),
    max_drop: float = MAX_DROP,
    clip_seconds: float = section_option(
        Clips,
        "clip_seconds",
        help="Length of every clip: longer utterances are cut, shorter ones padded.",
    ),
) -> None:
    """Pack one-word utterances into clips of equal length.

    The clips of all clients are written to one file, client by client. If DATA_DIR has no
    utt2client, each speaker is a client.

    Reads: DATA_DIR/wav.scp, segments, text, utt2spk, utt2client; the audio; the files of --classes
    and --noise.

    Writes: OUT/clips.npy, clips.tsv, labels.npy, classes.txt, clients.tsv, noise.npy; clip_samples
    if clips are not one second long.

    Example in egs/speechcommands/kws1: fedtools pack-clips data/mini/keywords/test \
        dump/mini/keywords/test --classes data/mini/keywords/classes.txt --noise \
        data/mini/noise.scp
    """
    from fedtools.audio.pack import pack_clips
    from fedtools.core.tables import format_table
    from fedtools.data.clips import RATE

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
    gaussians: int = section_option(
        Ivectors, "gaussians", help="Number of Gaussians of the background model."
    ),
    dimension: int = section_option(Ivectors, "dimension", help="Dimension of the i-vectors."),
    hours: float = section_option(
        Ivectors, "hours", help="Maximum hours of training speech, drawn at random."
    ),
    seed: int = typer.Option(0, min=0, help="Random seed."),
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
    fit = f"log-likelihood of a frame {ubm:.2f}, with i-vectors {found:.2f}"
    print(f"{out / FILE}: {gaussians} Gaussians, {dimension} dimensions, {fit}")


@command("append-ivectors", "Data")
def append_ivectors(
    data_dir: Path = DATA_DIR,
    extractor: Path = typer.Argument(
        ..., metavar="DIR", help="The folder made by fedtools train-ivectors."
    ),
    out_dir: Path = OUT_DIR,
    ark_dir: Path = ARK_DIR,
    per: Literal["utterance", "recording", "speaker"] = typer.Option(
        "utterance", help="Unit within which statistics are carried over between utterances."
    ),
    offline: bool = typer.Option(
        False, "--offline", help="Estimate one i-vector from all frames of each --per unit."
    ),
    every: int = typer.Option(
        10, min=1, help="Number of frames between i-vectors within an utterance."
    ),
) -> None:
    """Append an i-vector to each frame of features.

    This is the input of Kaldi's TDNN recipes. Each i-vector is estimated from all frames so far: of
    the utterance, or also of the speaker's earlier utterances, in all recordings or in the same
    one, as Kaldi carries statistics over; never of another client's utterances.

    Reads: DATA_DIR with feats.scp, segments, utt2client; DIR/ivectors.safetensors.

    Writes: OUT_DIR; ARK_DIR/feats.ark.

    Example in egs/tedlium3/attack1: fedtools append-ivectors data/mini/valid exp/mini/ivectors \
        data/mini/valid_iv dump/mini/valid_iv
    """
    from fedtools.audio.ivectors import append_ivectors as append

    data = append(data_dir, extractor, out_dir, ark_dir, per=per, online=not offline, every=every)
    print(f"{data.path}: {len(data.utterances)} utterances with i-vectors")
