"""Commands about keyword spotting: detection, report-keywords, plot-clients, landscape."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import typer

from fedtools.cli import report
from fedtools.cli.app import app
from fedtools.cli.federation import NGPU, open_experiment


@app.command("detection")
def detection(
    experiments: list[Path] = typer.Argument(metavar="EXP...", help="Of keyword spotting."),
    split: str = typer.Option("test", help="Which data of the experiment: valid, test."),
    ngpu: int = NGPU,
) -> None:
    """False accepts and false rejects (%) after the last round.

    The classes _silence_ and _unknown_ are negative, all others positive. FA: clips of a negative
    class taken for a positive one. FR: clips of a positive class taken for a negative one. Both in
    % of all clips; beside them FA in % of the negative clips and FR in % of the positive ones.
    There is no threshold.
    """
    from fedtools.federation.detection import measure_detection
    from fedtools.files.tables import format_table
    from fedtools.score.detection import COLUMNS, DEFINITION

    rows = {path: measure_detection(open_experiment(path, ngpu), split) for path in experiments}
    cells = [[path, *(row[name] for name in COLUMNS)] for path, row in rows.items()]
    print(format_table(["experiment", *COLUMNS], cells), end="")
    print(f"\n{DEFINITION}")


@app.command("report-keywords")
def report_keywords(
    root: Path = typer.Argument(metavar="ROOT", help="Has <task>/<network>/<method>/seed<k>."),
    results: Path = report.RESULTS,
    section: str = report.SECTION,
    corpus: str = report.CORPUS,
    release: str = report.RELEASE,
    mini: bool = report.MINI,
    published: Path = typer.Option(None, metavar="TSV", help="The paper's figures."),
    figure: list[str] = typer.Option([], help="CAPTION=PNG: another picture beside RESULTS."),
    command: str = report.COMMAND,
    config: str = typer.Option("", help="Name of the configuration, for captions: full.yaml."),
    date: datetime = report.DATE,
) -> None:
    """Write tables and pictures of all experiments into a section of RESULTS.md."""
    from fedtools.files.errors import UserError
    from fedtools.report.keywords import KeywordPage, write_keyword_report

    facts = report.page_facts(section, corpus, release, mini, command, date)
    figures = [report.pair(text, "--figure", "CAPTION=PNG") for text in figure]
    for _, name in figures:
        if Path(name).resolve().parent != results.resolve().parent:
            raise typer.BadParameter(f"--figure {name}: name a file in the folder of {results}")
        if not Path(name).is_file():
            raise UserError("missing", path=name, remedy="draw the picture first")
    page = KeywordPage(
        **facts,
        paper=published,
        figures=[(caption, Path(name).name) for caption, name in figures],
        config=config,
    )
    print(write_keyword_report(root, results, page), end="")


@app.command("plot-clients")
def plot_clients(
    folder: Path = typer.Argument(metavar="CLIPS", help="Folder made by fedtools pack-clips."),
    picture: Path = typer.Argument(metavar="PNG", help="The picture to draw."),
    clients: int = typer.Option(20, min=1, help="How many clients are shown label by label."),
    seed: int = typer.Option(0, min=0, help="Decides which."),
    config: Path = typer.Option(None, help="YAML with FedKWS-UI's method_conf and training."),
    section: list[str] = typer.Option([], help="A section of the YAML laid over its top level."),
) -> None:
    """Draw clients' labels, and their sizes and entropies, coloured by their steps in FedKWS-UI."""
    from fedtools.report.keyword_clients import draw_clients

    options = _options(picture, config, section)
    draw_clients(folder, picture, clients, seed, options, config or "")


@app.command("landscape")
def landscape(
    experiment: Path = typer.Argument(metavar="EXP", help="Its last model is theta_0."),
    picture: Path = typer.Argument(metavar="PNG", help="The picture; a .tsv is put beside it."),
    epochs: int = typer.Option(20, min=1, help="Of each of the two clients."),
    points: int = typer.Option(13, min=2, help="Of the grid, in each direction."),
    clips: int = typer.Option(500, min=1, help="Measure accuracy on so many clips at most."),
    min_clips: int = typer.Option(10, min=1, help="Choose from clients with so many clips."),
    split: str = typer.Option("test", help="Which data of the experiment: valid, test."),
    config: Path = typer.Option(None, help="YAML with ALO's method_conf; default: the paper's."),
    section: list[str] = typer.Option([], help="A section of the YAML laid over its top level."),
    ngpu: int = NGPU,
) -> None:
    """Draw the accuracy between a model and what two clients' clips make of it.

    theta_1 and theta_2 are theta_0 after training on the clips of the client of lowest and of
    highest utility (the paper's have 100 and about 250 clips); in the second panel ALO trains
    theta_1. BatchNorm's statistics are interpolated as parameters are.
    """
    from fedtools.federation.landscape import LandscapeConfig
    from fedtools.files.config import from_mapping
    from fedtools.methods.fedkws_ui import Alo
    from fedtools.report.keyword_landscape import draw_landscape

    options = _options(picture, config, section)
    alo = from_mapping(Alo, options.get("method_conf"), config or "")
    chosen = LandscapeConfig(epochs, points, clips, min_clips, split, alo)
    print(draw_landscape(open_experiment(experiment, ngpu), picture, chosen), end="")


def _options(picture: Path, config: Path | None, sections: list[str]) -> dict:
    """What a YAML has with sections laid over it; options that make no sense are wrong usage."""
    from fedtools.federation.init import read_config

    if picture.suffix != ".png":
        raise typer.BadParameter(f"{picture}: name a .png")
    if sections and config is None:
        raise typer.BadParameter(f"--section {sections[0]}: give the --config that has it")
    return read_config(config, sections, []) if config else {}
