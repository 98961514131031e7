"""The command that tells attributes of speakers: fedtools attack attributes."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from fedtools.attack.options import PERMUTATIONS
from fedtools.cli.app import command
from fedtools.cli.attack import UNDEFENDED, attack, read_prints, show
from fedtools.cli.report import RESAMPLES


@command("attributes", "Attacks", to=attack)
def attributes(
    folders: list[Path] = typer.Argument(
        ..., metavar="DIR... OUT", help="What attack footprints has written; gets attributes.tsv."
    ),
    models: Path = typer.Option(
        None, metavar="TSV", help="model, speaker, gender, talks: attacks sex."
    ),
    table: list[Path] = typer.Option(
        [], metavar="FILE", help="Any utt2X or spk2X: attacks X; may come several times."
    ),
    bins: str = typer.Option(
        None, metavar="A,B,...", help="Where classes of a table of numbers begin: 20,40 of ages."
    ),
    undefended: list[Path] = UNDEFENDED,
    permutations: int = typer.Option(PERMUTATIONS, min=0, help="Of classes, for chance."),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of everything random."),
) -> None:
    """Tell sex, age, accent, ... of a model's speaker.

    They are told by a classifier of other speakers' footprints, of any number of classes. Accuracy
    is the mean of the classes' (plain: of all models), AUC that of each class against all others.
    Intervals are 95 %, over speakers; permuted is the AUC of permuted classes. Behind a defence
    there are rows of an ignorant attacker, whose classifier learnt from undefended models, and of a
    semi-informed one, whose learnt from defended ones.

    Reads: DIR/footprints.<job>.* and models.<job>.tsv, those of --undefended, too; the TSV of
    --models; each FILE of --table, and utt2spk beside a utt2X.

    Writes: OUT/attributes.tsv.

    Example in egs/tedlium3/attack1: fedtools attack attributes exp/mini/part2/footprints.relu \
        exp/mini/part2/attacks --models data/mini/models.tsv
    """
    from fedtools.attack.attributes import COLUMNS, SEX
    from fedtools.attack.attributes import attack as run
    from fedtools.attack.labels import read_attributes

    if models is None and not table:
        raise typer.BadParameter("neither --models nor --table", param_hint="--table")
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
    """Numbers of --bins."""
    try:
        edges = [float(one) for one in text.split(",")] if text is not None else []
    except ValueError:
        edges = [math.nan]
    if edges != sorted(set(edges)) or not all(map(math.isfinite, edges)):
        raise typer.BadParameter("not numbers in ascending order", param_hint="--bins")
    return edges
