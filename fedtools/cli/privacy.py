"""Commands that add up privacy losses, and that publish what is private."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtools.cli.app import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TARGET = "--target-epsilon"


@command("privacy", "Privacy")
def privacy(
    experiments: list[Path] = typer.Argument(
        None, metavar="[EXP]...", help="Experiments' folders."
    ),
    target_epsilon: float = typer.Option(
        None, _TARGET, help="Instead: print the noise that a federation of models needs for this."
    ),
    delta: float = typer.Option(1e-5, help=f"With {_TARGET}: delta."),
    rounds: int = typer.Option(None, min=1, help=f"With {_TARGET}: the number of rounds."),
    share: float = typer.Option(
        1.0, help=f"With {_TARGET}: the share of clients in a round, a secret Poisson sample."
    ),
) -> None:
    """Sum up the epsilon that releases have spent.

    For FMP the table has the epsilon of a word, an utterance and a user, by release and in total.
    These figures depend on the clients' data: show them only to those who run the experiment. For
    models with user-level privacy it has what a client with all of its data has lost, after each
    release: to all who see what is released, and to who also sees which clients took part.

    Given several experiments, such as seeds on the same clients, the command also prints the sum
    for all of them.

    Reads: EXP/config.yaml, privacy.yaml and the record of the releases, of each EXP.

    Writes: EXP/dp.tsv, of each EXP.

    Example in egs/ami/rescore1: fedtools privacy exp/mini/fmp-laplace-utterance-8/seed0
    """
    if target_epsilon is not None:
        _print_noise(experiments, target_epsilon, delta, rounds, share)
        return
    if (delta, rounds, share) != (1e-5, None, 1.0):
        raise typer.BadParameter(f"goes with {_TARGET}", param_hint="--delta, --rounds, --share")
    if not experiments:
        raise typer.BadParameter(f"give experiments, or {_TARGET}", param_hint="EXP")
    from fedtools.privacy.user_plan import FILE

    # Another kind among them is an error that names it.
    if any((path / FILE).exists() for path in experiments):
        _print_models(experiments)
    else:
        _print_counts(experiments)


def _print_noise(
    experiments: Sequence[Path] | None,
    epsilon: float,
    delta: float,
    rounds: int | None,
    share: float,
) -> None:
    from fedtools.privacy.accountant import LEAST_DELTA, noise_for
    from fedtools.privacy.options import UserPrivacy

    if experiments:
        raise typer.BadParameter("goes without EXP", param_hint=_TARGET)
    if rounds is None:
        raise typer.BadParameter(f"is needed with {_TARGET}", param_hint="--rounds")
    try:
        UserPrivacy(epsilon=epsilon, delta=delta)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=_TARGET) from None
    if not 0 < share <= 1:
        raise typer.BadParameter("is from above 0 to 1", param_hint="--share")
    if share < 1 and delta < LEAST_DELTA:
        raise typer.BadParameter(f"is at least {LEAST_DELTA:g} with --share", param_hint="--delta")
    print(f"{noise_for(epsilon, delta, rounds, share):.6g}")


def _print_counts(experiments: Sequence[Path]) -> None:
    from fedtools.federation.fmp.spending import write_spending
    from fedtools.privacy.ledger import COLUMNS, LEVELS

    found = write_spending(experiments)
    if len(experiments) == 1:
        _print_one(COLUMNS, found.rows[0], "rlllrrrrlrrrr")
        return
    together = [f"{value:.6g}" for value in found.total]
    shown = ("mechanism", "unit", "trust", "composition")
    _print_several(experiments, found.rows, shown, LEVELS, together)


def _print_models(experiments: Sequence[Path]) -> None:
    from fedtools.federation.user_spending import write_user_spending
    from fedtools.privacy.user_ledger import COLUMNS

    found = write_user_spending(experiments)
    if len(experiments) == 1:
        _print_one(COLUMNS, found.rows[0], "rllrlrrrrrrrl")
        return
    together = [f"{found.delta:.6g}", f"{found.spent:.6g}", f"{found.inside:.6g}"]
    shown, levels = ("unit", "taking_part", "noise"), ("delta", "spent", "spent_inside")
    _print_several(experiments, found.rows, shown, levels, together)


def _print_one(columns: Sequence[str], rows: Sequence[Mapping[str, str]], sides: str) -> None:
    from fedtools.core.tables import format_table

    cells = [[row[name] for name in columns] for row in rows]
    print(format_table(list(columns), cells, sides), end="")


def _print_several(
    experiments: Sequence[Path],
    rows: Sequence[Sequence[Mapping[str, str]]],
    shown: Sequence[str],
    summed: Sequence[str],
    together: Sequence[str],
) -> None:
    """Print a row for each experiment, and what all of them have spent together."""
    from fedtools.core.tables import format_table

    columns = (*shown, *summed)
    cells = [
        [str(path), str(len(of) - 1), *(of[-1][name] for name in columns)]
        for path, of in zip(experiments, rows, strict=True)
    ]
    cells.append(["together", *[""] * (1 + len(shown)), *together])
    sides = "lr" + "l" * len(shown) + "r" * len(summed)
    print(format_table(["experiment", "releases", *columns], cells, sides), end="")


@command("publish", "Privacy")
def publish(
    experiment: Path = typer.Argument(..., metavar="EXP", help="The experiment's folder."),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
) -> None:
    """Write what may leave a federation with user-level privacy.

    That are the states that the server has sent, the model that they make, the options without
    paths, and a statement of what is protected, from whom, and by how much. Everything else in
    EXP, such as the clients' updates and the losses in its ledger, is private.

    Reads: EXP/config.yaml, privacy.yaml, init.safetensors, round_<number>/global.safetensors, the
    labels or tokens of the model, and the record of the releases.

    Writes: OUT/README.md (the statement), config.yaml, privacy.yaml, model.safetensors,
    round_<number>.safetensors, and the labels or tokens; sha256sums.

    Example in egs/speechcommands/kws1: fedtools publish exp/first/words/head/dpfedavg/seed0 \
        published
    """
    from fedtools.federation.publish import publish as write

    for path in write(experiment, out):
        print(path)
