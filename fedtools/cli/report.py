"""Commands that write pages and show experiments."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtools.cli.app import command, pair

if TYPE_CHECKING:
    from fedtools.report.page import Row
    from fedtools.report.summary import Summary

RESULTS = typer.Argument(
    metavar="RESULTS", help="RESULTS.md; its other sections are left unchanged."
)
SECTION = typer.Option(None, help="Name of the section to write, e.g. mini.")
CORPUS = typer.Option(None, help="Name of the corpus.")
RELEASE = typer.Option(None, help="Release of the corpus.")
MINI = typer.Option(False, "--mini", help="The corpus is a mini corpus; every caption says so.")
COMMAND = typer.Option(None, help="Command that made the figures; default: this one.")
_ROW = "[NAME=]EXP_DIR:SCORE_DIR"
_EXPERIMENT = "[NAME=]EXP_DIR"
DATE = typer.Option(None, formats=["%Y-%m-%d"], help="Date of the report; default: today.")


@command("report", "Reports")
def report_command(
    results: Path = RESULTS,
    section: str | None = SECTION,
    corpus: str | None = CORPUS,
    release: str | None = RELEASE,
    row: list[str] = typer.Option(
        [],
        help="[NAME=]EXP_DIR:SCORE_DIR, named after its method by default; EXP_DIR may be empty. "
        "Of keyword spotting, [NAME=]EXP_DIR. Rows with the same name are seeds of one method; {} "
        "in NAME is the method's title.",
    ),
    mini: bool = MINI,
    note: str = typer.Option("", help="Text to print with the main table."),
    plot: Path | None = typer.Option(
        None, help="Draw WER by round into this PNG, in the folder of RESULTS."
    ),
    elsewhere: list[str] = typer.Option(
        [], help="CAPTION=SCORE_DIR: a line about scores on other data."
    ),
    also: list[str] = typer.Option(
        [], help="CAPTION=[NAME=]EXP_DIR:SCORE_DIR: a row of a further table with this caption."
    ),
    reference: list[str] = typer.Option(
        [], help="Name of a row; tables get a column with the differences from it."
    ),
    table: list[str] = typer.Option(
        [], help="CAPTION=TABLE.tsv: a separate table of figures that were measured here."
    ),
    picture: list[str] = typer.Option([], help="CAPTION=PNG: a picture in the folder of RESULTS."),
    published: list[str] = typer.Option(
        [], help="CAPTION=TABLE.tsv: a separate table of published figures."
    ),
    made_from: Path | None = typer.Option(
        None,
        "--from",
        help="Make a section again from its RESULTS-SECTION-errors.gz, without experiments and "
        "options but --date, which one of keyword spotting has already.",
    ),
    command: str = COMMAND,
    date: datetime = DATE,
) -> None:
    """Write tables and a plot into a section of RESULTS.md.

    The tables show cost and error rates, the first in five columns, which are also printed; the
    plot shows WER by round. Of keyword spotting there is the first table, with accuracies on the
    test clips, as fedtools clip-scores counts errors.

    Reads: EXP_DIR/config.yaml, round_<number>/ledger.tsv, evaluate_valid.tsv; SCORE_DIR/wer.tsv,
    utterances.tsv and weights.yaml; of keyword spotting EXP_DIR/errors_test.tsv, speakers_test.tsv,
    evaluate_test.tsv if any, and the clips; the tables and pictures that options name.

    Writes: RESULTS; next to it, RESULTS-SECTION-errors.gz, with what the tables are made of, for
    --from, and, except of keyword spotting, RESULTS-SECTION-intervals.tsv, with the intervals of
    all rates; the PNG of --plot.

    Example in egs/commonvoice/asr1: fedtools report exp/mini/RESULTS.md --section mini --mini \
        --corpus 'Common Voice' --release cv-corpus-mini --row \
        exp/mini/fedavg/seed0:exp/mini/fedavg/seed0/decode_test
    """
    from fedtools.report.intervals import record_file
    from fedtools.report.options import own_command, page_facts
    from fedtools.report.page import Page, Row, read_contents, write_report
    from fedtools.report.record import write_record
    from fedtools.report.summary import on_terminal

    if made_from is not None:
        given = (section, corpus, release, row, mini, note, plot, elsewhere, also, reference, table)
        if any((*given, picture, published, command)):
            raise typer.BadParameter("--from has the whole section: give no option but --date")
        caption, summary = _remake(made_from, results, date)
        print(on_terminal(caption, summary, sys.stdout), end="")
        return
    if not (section and corpus and release and row):
        raise typer.BadParameter("give --section, --corpus, --release and --row, or --from")
    command = command or own_command("fedtools")
    try:
        facts = page_facts(section, corpus, release, mini, command, date.date() if date else None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if plot is not None and (plot.suffix != ".png" or _folder(plot) != _folder(results)):
        raise typer.BadParameter(f"--plot {plot}: name a .png in the folder of {results}")
    further: dict[str, list[Row]] = {}
    for text in also:
        caption, rest = pair(text, "--also", f"CAPTION={_ROW}")
        further.setdefault(caption, []).append(_row(rest, "--also"))
    pictures = [pair(text, "--picture", "CAPTION=PNG") for text in picture]
    for _, name in pictures:
        if _folder(Path(name)) != _folder(results):
            raise typer.BadParameter(f"--picture {name}: it must be in the folder of {results}")
    measured = [pair(text, "--table", "CAPTION=TABLE.tsv") for text in table]
    others = [pair(text, "--elsewhere", "CAPTION=SCORE_DIR") for text in elsewhere]
    tables = [pair(text, "--published", "CAPTION=TABLE.tsv") for text in published]
    page = Page(
        **facts,
        note=note,
        plot=plot,
        elsewhere=[Row(name, None, Path(scores)) for name, scores in others],
        tables=list(further.items()),
        references=reference,
        pictures=[(caption, Path(name)) for caption, name in pictures],
        measured=[(caption, Path(name)) for caption, name in measured],
        published=[(caption, Path(name)) for caption, name in tables],
    )
    if experiments := _experiments(row):
        if plot or elsewhere or also or reference:
            unfit = "they have no --plot, --elsewhere, --also or --reference"
            raise typer.BadParameter(f"--row without :SCORE_DIR is of keyword spotting: {unfit}")
        from fedtools.report.keywords import write_accuracies

        summary = write_accuracies(results, experiments, page)
    else:
        contents = read_contents([_row(text, "--row") for text in row], page)
        summary = write_report(results, contents, page)
        write_record(record_file(results, section), contents, page)
    print(on_terminal(page.corpus.caption, summary, sys.stdout), end="")


def _remake(record: Path, results: Path, date: datetime | None) -> tuple[str, Summary]:
    """Write the section of a record again; return the name of its corpus, and its summary."""
    from fedtools.report import keywords
    from fedtools.report.accuracies import FORMAT
    from fedtools.report.page import write_report
    from fedtools.report.record import format_of, read_record

    if format_of(record) == FORMAT:
        if date:
            raise typer.BadParameter(f"{record} has its own date", param_hint="--date")
        return keywords.remake(record, results)
    contents, page = read_record(record, results)
    page = replace(page, date=date.date() if date else None)
    return page.corpus.caption, write_report(results, contents, page)


def _experiments(rows: list[str]) -> list[tuple[str, Path]]:
    """Parse rows of experiments without a folder of scores; return [] if all have one."""
    forms = f"{_ROW}, or {_EXPERIMENT} of keyword spotting"
    split = [pair(text, "--row", forms) if "=" in text else ("", text) for text in rows]
    if not all(path for _, path in split):
        raise typer.BadParameter(f"--row: write {forms}")
    plain = [(name, Path(path)) for name, path in split if ":" not in path]
    if plain and len(plain) < len(rows):
        raise typer.BadParameter(f"--row: write {_ROW} in all, or {_EXPERIMENT} in all")
    return plain


def _row(text: str, option: str) -> Row:
    """Parse a row of a table from the value of an option."""
    from fedtools.report.page import Row

    name, paths = pair(text, option, _ROW) if "=" in text else ("", text)
    experiment, colon, scores = paths.rpartition(":")
    if not colon or not scores or not (name or experiment):
        raise typer.BadParameter(f"{option} {text!r}: write {_ROW}")
    return Row(name, Path(experiment) if experiment else None, Path(scores))


@command("show", "Reports")
def show_command(
    experiment: Path = typer.Argument(metavar="EXP", help="The experiment's folder."),
    clients: bool = typer.Option(
        False, "--clients", help="Show the messages of one round, and its server last."
    ),
    round_: int = typer.Option(
        None, "--round", min=1, help="The round of --clients; default: the last complete one."
    ),
) -> None:
    """Show what a federation has cost so far, by client.

    The table has bytes, epochs, seconds, refused messages and collapsed labels. With --clients it
    has each client's loss, the norm of its update and its share in the mean, in one round.

    Reads: EXP/config.yaml and round_<number>/ledger.tsv; with --clients also update.<job>.* and
    global.safetensors.

    Writes: nothing.

    Example in egs/commonvoice/asr1: fedtools show exp/mini/fedavg/seed0
    """
    from fedtools.exchange.experiment import Experiment
    from fedtools.report.clients import clients_table
    from fedtools.report.results import cost_table

    if round_ and not clients:
        raise typer.BadParameter("needs --clients", param_hint="--round")
    if clients:
        print(clients_table(Experiment(experiment), round_), end="")
        return
    print(cost_table(Experiment(experiment)), end="")


def _folder(path: Path) -> Path:
    # For a loop of links, Path.resolve raises RuntimeError, which is no OSError.
    return Path(os.path.realpath(path)).parent
