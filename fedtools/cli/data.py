"""Commands on data directories (clients, subsets, unions, speeds), and values of configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from fedtools.cli.app import command
from fedtools.cli.features import DATA_DIR, OUT_DIR

Scheme = Literal["iid", "dirichlet", "quantity", "map"]


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
    from fedtools.data.perturb import perturb_speed as perturb

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
    from fedtools.data.perturb import perturb_volume as perturb

    if not 0 < low <= high < 1e6:
        raise typer.BadParameter(f"{low} to {high}: two numbers over 0", param_hint="--low")
    data = perturb(data_dir, out_dir, low, high, seed)
    print(f"{len(data.utterances)} utterances at volumes from {low:g} to {high:g}")


@command("config", "Federation")
def config(
    path: Path = typer.Argument(..., metavar="YAML", help="A configuration file."),
    keys: list[str] = typer.Argument(
        ..., metavar="KEY...", help="Names of options, such as tokens.vocab_size."
    ),
) -> None:
    """Print values of a configuration, for shell scripts.

    Each value is printed on a line of its own: a list with spaces between its items, a section as
    the names of its options, a decimal number as it stands in the file. Sections for recipes, and
    for commands that run before an experiment exists, are validated, and their defaults are known.

    Reads: YAML.

    Writes: nothing.

    Example in egs/commonvoice/asr1: fedtools config conf/mini.yaml tokens.vocab_size lm.order
    """
    from fedtools.attack import options as attacks
    from fedtools.core import recipe_sections as sections
    from fedtools.core.config import from_mapping, lookup, read_yaml
    from fedtools.core.errors import UserError

    known = {**sections.SECTIONS, **attacks.SECTIONS}
    content, values = read_yaml(path), []
    for key in keys:
        section, _, name = key.partition(".")
        kind = known.get(section)
        options = from_mapping(kind, content.get(section), f"{path}: {section}") if kind else None
        try:
            values.append(lookup(path, key, as_written=True))
        except UserError:
            # An option that the file leaves out has its default, if it has one.
            if getattr(options, name, None) is None:
                raise
            values.append(getattr(options, name))
    for value in values:
        print(*value) if isinstance(value, list | tuple | dict) else print(value)
