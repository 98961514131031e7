"""The command that attacks clients' weight updates: fedtools attack weights."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.attack.options import WeightsAttack
from fedtools.cli.app import command
from fedtools.cli.attack import DEFENCE, OTHERS, SET, attack, given_by, rounds_of, show
from fedtools.cli.federation import NGPU, open_experiment
from fedtools.cli.score import RESAMPLES


@command("weights", "Attacks", to=attack)
def weights(
    experiments: list[Path] = typer.Argument(
        ...,
        metavar="EXP... OUT",
        help="Experiments whose models are compared; the folder that gets weights.tsv.",
    ),
    round_: list[int] = typer.Option(
        [1], "--round", min=1, help="Round of the updates to attack; may be given several times."
    ),
    cohort: list[Path] = typer.Option(
        [],
        metavar="DIR",
        help="Experiments of other people, for centring the updates and training the regression; "
        "may be given several times. Default: the speakers in EXP... are split into five parts, "
        "and a trial uses the parts that have neither of its two.",
    ),
    models: Path = typer.Option(
        None,
        metavar="TSV",
        help="Columns model, speaker, gender, talks: report trials by recording, too.",
    ),
    defence: str = DEFENCE,
    config: Path = typer.Option(None, help="YAML with a section weights: constant, others, ..."),
    set_: list[str] = SET,
    others: int = OTHERS,
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
    ngpu: int = NGPU,
) -> None:
    """Test whether two updates share a speaker.

    The scores are the cosine of two updates, part by part, centred on updates of other people; a
    logistic regression over all parts, trained on other people; and the similarity of two clients'
    inputs as read out of the update of a first layer: of all values, or only of constant ones such
    as an i-vector. Where there is nothing to attack, a line says why. With a defence, there are
    rows for three attackers. The ignorant one enrols with, and has learnt from, undefended updates.
    The lazy-informed one enrols with defended updates. The semi-informed one has also learnt from
    defended updates.

    Reads: update.<job>.* and global.safetensors in EXP/round_<number>/ and in the experiments of
    --cohort; the training data, to score the read-out; the TSV of --models; section weights of the
    YAML of --config.

    Writes: OUT/weights.tsv, parts.tsv, readout.tsv and weights.png; a score for each trial, and DET
    curves.

    Example in egs/tedlium3/attack1: fedtools attack weights exp/mini/part2 exp/mini/weights \
        --cohort exp/mini/part1 --models data/mini/models.tsv
    """
    from fedtools.attack.speakers.verify import COLUMNS
    from fedtools.attack.speakers.weights import WeightsSetup
    from fedtools.attack.speakers.weights import attack as run
    from fedtools.core.config import read_section

    if len(experiments) < 2:
        raise typer.BadParameter("at least one experiment and OUT", param_hint="EXP... OUT")
    *attacked, out = experiments
    options = given_by(read_section(WeightsAttack, config, "weights", set_), others=others)
    setup = WeightsSetup(rounds_of(round_), defence, resamples, seed)
    opened = [[open_experiment(one, ngpu) for one in some] for some in (attacked, cohort)]
    show(COLUMNS, run(*opened, models, out, options, setup), "llllll")
