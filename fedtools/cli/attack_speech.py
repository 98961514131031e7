"""The command that asks the speech itself: fedtools attack speech."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.attack import attack, show
from fedtools.cli.report import RESAMPLES


@command("speech", "Attacks", to=attack)
def speech(
    folders: list[Path] = typer.Argument(
        ..., metavar="DATA... OUT", help="Whose clients the models are of; gets speech.tsv."
    ),
    trials: list[Path] = typer.Option(
        ..., metavar="LIST", help="Trials of another attack; may come several times."
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of intervals."),
) -> None:
    """Decide trials of models by the speech they learnt from.

    It is what an attack on models is measured by: the same trials, by the cosine of embeddings of
    the clients' audio. They are made by Resemblyzer, which `utils/resemblyzer.sh` installs.
    Intervals are 95 %.

    Reads: DATA/utt2client, utt2spk, wav.scp and segments; the lists of --trials.

    Writes: OUT/speech.tsv; embeddings in speech.ark and .scp; a score for each trial, and DET
    curves, beside it.

    Example in egs/tedlium3/attack1: fedtools attack speech data/mini/part2 exp/mini/speech \
        --trials exp/mini/a1.relu.part2/trials.easy
    """
    from fedtools.attack.speech import attack as run
    from fedtools.attack.verify import COLUMNS

    if len(folders) < 2:
        raise typer.BadParameter("at least one DATA and OUT", param_hint="DATA... OUT")
    *folders, out = folders
    show(COLUMNS, run(folders, trials, out, resamples=resamples, seed=seed), "llllll")
