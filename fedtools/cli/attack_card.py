"""The commands that put attacks side by side: fedtools attack card, fedtools attack compare."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.attack import attack, show
from fedtools.cli.federation import EXPERIMENT
from fedtools.cli.report import RESAMPLES, pair


@command("card", "Attacks", to=attack)
def card(
    experiment: Path = EXPERIMENT,
    results: Path = typer.Option(
        None, metavar="DIR", help="Where attacks have left their tables; default: EXP/attacks."
    ),
    page: Path = typer.Option(
        None, metavar="RESULTS.md", help="A page that gets the card, as a section of its own."
    ),
) -> None:
    """Put all attacks on an experiment on one card.

    Each attack, what its attacker knows of a defence, and what is left of it behind each defence,
    with 95 % intervals; below that, what the defences cost. Of several layers and scores a row is
    of the one that tells most without a defence.

    Reads: the tables of attacks in EXP/attacks, or the folder of --results, and in their folders:
    weights.tsv, a1.tsv, a2.h<layer>.tsv, attributes.tsv, membership.tsv, inversion.tsv, attacks.tsv
    and utility.tsv; the page of --page.

    Writes: card.tsv, card.md and card.png in the folder of --results; the page of --page, and the
    picture beside it.

    Example in egs/tedlium3/attack1: fedtools attack card exp/mini/part2
    """
    from fedtools.report.card import read_card
    from fedtools.report.card_page import put_on_page, write_card

    folder = results or experiment / "attacks"
    found = read_card(folder)
    text = write_card(folder, found, str(experiment))
    print(text, end="")
    if page:
        put_on_page(page, folder, experiment, text)


@command("compare", "Attacks", to=attack)
def compare(
    out: Path = typer.Argument(..., metavar="TABLE", help="A TSV to be written."),
    scores: list[str] = typer.Argument(
        ...,
        metavar="NAME=SCORES...",
        help="The first is what others are compared with. Those of one name are seeds.",
    ),
    resamples: int = RESAMPLES,
    seed: int = typer.Option(0, min=0, help="Of the draws."),
) -> None:
    """Compare equal error rates on the same speakers.

    Each attack's rate, the mean over seeds, and its difference to the first one's in percentage
    points, with 95 % intervals over speakers, who are drawn once for all. Attacks may be of other
    trials, layers, defences, or models of the same people.

    Reads: each SCORES, as attacks a1, a2 and weights write it for a kind of trials, such as
    weights.together.other; trials.<kind> and model2speaker beside it.

    Writes: TABLE.

    Example in egs/tedlium3/attack1: fedtools attack compare exp/mini/compare.tsv \
        recording=exp/mini/part2/attacks/defence0/weights.together.same \
        speaker=exp/mini/part2/attacks/defence0/weights.together.other
    """
    from fedtools.attack.compare import COLUMNS
    from fedtools.attack.compare import compare as run

    form = "NAME=SCORES"
    named = [(n, Path(path)) for n, path in (pair(text, "TABLE", form) for text in scores)]
    show(COLUMNS, run(named, out, resamples=resamples, seed=seed), "l")
