"""The command that tells members of clients' training data: fedtools attack membership."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.attack.options import Updates
from fedtools.cli.app import command, section_option
from fedtools.cli.attack import UNITS, attack, show
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment
from fedtools.cli.report import RESAMPLES


@command("membership", "Attacks", to=attack)
def membership(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(..., metavar="OUT", help="Gets membership.tsv."),
    round_: int = typer.Option(..., "--round", min=1, help="In which models were sent."),
    each: int = section_option(Updates, "each", help="Members, and others, of a client at most."),
    references: int = section_option(
        Updates, "references", help="Other clients whose models are references, at most."
    ),
    shadows: int = section_option(
        Updates, "shadows", help="Pairs of models that the attacker trains for each client."
    ),
    held: list[str] = typer.Option(
        [],
        metavar="SPLIT",
        help="Of the experiment's data, on which nobody trains: others of the same speaker. May "
        "come several times.",
    ),
    defence: list[str] = typer.Option(
        [],
        help="What clients do to updates first, beside none: clip=1+noise=0.5, bits=8, keep=A,B; "
        f"may come several times. {UNITS}",
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of everything random."),
    ngpu: int = NGPU,
) -> None:
    """Tell whether an utterance was in a client's training.

    Or a clip, by the model that the client sent: LiRA, offline and online, RMIA, and thresholds on
    the loss and on the direction of the update. References are models of other clients (round), or
    of the same speaker's other speech, some of which the attacker trains (speaker). A member is
    compared with an utterance of like length, of the same speaker or of anybody. The rows blind are
    of a classifier that sees audio and the global model alone: what it tells is no leak. Behind a
    defence an ignorant attacker has undefended references, and a semi-informed one defended ones;
    a threshold has none, and is the ignorant one's. Intervals are 95 %, over speakers, where there
    are 10 or more; a true-positive rate at a false-positive rate f is told of at least 10 / f
    others.

    Reads: EXP/round_<number>/update.<job>.* and global.safetensors; EXP's training data, and those
    of --held.

    Writes: OUT/membership.tsv.

    Example in egs/tedlium3/attack1: fedtools attack membership exp/mini/part2 \
        exp/mini/part2/attacks --round 1
    """
    from fedtools.attack.membership import COLUMNS
    from fedtools.attack.membership import attack as run

    if "train" in held or len(set(held)) < len(held):
        problem = "a split twice" if "train" not in held else "everybody trains on train"
        raise typer.BadParameter(problem, param_hint="--held")
    options = Updates(each=each, references=references, shadows=shadows, held=tuple(held))
    federation = open_experiment(experiment, ngpu)
    rows = run(
        federation, round_, out, options=options, defences=defence, resamples=resamples, seed=seed
    )
    show(COLUMNS, rows, "rllllll")
