"""The command that verifies speakers by the training speech: fedtools attack speech."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.attack import attack, show
from fedtools.cli.score import RESAMPLES


@command("speech", "Attacks", to=attack)
def speech(
    folders: list[Path] = typer.Argument(
        ...,
        metavar="DATA... OUT",
        help="Data directories of the models' clients; the folder that gets speech.tsv.",
    ),
    trials: list[Path] = typer.Option(
        ..., metavar="LIST", help="Trials of another attack; may be given several times."
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed of the bootstrap."),
) -> None:
    """Score trials of models by the speech they learnt from.

    This is the reference for attacks on models: the same trials, scored by the cosine of embeddings
    of the clients' audio. Resemblyzer computes the embeddings; `utils/resemblyzer.sh` installs it.
    Intervals are 95 %.

    Reads: DATA/utt2client, utt2spk, wav.scp and segments; the lists of --trials.

    Writes: OUT/speech.tsv; embeddings in speech.ark and .scp; next to them a score for each trial,
    and DET curves.

    Example in egs/tedlium3/attack1: fedtools attack speech data/mini/part2 exp/mini/speech \
        --trials exp/mini/a1.relu.part2/trials.easy
    """
    from fedtools.attack.speakers.speech import attack as run
    from fedtools.attack.speakers.verify import COLUMNS

    if len(folders) < 2:
        raise typer.BadParameter("at least one DATA and OUT", param_hint="DATA... OUT")
    *folders, out = folders
    show(COLUMNS, run(folders, trials, out, resamples=resamples, seed=seed), "llllll")
