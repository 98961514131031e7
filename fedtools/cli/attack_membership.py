"""The command that infers membership in clients' training data: fedtools attack membership."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.attack.options import Updates
from fedtools.cli.app import command, section_option
from fedtools.cli.attack import UNITS, attack, show
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment
from fedtools.cli.score import RESAMPLES


@command("membership", "Attacks", to=attack)
def membership(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(..., metavar="OUT", help="Gets membership.tsv."),
    round_: int = typer.Option(..., "--round", min=1, help="Round of the models to attack."),
    each: int = section_option(
        Updates, "each", help="Maximum number of members, and of non-members, of a client."
    ),
    references: int = section_option(
        Updates, "references", help="Maximum number of other clients whose models are references."
    ),
    shadows: int = section_option(
        Updates, "shadows", help="Pairs of models that the attacker trains for each client."
    ),
    held: list[str] = typer.Option(
        [],
        metavar="SPLIT",
        help="Split of the experiment's data on which no client trains, for non-members of the "
        "same speaker; may be given several times.",
    ),
    defence: list[str] = typer.Option(
        [],
        help="Defence of the clients, in addition to none: clip=1+noise=0.5, bits=8, keep=A,B; may "
        f"be given several times. {UNITS}",
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
    ngpu: int = NGPU,
) -> None:
    """Infer which utterances a client was trained on.

    The attacks use the model that the client sent: LiRA, offline and online, RMIA, and thresholds
    on the loss and on the direction of the update. In keyword tasks, clips are attacked instead of
    utterances. References are models of other clients (round), or models of other speech of the
    same speaker, some of which the attacker trains (speaker). A member is compared with a
    non-member of similar length, of the same speaker or of any other. The rows blind are of a
    classifier that sees only the audio and the global model: what it detects is not a leak. With
    a defence, an ignorant attacker has undefended references and a semi-informed one defended
    references; thresholds need none and are listed as ignorant. Intervals are 95 %, over speakers,
    where there are 10 or more; the true-positive rate at a false-positive rate f is reported for at
    least 10 / f non-members.

    Reads: EXP/round_<number>/update.<job>.* and global.safetensors; EXP's training data, and the
    splits of --held.

    Writes: OUT/membership.tsv.

    Example in egs/tedlium3/attack1: fedtools attack membership exp/mini/part2 \
        exp/mini/part2/attacks --round 1
    """
    from fedtools.attack.membership.attack import COLUMNS
    from fedtools.attack.membership.attack import attack as run

    if "train" in held or len(set(held)) < len(held):
        problem = "the same split twice" if "train" not in held else "clients train on train"
        raise typer.BadParameter(problem, param_hint="--held")
    options = Updates(each=each, references=references, shadows=shadows, held=tuple(held))
    federation = open_experiment(experiment, ngpu)
    rows = run(
        federation, round_, out, options=options, defences=defence, resamples=resamples, seed=seed
    )
    show(COLUMNS, rows, "rllllll")
