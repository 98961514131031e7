"""The command that adds up privacy losses."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import command


@command("privacy", "Privacy")
def privacy(
    experiments: list[Path] = typer.Argument(..., metavar="EXP...", help="Experiments' folders."),
) -> None:
    """Sum up the epsilon that FMP's releases have spent.

    The table has the epsilon of a word, an utterance and a user, by release and in total. Given
    several experiments, such as seeds on the same data, the command also prints the sum for all of
    them. The figures depend on the clients' data: show them only to those who run the experiment.

    Reads: EXP/config.yaml and the record of the releases, of each EXP.

    Writes: EXP/dp.tsv, of each EXP.

    Example in egs/ami/rescore1: fedtools privacy exp/mini/fmp-laplace-utterance-8/seed0
    """
    from fedtools.core.tables import format_table
    from fedtools.federation.fmp.spending import write_spending
    from fedtools.privacy.ledger import COLUMNS, LEVELS

    found = write_spending(experiments)
    if len(experiments) == 1:
        cells = [[row[name] for name in COLUMNS] for row in found.rows[0]]
        print(format_table(list(COLUMNS), cells, "rlllrrrrlrrrr"[: len(COLUMNS)]), end="")
        return
    shown = ("mechanism", "unit", "trust", "composition", *LEVELS)
    cells = [
        [path, len(rows) - 1, *(rows[-1][name] for name in shown)]
        for path, rows in zip(experiments, found.rows, strict=True)
    ]
    cells.append(["together", *("",) * 5, *(f"{value:.6g}" for value in found.total)])
    print(format_table(["experiment", "releases", *shown], cells, "lrllllrrr"), end="")
