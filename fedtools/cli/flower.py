"""Commands of a federation over Flower: fedtools flower ..."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtools.cli.app import app, command, make_group
from fedtools.cli.federation import EXPERIMENT

flower = make_group("Run a federation between sites over Flower.")
app.add_typer(flower, name="flower")


@command("app", "Federation", to=flower)
def flower_app(
    experiment: Path = EXPERIMENT,
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write."),
) -> None:
    """Write a Flower App that runs the rounds between sites.

    flwr run OUT runs it on any SuperLink of Flower 1.42; other versions were not tried. At the
    server it calls fedtools sample, site and aggregate, and at each site fedtools site-round:
    utils/flower.sh starts both. A killed run is continued by the same flwr run.

    Reads: EXP, which was begun with --sites.

    Writes: OUT/pyproject.toml and OUT/fedtools_flower/, without any path of this machine.

    Example in egs/speechcommands/kws1: fedtools flower app \
        exp/mini/keywords/dscnn/fedavg/seed0 app
    """
    from fedtools.federation.flower import write_app

    write_app(experiment, out)
    print(out)
