"""The command that predicts attributes of speakers: fedtools attack attributes."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from fedtools.attack.options import PERMUTATIONS
from fedtools.cli.app import command
from fedtools.cli.attack import UNDEFENDED, attack, read_prints, show
from fedtools.cli.score import RESAMPLES


@command("attributes", "Attacks", to=attack)
def attributes(
    folders: list[Path] = typer.Argument(
        ...,
        metavar="DIR... OUT",
        help="Folders written by attack footprints; the folder that gets attributes.tsv.",
    ),
    models: Path = typer.Option(
        None, metavar="TSV", help="Columns model, speaker, gender, talks: attack sex."
    ),
    table: list[Path] = typer.Option(
        [], metavar="FILE", help="Any utt2X or spk2X: attack X; may be given several times."
    ),
    bins: str = typer.Option(
        None, metavar="A,B,...", help="Class boundaries of a numeric table: 20,40 for ages."
    ),
    undefended: list[Path] = UNDEFENDED,
    permutations: int = typer.Option(
        PERMUTATIONS, min=0, help="Permutations of the classes that give the chance level."
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed."),
) -> None:
    """Predict sex, age, accent, ... of a model's speaker.

    A classifier, with any number of classes, is trained on footprints of other speakers' models.
    Accuracy is the mean over classes (plain: over models); AUC is of each class against all others.
    Intervals are 95 %, over speakers; permuted is the AUC with permuted classes. With a defence,
    there are rows for an ignorant attacker, whose classifier is trained on undefended models, and
    for a semi-informed one, whose classifier is trained on defended models.

    Reads: footprints.<job>.* and models.<job>.tsv in each DIR and in the folders of --undefended;
    the TSV of --models; each FILE of --table, and utt2spk next to a utt2X.

    Writes: OUT/attributes.tsv.

    Example in egs/tedlium3/attack1: fedtools attack attributes exp/mini/part2/footprints.relu \
        exp/mini/part2/attacks --models data/mini/models.tsv
    """
    from fedtools.attack.speakers.attributes import COLUMNS, SEX
    from fedtools.attack.speakers.attributes import attack as run
    from fedtools.attack.speakers.labels import read_attributes

    if models is None and not table:
        raise typer.BadParameter("give --models or --table", param_hint="--table")
    edges = _ascending(bins)
    read = read_prints(folders, models, (), undefended)
    known = read.attacked
    found = read_attributes(table, {name: one.speaker for name, one in known.items()}, edges)
    if models is not None:
        found = {SEX: {name: one.gender for name, one in known.items()}, **found}
    people = {name: one.person or one.speaker for name, one in known.items()}
    rows = run(
        read.prints,
        people,
        found,
        read.out,
        undefended=read.undefended,
        permutations=permutations,
        resamples=resamples,
        seed=seed,
    )
    show(COLUMNS, rows, "llll")


def _ascending(text: str | None) -> list[float]:
    """Return the numbers of --bins; raise a usage error if they are not in ascending order."""
    try:
        edges = [float(one) for one in text.split(",")] if text is not None else []
    except ValueError:
        edges = [math.nan]
    if edges != sorted(set(edges)) or not all(map(math.isfinite, edges)):
        raise typer.BadParameter("not numbers in ascending order", param_hint="--bins")
    return edges
