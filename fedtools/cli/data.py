"""Commands on data directories: features, clips, i-vectors, projections, parts and copies."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import typer

from fedtools.cli.app import command, section_option
from fedtools.cli.federation import NGPU
from fedtools.core.recipe_sections import Clips, Ivectors

DATA_DIR = typer.Argument(..., metavar="DATA_DIR", help="A Kaldi data directory.")
OUT_DIR = typer.Argument(..., metavar="OUT_DIR", help="The data directory to write.")
ARK_DIR = typer.Argument(..., metavar="ARK_DIR", help="The folder for archives.")
MAX_DROP = typer.Option(
    0.02, min=0.0, max=1.0, help="Maximum share of utterances that may be unusable."
)
FeatureKind = Literal["fbank", "mfcc", "log_mel", "wave"]
Scheme = Literal["iid", "dirichlet", "quantity", "map"]


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


@command("fit-projection", "Data")
def fit_projection(
    data: Path = typer.Argument(..., metavar="DATA", help="A folder of fedtools pack-clips."),
    out: Path = typer.Argument(
        ..., metavar="OUT", help="Gets projection.safetensors and projection.yaml."
    ),
    pretrained: Path = typer.Option(..., help="Folder of a pretrained model."),
    dimension: int = typer.Option(
        128, min=1, max=65536, help="Number of values that the encoder's output is projected to."
    ),
    window: int | None = typer.Option(
        None, min=1, max=30, help="For Whisper, model.window of the experiments; default: 1."
    ),
    ngpu: int = NGPU,
) -> None:
    """Fit mean and whitening of an encoder's output.

    DATA has clips of people who are no clients. The output is the mean over time that a frozen
    encoder's keyword head takes. Experiments with model.normalise: projection use the result, as
    fedtools init --asset projection=OUT.

    The people are listed in OUT if there are at most 10,000, so that init can name those who are
    clients, too.

    Reads: DATA, and the outputs in DATA/frozen if they are there; the folder of --pretrained.

    Writes: OUT/projection.safetensors and projection.yaml; DATA/frozen.

    Example in egs/speechcommands/kws1: fedtools fit-projection dump/mini/keywords/valid \
        exp/mini/projection --pretrained downloads/whisper-tiny.en --dimension 64
    """
    from fedtools.cli.federation import device_of
    from fedtools.models.pretrained.options import PROJECTION
    from fedtools.tasks.kws.projection import fit_projection as fit

    fitted, size, share = fit(data, out, pretrained, dimension, window, device_of(ngpu))
    kept = f"{fitted.dimension} of {size} dimensions, {100 * share:.1f} % of the variance"
    print(f"{out / PROJECTION}: {kept}, {fitted.clips} clips of {fitted.people} people")


@command("partition", "Data")
def partition(
    data_dir: Path = DATA_DIR,
    out_dir: Path = OUT_DIR,
    scheme: Scheme = typer.Option(..., help="How utterances are assigned to clients."),
    clients: int | None = typer.Option(None, min=1, help="Number of clients; not for map."),
    alpha: float | None = typer.Option(
        None, help="Dirichlet parameter for dirichlet and quantity; small values skew more."
    ),
    by: str | None = typer.Option(
        None, metavar="UTT2X", help="Table of labels for dirichlet, of clients for map."
    ),
    seed: int = typer.Option(0, min=0, help="Random seed."),
    min_utterances: int = typer.Option(1, min=1, help="Minimum number of utterances of a client."),
    keep_speakers: bool = typer.Option(
        False, "--keep-speakers", help="Keep each speaker's utterances with one client."
    ),
) -> None:
    """Partition utterances into clients.

    Partition before extract-features, so that a client's features are contiguous in the archive.

    Reads: DATA_DIR, and its table --by.

    Writes: OUT_DIR with all tables, utt2client and client2utt.

    Example in egs/commonvoice/asr1: fedtools partition data/mini/train data/mini/train_dirichlet \
        --scheme dirichlet --clients 10 --alpha 0.5 --by utt2spk
    """
    _check_scheme(scheme, clients, alpha, by, keep_speakers)
    from fedtools.core.tables import format_table
    from fedtools.data.partition import PartitionConfig, partition_data_dir

    config = PartitionConfig(
        scheme=scheme,
        clients=clients or 0,
        alpha=alpha or 0.0,
        by=by or "",
        seed=seed,
        min_utterances=min_utterances,
        keep_speakers=keep_speakers,
    )
    result = partition_data_dir(data_dir, out_dir, config)
    sizes = result.sizes()
    header = ["scheme", "clients", "utterances", "smallest", "median", "largest", "moved"]
    row = [scheme, len(sizes), sum(sizes), sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    print(format_table(header, [[*row, result.moved]]), end="")


def _check_scheme(
    scheme: Scheme, clients: int | None, alpha: float | None, by: str | None, keep_speakers: bool
) -> None:
    """Raise a usage error if an option that the scheme needs is missing, or one has no use."""
    wanted = {
        "--clients": (clients is not None, scheme != "map"),
        "--alpha": (alpha is not None, scheme in ("dirichlet", "quantity")),
        "--by": (by is not None, scheme in ("dirichlet", "map")),
    }
    for option, (given, needed) in wanted.items():
        if given != needed:
            problem = "is needed by" if needed else "has no meaning for"
            raise typer.BadParameter(f"{problem} --scheme {scheme}", param_hint=option)
    if keep_speakers and scheme == "map":
        raise typer.BadParameter("has no meaning for --scheme map", param_hint="--keep-speakers")
    if alpha is not None and not 0 < alpha < float("inf"):
        raise typer.BadParameter(f"{alpha} is not above 0", param_hint="--alpha")
    if by is not None and (not by.startswith("utt2") or "/" in by):
        raise typer.BadParameter(f"{by!r} is not the name of an utt2* table", param_hint="--by")


@command("combine-data", "Data")
def combine_data(
    out_dir: Path = OUT_DIR,
    data_dirs: list[Path] = typer.Argument(..., metavar="DATA_DIR...", help="Two or more."),
) -> None:
    """Combine several data directories into one.

    This works like Kaldi's combine_data.sh.

    Reads: every DATA_DIR.

    Writes: OUT_DIR with the tables that all inputs have.

    Example in egs/commonvoice/asr1: fedtools combine-data data/mini/both data/mini/train \
        data/mini/server_train
    """
    from fedtools.data.datadir import DataDir

    data, left_out = DataDir.combine(out_dir, [DataDir.read(path) for path in data_dirs])
    data.write(remove_others=True)
    print(f"{len(data.utterances)} utterances from {len(data_dirs)} data directories")
    if left_out:
        print(f"left out, as not every input has it: {' '.join(left_out)}")


@command("subset-data", "Data")
def subset_data(
    data_dir: Path = DATA_DIR,
    out_dir: Path = OUT_DIR,
    clients: str | None = typer.Option(
        None, metavar="A,B,...", help="Keep all utterances of these clients."
    ),
    utterances: int | None = typer.Option(
        None, min=1, help="Keep this many utterances, evenly spread."
    ),
    speakers: int | None = typer.Option(
        None, min=1, help="Keep all utterances of this many speakers, evenly spread."
    ),
    first: float | None = typer.Option(
        None, min=0.1, metavar="SECONDS", help="Keep the first seconds of every speaker."
    ),
    rest: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Write the other utterances there; with --first, only those of the same speakers.",
    ),
) -> None:
    """Write a subset of a data directory.

    This works like Kaldi's subset_data_dir.sh. Give one of --clients, --utterances, --speakers and
    --first to choose the subset.

    Reads: DATA_DIR.

    Writes: OUT_DIR; the folder of --rest.

    Example in egs/commonvoice/asr1: fedtools subset-data data/mini/train data/mini/train_100 \
        --utterances 100
    """
    if sum(option is not None for option in (clients, utterances, speakers, first)) != 1:
        raise typer.BadParameter("give one of --clients, --utterances, --speakers and --first")
    from fedtools.core.errors import UserError
    from fedtools.data.datadir import DataDir, evenly_spread, invert

    data = DataDir.read(data_dir)
    if clients is not None:
        keep = [utt for client in clients.split(",") for utt in data.client_utterances(client)]
    elif utterances is not None:
        keep = evenly_spread(data.utterances, utterances, "utterances", data_dir)
    elif first is not None:
        from fedtools.data.subsets import first_of_speakers, rest_of_speakers

        keep = first_of_speakers(data, first)
    else:
        chosen = set(evenly_spread(list(invert(data.utt2spk)), speakers, "speakers", data_dir))
        keep = [utt for utt in data.utterances if data.utt2spk[utt] in chosen]
    parts = [data.restrict(keep, out_dir)]
    if rest is not None:
        left = set(data.utterances).difference(keep)
        parts.append(data.restrict(left if first is None else rest_of_speakers(data, keep), rest))
    for part in parts:
        if not part.utterances:
            raise UserError("nothing is left over", path=data_dir, remedy="leave --rest out")
    for part in parts:
        part.write(remove_others=True)
        print(f"{part.path}: {len(part.utterances)} of {len(data.utterances)} utterances")


@command("relabel", "Data")
def relabel(
    data_dir: Path = DATA_DIR,
    text: Path = typer.Argument(
        ..., metavar="TEXT", help="Kaldi text, such as that of fedtools best-path."
    ),
    out_dir: Path = OUT_DIR,
) -> None:
    """Copy a data directory with other transcripts.

    Utterances whose new transcript is empty are left out.

    Reads: DATA_DIR and TEXT.

    Writes: OUT_DIR.

    Example in egs/commonvoice/asr1: fedtools relabel data/mini/test \
        exp/mini/fedavg/seed0/decode_test/text data/mini/test_fixed
    """
    from fedtools.data.subsets import relabel as work

    print(work(data_dir, text, out_dir))


@command("perturb-speed", "Data")
def perturb_speed(
    data_dir: Path = DATA_DIR,
    out_dir: Path = OUT_DIR,
    speeds: str = typer.Option("0.9 1.0 1.1", help="Speed factors; 1.0 leaves audio unchanged."),
) -> None:
    """Copy every utterance at several speeds.

    This works like Kaldi's perturb_data_dir_speed_3way.sh. Run it before extract-features, which
    reads the speed of each utterance. Perturb training data only.

    Reads: DATA_DIR.

    Writes: OUT_DIR, with utt2speed.

    Example in egs/commonvoice/asr1: fedtools perturb-speed data/mini/train data/mini/train_sp \
        --speeds '0.9 1.0 1.1'
    """
    from fedtools.audio.perturb import perturb_speed as perturb

    if not speeds.split():
        raise typer.BadParameter("no speed", param_hint="--speeds")
    data = perturb(data_dir, out_dir, speeds.split())
    print(f"{len(data.utterances)} utterances at speeds {', '.join(speeds.split())}")


@command("perturb-volume", "Data")
def perturb_volume(
    data_dir: Path = DATA_DIR,
    out_dir: Path = OUT_DIR,
    low: float = typer.Option(0.125, help="The smallest factor."),
    high: float = typer.Option(2.0, help="The largest factor."),
    seed: int = typer.Option(0, min=0, help="Random seed."),
) -> None:
    """Give every utterance a random volume.

    This works like Kaldi's perturb_data_dir_volume.sh. Run it before extract-features, which reads
    the volume of each utterance. Perturb training data only.

    Reads: DATA_DIR.

    Writes: OUT_DIR, with utt2volume.

    Example in egs/tedlium3/attack1: fedtools perturb-volume data/mini/train_g \
        data/mini/train_g_vol --seed 0
    """
    from fedtools.audio.perturb import perturb_volume as perturb

    if not 0 < low <= high < 1e6:
        raise typer.BadParameter(f"{low} to {high}: two numbers over 0", param_hint="--low")
    data = perturb(data_dir, out_dir, low, high, seed)
    print(f"{len(data.utterances)} utterances at volumes from {low:g} to {high:g}")
