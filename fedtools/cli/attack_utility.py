"""The command that measures what defences cost: fedtools attack utility."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.attack import UNITS, attack, show
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment
from fedtools.cli.score import RESAMPLES


@command("utility", "Attacks", to=attack)
def utility(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(
        ..., metavar="TSV", help="The table to write, with three rows for each defence."
    ),
    round_: int = typer.Option(..., "--round", min=1, help="Round of the updates to measure."),
    defence: list[str] = typer.Option(
        ..., help=f"none, clip=1+noise=0.5, bits=8, keep=A,B; may be given several times. {UNITS}"
    ),
    split: list[str] = typer.Option(
        ["valid"],
        help="Split of the experiment's data to measure on; may be given several times.",
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
    ngpu: int = NGPU,
) -> None:
    """Measure what defences cost in WER or accuracy.

    WER is that of a greedy search without a language model. The row own measures each client's own
    model, as the server receives it, on that person's speech in the splits. The row newcomers
    measures the next global model, the mean of the updates, on people in the splits who are no
    clients of the experiment; the row everybody measures that model on both groups. The first rows,
    "nothing sent", measure the model that the round began with. People are the clients of a split,
    or its speakers where it has no clients; a "-" means that there are none. Errors are pooled over
    people; intervals are 95 %, over people, where there are 10 or more. Clients have the weights
    that the experiment's method gives them.

    Reads: EXP/round_<number>/update.<job>.* and global.safetensors; the data of the splits.

    Writes: TSV.

    Example in egs/tedlium3/attack1: fedtools attack utility exp/mini/part2 \
        exp/mini/part2/attacks/utility.tsv --round 1 --defence none --defence clip=1+noise=1
    """
    from fedtools.attack.utility import UTILITY
    from fedtools.attack.utility import utility as measure
    from fedtools.core.tables import write_tsv

    if len(set(split)) < len(split):
        raise typer.BadParameter("the same split twice", param_hint="--split")
    federation = open_experiment(experiment, ngpu)
    rows = measure(federation, round_, defence, split, resamples=resamples, seed=seed)
    write_tsv(out, UTILITY, rows)
    show(UTILITY, rows, "lll")
