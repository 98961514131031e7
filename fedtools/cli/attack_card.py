"""The command that puts all attacks on an experiment side by side: fedtools attack card."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command
from fedtools.cli.attack import attack
from fedtools.cli.federation import EXPERIMENT


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

    Example in egs/tedlium3/attack1: fedtools attack card exp/mini/part2 --results exp/mini/updates
    """
    from fedtools.report.card import read_card
    from fedtools.report.card_page import put_on_page, write_card

    folder = results or experiment / "attacks"
    found = read_card(folder)
    text = write_card(folder, found, str(experiment))
    print(text, end="")
    if page:
        put_on_page(page, folder, experiment, text)
