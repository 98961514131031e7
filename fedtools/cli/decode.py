"""Commands that decode, and choose from N-best lists."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.federation import NGPU, open_experiment

DECODE_DIR = typer.Argument(..., metavar="DECODE_DIR", help="A folder made by fedtools decode.")


@command("decode", "Decoding and scoring")
def decode(
    experiment: Path = typer.Argument(..., metavar="EXP", help="The experiment's folder."),
    data: Path = typer.Argument(
        ..., metavar="DATA_DIR", help="The data directory to decode; needs feats.scp."
    ),
    out: Path = typer.Argument(..., metavar="DECODE_DIR", help="The folder for the N-best lists."),
    model: str = typer.Option("average", help="The model to use: average, start, or round:N."),
    lm: Path = typer.Option(
        None, help="N-gram for beam search, made by fedtools train-lm; default: greedy search."
    ),
    config: Path = typer.Option(None, help="YAML with a section decode: beam_size, nbest, ..."),
    phrases: Path = typer.Option(
        None, metavar="TSV", help="Columns client, phrase: words to favour, by client; needs --lm."
    ),
    bonus: float = typer.Option(
        2.0, min=0, help="Bonus for each word of --phrases, as a natural logarithm."
    ),
    job: int = typer.Option(
        None, min=1, help="Decode only this one of --nj parts; default: decode and merge all."
    ),
    nj: int = typer.Option(1, min=1, help="Number of parts for --job."),
    ngpu: int = NGPU,
) -> None:
    """Decode each client's utterances into N-best lists.

    If clients have personal models, each client's utterances are decoded with its own model.

    Reads: EXP/model.safetensors and EXP/clients/<client>/model.safetensors; DATA_DIR/feats.scp and
    utt2client; the folder of --lm; the files of --config and --phrases.

    Writes: DECODE_DIR/nbest.<job>.tsv and .yaml; without --job also nbest.tsv.

    Example in egs/commonvoice/asr1: fedtools decode exp/mini/fedavg/seed0 data/mini/test \
        exp/mini/fedavg/seed0/decode_test --lm exp/mini/lm --config conf/mini.yaml
    """
    import re

    from fedtools.decode.lists import merge
    from fedtools.federation.asr import decode as work

    if not re.fullmatch(r"average|start|round:\d+", model):
        raise typer.BadParameter("average, start, or round:N", param_hint="--model")
    if job is not None and job > nj:
        raise typer.BadParameter(f"more than --nj {nj}", param_hint="--job")
    federation = open_experiment(experiment, ngpu)
    if phrases and not lm:
        raise typer.BadParameter("needs --lm", param_hint="--phrases")
    search = work.read_search(federation, lm, config, phrases, bonus)
    work.decode(federation, data, out, search, model=model, job=job or 1, jobs=nj if job else 1)
    if job is None:
        print(merge(out, data, 1))


@command("cross", "Decoding and scoring")
def cross(
    data: Path = typer.Argument(
        ..., metavar="DATA_DIR", help="Data directory with features, transcripts and clients."
    ),
    out: Path = typer.Argument(..., metavar="TABLE", help="The TSV to write."),
    experiments: list[str] = typer.Argument(
        ...,
        metavar="NAME=EXP...",
        help="Experiments; {} is the method's title, and those with the same name are seeds.",
    ),
    ngpu: int = NGPU,
) -> None:
    """Measure each client's model on each client's data.

    The table has the WER of a greedy search; experiments without personal models are left out.

    Reads: EXP/clients/<client>/model.safetensors; DATA_DIR/feats.scp, text and utt2client.

    Writes: TABLE.

    Example in egs/commonvoice/asr1: fedtools cross data/mini/test \
        exp/mini/decouplefl/seed0/cross.tsv '{}=exp/mini/decouplefl/seed0'
    """
    from fedtools.cli.app import pair
    from fedtools.federation.asr import cross as work

    pairs = [pair(text, "NAME=EXP", "NAME=EXP") for text in experiments]
    opened = [(name, open_experiment(Path(exp), ngpu)) for name, exp in pairs]
    if not work.cross(opened, data, out):
        print("no personal models: nothing to compare", file=sys.stderr)
        return
    print(out)


@command("merge-cross", "Decoding and scoring")
def merge_cross(
    out: Path = typer.Argument(..., metavar="TABLE", help="The TSV to write."),
    parts: list[Path] = typer.Argument(
        ..., metavar="PART...", help="Tables written by fedtools cross; missing ones are left out."
    ),
    plot: Path = typer.Option(None, help="Draw a map for each name into this PNG."),
) -> None:
    """Merge the tables of all jobs of cross.

    Reads: PART....

    Writes: TABLE, unless all parts are missing; the PNG of --plot.

    Example in egs/commonvoice/asr1: fedtools merge-cross exp/mini/cross.tsv \
        exp/mini/decouplefl/seed0/cross.tsv --plot exp/mini/cross.png
    """
    from fedtools.federation.asr.cross import merge, read_cross

    if not merge(parts, out):
        print("no personal models: nothing to compare", file=sys.stderr)
        return
    if plot is not None:
        from fedtools.report.plots import plot_cross

        plot_cross(plot, read_cross(out))
    print(out)


@command("merge-nbest", "Decoding and scoring")
def merge_nbest(
    out: Path = DECODE_DIR,
    data: Path = typer.Argument(..., metavar="DATA_DIR", help="The decoded data directory."),
    nj: int = typer.Option(..., min=1, help="Number of jobs that fedtools decode ran."),
) -> None:
    """Merge the N-best lists of all jobs of decode.

    Reads: DECODE_DIR/nbest.<job>.tsv; DATA_DIR/utt2spk.

    Writes: DECODE_DIR/nbest.tsv.

    Example in egs/commonvoice/asr1: fedtools merge-nbest exp/mini/fedavg/seed0/decode_test \
        data/mini/test --nj 3
    """
    from fedtools.decode.lists import merge

    print(merge(out, data, nj))


@command("tune", "Decoding and scoring")
def tune(
    out: Path = DECODE_DIR,
    data: Path = typer.Argument(
        ..., metavar="DATA_DIR", help="Data directory whose text is the reference."
    ),
    weights: Path = typer.Argument(..., metavar="WEIGHTS", help="The YAML file to write."),
) -> None:
    """Choose LM weight and word score on validation data.

    The chosen values give the lowest WER when the N-best lists are re-ranked with them.

    Reads: DECODE_DIR/nbest.tsv; DATA_DIR/text.

    Writes: WEIGHTS.

    Example in egs/commonvoice/asr1: fedtools tune exp/mini/fedavg/seed0/decode_valid \
        data/mini/valid exp/mini/fedavg/seed0/weights.yaml
    """
    from fedtools.decode.lists import tune as choose

    print(choose(out, data, weights))


@command("best-path", "Decoding and scoring")
def best_path(
    out: Path = DECODE_DIR,
    weights: Path = typer.Option(
        None, help="YAML file made by fedtools tune; default: take rank 1 of each list."
    ),
    drop_loops: bool = typer.Option(
        False,
        "--drop-loops",
        help="Write an empty transcript for a hypothesis that repeats itself. For training labels.",
    ),
) -> None:
    """Write the best hypothesis of every N-best list.

    A decoder such as Whisper's may repeat a few words until the hypothesis ends. In scoring, such
    a hypothesis is kept like any other; for training labels, see --drop-loops.

    Reads: DECODE_DIR/nbest.tsv; the YAML of --weights.

    Writes: DECODE_DIR/text, and weights.yaml with --weights.

    Example in egs/commonvoice/asr1: fedtools best-path exp/mini/fedavg/seed0/decode_test \
        --weights exp/mini/fedavg/seed0/weights.yaml
    """
    from fedtools.decode.lists import best_path as best

    print(best(out, weights, drop_loops))
