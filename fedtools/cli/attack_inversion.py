"""The command that recovers clients' data from their updates: fedtools attack inversion."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from fedtools.attack.options import Inversion
from fedtools.cli.app import command, section_option
from fedtools.cli.attack import SET, UNITS, attack, given_by, show
from fedtools.cli.federation import EXPERIMENT, NGPU, open_experiment
from fedtools.cli.score import RESAMPLES


@command("inversion", "Attacks", to=attack)
def inversion(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(..., metavar="OUT", help="Gets inversion.tsv and inversion.png."),
    round_: int = typer.Option(..., "--round", min=1, help="Round of the updates to attack."),
    steps: Literal["one", "real", "both"] = typer.Option(
        "both",
        help="one: a training step on one item, simulated by the attacker; real: the update that "
        "the client sent.",
    ),
    defence: list[str] = typer.Option(
        [],
        help="Defence of the clients, in addition to none: clip=1+noise=0.5, bits=8, keep=A,B, "
        f"mean=4; may be given several times. {UNITS}",
    ),
    resemblyzer: bool = typer.Option(
        False,
        "--resemblyzer",
        help="Also identify speakers with Resemblyzer; utils/resemblyzer.sh installs it.",
    ),
    config: Path = typer.Option(None, help="YAML with a section inversion: each, iterations, ..."),
    set_: list[str] = SET,
    each: int = section_option(
        Inversion,
        "each",
        default=None,
        help="Maximum number of clients. Default: from the YAML file.",
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
    ngpu: int = NGPU,
    estimate: bool = typer.Option(
        False, "--estimate", help="Only print about how long it will take."
    ),
) -> None:
    """Recover clips and utterances from updates.

    Inputs are recovered by gradient matching with known labels; the label of a single clip is read
    from the output layer. Recovered spectra are correlated with the true ones and, as a control,
    with those of other people who say the same word; the global model transcribes them, and
    Resemblyzer identifies the speaker. The change of the output layer ranks the tokens that a
    client said; the control is how often other clients said them. Intervals are 95 %, for the
    difference from the control, over speakers, where there are 10 or more. Where there is nothing
    to attack, a line says why.

    Reads: EXP/round_<number>/update.<job>.* and global.safetensors; EXP's training data, to score
    the recovered data; section inversion of the YAML of --config.

    Writes: OUT/inversion.tsv, inversion_parts.tsv and inversion.png.

    Example in egs/tedlium3/attack1: fedtools attack inversion exp/keywords/fedavg exp/inversion \
        --round 6 --each 10
    """
    from fedtools.attack.recovery.attack import attack as run
    from fedtools.attack.recovery.inverted_round import ONE, REAL, InversionSetup
    from fedtools.attack.recovery.recovered import COLUMNS
    from fedtools.core.config import read_section

    if len(set(defence)) < len(defence):
        raise typer.BadParameter("the same defence twice", param_hint="--defence")
    options = given_by(read_section(Inversion, config, "inversion", set_), each=each)
    both = (ONE, REAL) if steps == "both" else (steps,)
    defences = [one for one in defence if one not in ("", "none")]
    setup = InversionSetup(round_, both, defences, resemblyzer, resamples, seed)
    if estimate:
        from fedtools.attack.recovery.attack import estimate as seconds

        found = seconds(open_experiment(experiment, ngpu), options, setup)
        print(f"about {found / 60:.1f} minutes")
        return
    rows = run(open_experiment(experiment, ngpu), out, options, setup)
    show(COLUMNS, rows, "llllll")
