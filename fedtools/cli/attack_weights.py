"""The command that attacks what clients changed of the weights: fedtools attack weights."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.attack.options import Weights
from fedtools.cli.app import command
from fedtools.cli.attack import DEFENCE, OTHERS, SET, attack, given_by, rounds_of, show
from fedtools.cli.federation import NGPU, open_experiment
from fedtools.cli.report import RESAMPLES


@command("weights", "Attacks", to=attack)
def weights(
    experiments: list[Path] = typer.Argument(
        ..., metavar="EXP... OUT", help="Experiments whose models are compared; gets weights.tsv."
    ),
    round_: list[int] = typer.Option(
        [1], "--round", min=1, help="In which models were sent; may come several times."
    ),
    cohort: list[Path] = typer.Option(
        [],
        metavar="DIR",
        help="Experiments of other people, which updates are centred on and the regression is "
        "trained on; may come several times. Default: of each trial, models in EXP... of neither "
        "of its two.",
    ),
    models: Path = typer.Option(
        None, metavar="TSV", help="model, speaker, gender, talks: trials by recording, too."
    ),
    defence: str = DEFENCE,
    config: Path = typer.Option(None, help="YAML with a section weights: constant, others, ..."),
    set_: list[str] = SET,
    others: int = OTHERS,
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of everything random."),
    ngpu: int = NGPU,
) -> None:
    """Tell whether two updates are of one speaker.

    The cosine of what clients changed, part by part, centred on what other people did; all parts
    together, by logistic regression trained on other people; and what a first layer's update tells
    of the client's input: of all of it, and of what is constant there, such as an i-vector. Where
    there is nothing to attack, a line says why. Behind a defence there are rows of three attackers.
    ignorant: enrols, and has learnt from, undefended updates; lazy-informed: enrols defended ones;
    semi-informed: has learnt from them, too.

    Reads: EXP/round_<number>/update.<job>.* and global.safetensors, those of the experiments of
    --cohort, too; the training data, to tell how right the read-out is; the TSV of --models;
    section weights of the YAML of --config.

    Writes: OUT/weights.tsv, parts.tsv, readout.tsv and weights.png; a score for each trial, and DET
    curves.

    Example in egs/tedlium3/attack1: fedtools attack weights exp/mini/part2 exp/mini/weights \
        --cohort exp/mini/part1 --models data/mini/models.tsv
    """
    from fedtools.attack.verify import COLUMNS
    from fedtools.attack.weights import Look
    from fedtools.attack.weights import attack as run
    from fedtools.files.config import read_section

    if len(experiments) < 2:
        raise typer.BadParameter("at least one experiment and OUT", param_hint="EXP... OUT")
    *attacked, out = experiments
    options = given_by(read_section(Weights, config, "weights", set_), others=others)
    look = Look(rounds_of(round_), defence, resamples, seed)
    opened = [[open_experiment(one, ngpu) for one in some] for some in (attacked, cohort)]
    show(COLUMNS, run(*opened, models, out, options, look), "llllll")
