"""The commands that compare attacks: fedtools attack card, fedtools attack compare."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command, pair
from fedtools.cli.attack import attack, show
from fedtools.cli.federation import EXPERIMENT
from fedtools.cli.score import RESAMPLES


@command("card", "Attacks", to=attack)
def card(
    experiment: Path = EXPERIMENT,
    results: Path = typer.Option(
        None, metavar="DIR", help="Folder with the tables of attacks; default: EXP/attacks."
    ),
    page: Path = typer.Option(
        None, metavar="RESULTS.md", help="A page to which the card is added, as a section."
    ),
) -> None:
    """Summarise all attacks on an experiment on one card.

    The card shows each attack, what its attacker knows of the defences, and how well it does
    against each defence, with 95 % intervals; below that, what the defences cost. Each cell is of
    the layer and scores that reveal most behind that defence, and says of how many it is the best;
    the row `strongest` is the maximum over attackers.

    Reads: the tables of attacks in EXP/attacks, or in the folder of --results, and in their
    subfolders: weights.tsv, a1.tsv, a2.h<layer>.tsv, attributes.tsv, membership.tsv, inversion.tsv,
    attacks.tsv and utility.tsv; the page of --page.

    Writes: card.tsv, card.md and card.png in the folder of --results; the page of --page, and the
    picture next to it.

    Example in egs/tedlium3/attack1: fedtools attack card exp/mini/part2
    """
    from fedtools.report.card import put_on_page, read_card, write_card

    folder = results or experiment / "attacks"
    found = read_card(folder)
    text = write_card(folder, found, str(experiment))
    print(text, end="")
    if page:
        put_on_page(page, folder, experiment, text)


@command("compare", "Attacks", to=attack)
def compare(
    out: Path = typer.Argument(..., metavar="TABLE", help="The TSV to write."),
    scores: list[str] = typer.Argument(
        ...,
        metavar="NAME=SCORES...",
        help="Score files; the first is the baseline. Files with the same name are seeds.",
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Random seed of the bootstrap."),
) -> None:
    """Compare equal error rates on the same speakers.

    The table has each attack's rate, a mean over seeds, and its difference from the first attack's
    in percentage points, with 95 % intervals over speakers, and over seeds where there are several;
    all attacks share the same draws of speakers, and are paired by seed. Attacks may differ in
    trials, layers, defences, or models of the same people.

    Reads: each SCORES, as attacks a1, a2 and weights write it for one kind of trials, such as
    weights.together.other; trials.<kind> and model2speaker next to it.

    Writes: TABLE.

    Example in egs/tedlium3/attack1: fedtools attack compare exp/mini/compare.tsv \
        recording=exp/mini/part2/attacks/defence0/weights.together.same \
        speaker=exp/mini/part2/attacks/defence0/weights.together.other
    """
    from fedtools.attack.speakers.compare import COLUMNS
    from fedtools.attack.speakers.compare import compare as run

    form = "NAME=SCORES"
    named = [(n, Path(path)) for n, path in (pair(text, "TABLE", form) for text in scores)]
    show(COLUMNS, run(named, out, resamples=resamples, seed=seed), "l")
