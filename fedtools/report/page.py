"""`fedtools report`: one section of RESULTS.md, the others left as they are."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.provenance import git_hash, records
from fedtools.core.tables import format_markdown, read_tsv, with_deviation
from fedtools.core.text_files import read_text
from fedtools.report.differences import Compared, usable
from fedtools.report.intervals import (
    heading,
    interval_file,
    interval_table,
    record_file,
    with_interval,
    write_intervals,
)
from fedtools.report.results import (
    DONE,
    Method,
    check_comparable,
    collapse_note,
    done_cells,
    epochs_text,
    group,
    read_run,
    server_text,
    size_text,
)
from fedtools.report.summary import Summary, note, summarise
from fedtools.score.bootstrap import AVERAGE, MIN_SPEAKERS

# Names of validation data.
_VALIDATION = re.compile(r"(^|[^a-z])(valid(ation)?|val|dev)([^a-z]|$)", re.IGNORECASE)
# The lines of a table, the first its header.
Cells = list[list[str]]
# Captions of tables, and their lines.
Tables = Sequence[tuple[str, Cells]]


@dataclass(frozen=True)
class Row:
    """A method in the tables with one seed: its name, its experiment if any, its scores."""

    name: str
    experiment: Path | None
    scores: Path


@dataclass(frozen=True)
class Corpus:
    """The corpus that was measured on; captions mark a mini corpus."""

    name: str
    release: str
    mini: bool

    @property
    def caption(self) -> str:
        """Return the corpus' name in captions."""
        return f"{self.name} {self.release}" + (" (mini)" if self.mini else "")


@dataclass(frozen=True)
class Page:
    """The content of a section of RESULTS.md in addition to the figures.

    Attributes:
        section: the name between the markers; the section of this name is replaced.
        corpus: the corpus that was measured on.
        command: the command that reproduces the figures.
        note: sentences for the main table's caption.
        date: of the report; None for today.
        plot: the PNG of WER by round, next to the page, if any.
        elsewhere: scores on other data; those of the same name are reported in one line.
        tables: captions of further tables, and their rows.
        references: names of rows of the main table that all tables show differences to.
        pictures: captions of pictures next to the page, and their files.
        measured: captions and tab-separated files of other figures that were measured here.
        published: captions and tab-separated files of published figures.
    """

    section: str
    corpus: Corpus
    command: str
    note: str = ""
    date: datetime.date | None = None
    plot: Path | None = None
    elsewhere: Sequence[Row] = ()
    tables: Sequence[tuple[str, Sequence[Row]]] = ()
    references: Sequence[str] = ()
    pictures: Sequence[tuple[str, Path]] = ()
    measured: Sequence[tuple[str, Path]] = ()
    published: Sequence[tuple[str, Path]] = ()


@dataclass(frozen=True)
class Contents:
    """What the tables of a section are made of.

    Attributes:
        methods: the rows of the first tables.
        further: captions of further tables, and their rows.
        elsewhere: scores on other data.
        measured, published: captions of other tables, and their lines, the first their header.
        begun: the software with which the experiments began.
    """

    methods: Sequence[Method]
    further: Sequence[tuple[str, Sequence[Method]]]
    elsewhere: Sequence[Method]
    measured: Tables
    published: Tables
    begun: str


def read_contents(rows: Sequence[Row], page: Page) -> Contents:
    """Read what a section's tables are made of.

    Args:
        rows: the methods, in the order of the tables; those of one name become one row, the mean
            over their seeds.
        page: the rest of the section.

    Raises:
        UserError: if an input is missing or malformed, or the methods were scored on different data
            or have other seeds.
    """
    methods = _read(rows)
    if page.plot is not None and not any(method.curve for method in methods):
        raise UserError(
            "no evaluate_valid.tsv in any experiment, so nothing to plot",
            path=next((row.experiment for row in rows if row.experiment), None),
            remedy="run fedtools evaluate, or leave --plot out",
        )
    return Contents(
        methods,
        [(caption, _read(own)) for caption, own in page.tables],
        read_each(page.elsewhere),
        *read_tables(page),
        records([row.experiment for row in rows if row.experiment]),
    )


def write_report(path: str | Path, contents: Contents, page: Page) -> Summary:
    """Write a section of RESULTS.md: the provenance of the figures, the tables, the plot.

    Args:
        path: the page; made if it is missing. Text outside the section stays.
        contents: what the tables are made of.
        page: the rest of the section.

    Returns:
        The summary, which is the section's first table.

    Raises:
        UserError: if a picture is missing, or the page's markers are damaged.
    """
    path, methods = Path(path), contents.methods
    check_pictures(page)
    compared = Compared.of(methods, _references(methods, page.references))
    summary = summarise(methods)
    section = _section(path, contents, compared, summary, page)
    new = with_section(path, page.section, section)
    if page.plot is not None:
        # Imported late: matplotlib is not needed without a plot.
        from fedtools.report.plots import plot_wer

        plot_wer(page.plot, methods, page.corpus.caption)
    write_intervals(interval_file(path, page.section), [("main", methods), *contents.further])
    write_text(path, new)
    return summary


def check_pictures(page: Page) -> None:
    """Raise a `UserError` unless the pictures of a page are there."""
    for _, picture in page.pictures:
        if not picture.is_file():
            raise UserError("picture is missing", path=picture, remedy="draw it, or leave it out")


def read_tables(page: Page) -> tuple[Tables, Tables]:
    """Read the tables of figures that were measured here, and those of published ones."""
    measured, published = (
        [(caption, _table_of(file)) for caption, file in files]
        for files in (page.measured, page.published)
    )
    return measured, published


def further(page: Page, measured: Tables, published: Tables) -> list[str]:
    """Return what is last in a section: other tables, pictures, and published tables."""
    caption, parts = page.corpus.caption, []
    for title, (header, *lines) in measured:
        parts += [f"**{caption}: {title}**", format_markdown(header, lines)]
    for title, picture in page.pictures:
        parts += [f"**{caption}: {title}**", image(f"{title}, {caption}", picture.name)]
    for title, (header, *lines) in published:
        parts += [f"**Published, not measured here: {title}**", format_markdown(header, lines)]
    return parts


def _references(methods: Sequence[Method], names: Sequence[str]) -> list[Method]:
    known = {method.name: method for method in methods}
    if missing := [name for name in names if name not in known]:
        remedy = f"there are {', '.join(known)}"
        raise UserError(f"no row {missing[0]!r} to show differences to", remedy=remedy)
    return [known[name] for name in names]


def _read(rows: Sequence[Row]) -> list[Method]:
    runs = [read_run(row.name, row.experiment, row.scores) for row in rows]
    check_comparable(runs)
    return group(runs)


def with_section(path: Path, name: str, section: str) -> str:
    """Return the new content of a page, which may not exist yet; see `replace_section`."""
    old = read_text(path) if path.exists() else "# Results\n"
    return replace_section(old, name, section, path)


def replace_section(page: str, name: str, section: str, path: Path) -> str:
    """Put a section between its markers, replacing the old one or at the end of the page.

    Raises:
        UserError: unless there are one begin and one end marker of this name, in this order.
    """
    begin, end = f"<!-- fedtools:{name} begin -->", f"<!-- fedtools:{name} end -->"
    whole = f"{begin}\n{section.strip()}\n{end}\n"
    if page.count(begin) == page.count(end) == 0:
        return f"{page.rstrip()}\n\n{whole}"
    start, stop = page.find(begin), page.find(end)
    if page.count(begin) != 1 or page.count(end) != 1 or stop < start:
        problem = f"the markers of section {name!r} are damaged"
        remedy = f"leave one {begin!r} and one {end!r}, or neither"
        raise UserError(problem, path=path, remedy=remedy)
    return page[:start] + whole + page[stop + len(end) :].removeprefix("\n")


def _section(
    path: Path, contents: Contents, compared: Compared, summary: Summary, page: Page
) -> str:
    caption, methods = page.corpus.caption, contents.methods
    runs = [run for method in methods for run in method.runs]
    over_seeds, rate = len(methods[0].runs) > 1, runs[0].unit
    parts = [
        f"## {caption}",
        provenance(
            path,
            page,
            seeds={run.seed for run in runs if run.seed is not None},
            rounds={run.cost.rounds for run in runs} - {0},
            pictures=[one.name for one in (page.plot, *dict(page.pictures).values()) if one],
            begun=contents.begun,
        ),
        f"**{caption}: summary.** {_note(methods)}",
        summary.markdown(),
        f"**{caption}: communication, computation and {rate.title} (%)** on "
        f"{_scored(methods[0])}. "
        + f"{rate.title} is {rate.note}. "
        * bool(rate.note)
        + "Comm./client: bytes that one client sends and receives in all rounds, mean over "
        "clients; Comm.: of all clients together. Client epochs: of training, mean over clients. "
        "Server epochs: with the share of the model that the server trains, if not all of it. AVG: "
        "mean over clients. Computation: client and server epochs, relative to the largest in the "
        "table. Steps and speech: of all training. Averaged: rounds whose models were averaged for "
        "the scored one. "
        + f"Means ± standard deviations over {len(methods[0].runs)} seeds. " * over_seeds
        + (compared.note if compared.references else "The best in bold.")
        + f" {page.note}" * bool(page.note),
        main_table(methods, compared),
        *weight_lines(methods),
    ]
    file, record = interval_file(path, page.section), record_file(path, page.section)
    parts += [
        f"**{caption}: {rate.title} (%) with 95 % intervals** by bootstrap over speakers; "
        f"none for fewer than {MIN_SPEAKERS} speakers. "
        + "Rates are means over the seeds, and intervals are over seeds as well. "
        * over_seeds
        + f"[`{file.name}`]({quote(file.name)}) has the intervals of all rates and tables, "
        "and the differences, bytes and epochs of the summary. These tables can be made again from "
        f"[`{record.name}`]({quote(record.name)}), the errors of each utterance, with `fedtools "
        "report --from`.",
        interval_table(methods, rate.rate),
    ]
    parts += [f"{caption}, {one.name}: {pooled_line(one)}." for one in contents.elsewhere]
    if page.plot is not None:
        shown = f"validation {rate.title} by round, greedy search, mean over clients"
        parts += [
            f"**{caption}: {shown}**" + ", mean and range over seeds." * over_seeds,
            image(f"{rate.title} by round, {caption}", page.plot.name),
        ]
    for title, read in contents.further:
        own = usable(compared.references, read) if compared.references else []
        parts += [f"**{caption}: {title}**, as above.", main_table(read, Compared.of(read, own))]
    parts += further(page, contents.measured, contents.published)
    return "\n\n".join(part.strip() for part in parts)


def _note(methods: Sequence[Method]) -> str:
    """Return how to read the summary."""
    over_seeds = len(methods[0].runs) > 1
    return note(
        methods[0].runs[0].unit.title,
        "mean over clients, with its 95 % interval "
        + ("over seeds and speakers" if over_seeds else "by bootstrap over speakers"),
        methods[0].name,
        "epochs of a client and of the server, relative to the largest",
        over_seeds,
    )


def read_each(rows: Sequence[Row]) -> list[Method]:
    """Read methods that need not be comparable with each other."""
    names = dict.fromkeys(row.name for row in rows)
    return [_read([row for row in rows if row.name == name])[0] for name in names]


def _scored(method: Method) -> str:
    """Return the size of a method's test data, in words."""
    scored = method.runs[0].scored
    speakers, utterances, words = scored[AVERAGE]
    each = ", ".join(f"{name} {one[0]}" for name, one in scored.items() if name != AVERAGE)
    unit = method.runs[0].unit.plural
    counts = f"{utterances} utterances, {words} {unit}, {speakers} speaker{'s' * (speakers != 1)}"
    return f"{counts} ({each})" if each else counts


def weight_lines(methods: Sequence[Method]) -> list[str]:
    """Return a line on weights, with those at an edge of the values tried; [] without any."""
    lines, edges = dict[str, list[str]](), []
    for method in methods:
        found = [run.weights for run in method.runs if run.weights]
        if found:
            pairs = ", ".join(f"{one.lm_weight:g} and {one.word_score:g}" for one in found)
            how = _origin([one.tuned_on for one in found])
            lines.setdefault(how, []).append(f"{method.name} {pairs}")
        edges += [f"{method.name} {what}" for one in found if one.tuned_on for what in one.at_edge]
    told = [f"LM weight and word score, {how}: {'; '.join(one)}." for how, one in lines.items()]
    if edges:
        told.append(
            f"**Warning**: at an edge of the values tried: {', '.join(dict.fromkeys(edges))}."
        )
    return [" ".join(told)] if told else []


def _origin(tuned_on: Sequence[str]) -> str:
    """Return where weights are from, given the names of the data that they were tuned on.

    Only data that are named as validation data are called so: weights can be tuned on any.
    """
    if not all(tuned_on):
        return (
            "as given" if not any(tuned_on) else "tuned with some seeds, and as given with others"
        )
    if all(map(_VALIDATION.search, tuned_on)):
        return "tuned on validation data"
    return f"tuned on {', '.join(dict.fromkeys(tuned_on))}"


def image(caption: str, name: str) -> str:
    """Return the Markdown of a picture next to the page, whose name may have spaces."""
    return f"![{caption}]({quote(name)})"


def provenance(
    path: Path,
    page: Page,
    seeds: Iterable[int],
    rounds: Iterable[int],
    pictures: Sequence[str],
    experiments: Iterable[Path] = (),
    begun: str = "",
    more: Sequence[str] = (),
) -> str:
    """Return the provenance of a section's figures, in Markdown.

    Args:
        path: the page's file.
        page: its corpus, command and date.
        seeds, rounds: of the experiments.
        pictures: names of files next to the page that are written with it.
        experiments: their folders, which have the records of what they were begun with.
        begun: the same records, if they have been read already.
        more: other facts, each a line that ends in a full stop.
    """
    written = [f":(exclude){name}" for name in (path.name, f"{path.stem}-*", *pictures)]
    mini = " (a mini corpus; its figures are not comparable with published ones)"
    facts = [
        f"Corpus: {page.corpus.name}, release {page.corpus.release}{mini * page.corpus.mini}.",
        f"Date: {page.date or datetime.date.today()}.",
        # Changes in other sections' pictures do not affect the figures of this one.
        f"Git, of this report: {git_hash(path.parent, *written)}.",
        f"Seed: {_listed(seeds)}.",
        f"Rounds: {_listed(rounds)}.",
        f"Experiments begun with: {begun or records(experiments)}.",
        *more,
    ]
    return "\n".join(f"- {fact}" for fact in facts) + f"\n\n```\n{page.command}\n```"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers)))) or "none"


def _table_of(path: Path) -> Cells:
    rows = read_tsv(path, None)
    if not rows:
        raise UserError("a header but no row", path=path)
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def main_table(methods: Sequence[Method], compared: Compared) -> str:
    """Format communication, computation and WER, as in table 3 of Zhu et al. 2022.

    CER takes WER's place if the language is written without spaces. With references there are
    columns of differences to them, with improvements in bold; without, the best rates are in bold.
    A note follows the table if methods are marked.
    """
    rate = methods[0].runs[0].unit.rate
    clients = list(methods[0].runs[0].rates[rate])
    costs = ["Comm./client", "Comm.", "Client epochs", "Server epochs"]
    header = ["Method", *costs, *map(heading, clients)]
    cells = [
        [
            method.marked,
            size_text(method.cost.client_bytes),
            size_text(method.cost.bytes),
            epochs_text(method.cost.client_epochs),
            server_text(method.cost),
            *(with_deviation(method.values(rate, client), "{:.1f}".format) for client in clients),
        ]
        for method in methods
    ]
    if not compared.references:
        for column in range(len(costs) + 1, len(header)):
            embolden(cells, column)
    names, columns = compared.columns()
    for column in columns:
        for row, cell in zip(cells, column, strict=True):
            row.append(cell)
    for row, method in zip(cells, methods, strict=True):
        row += done_cells(method, methods)
    note = collapse_note(methods)
    return format_markdown([*header, *names, *DONE], cells) + f"\n{note}\n" * bool(note)


def pooled_line(method: Method) -> str:
    """Return a sentence part with a method's mean error rate, its interval, and its test data."""
    unit = method.runs[0].unit
    rate = with_interval(method.interval(unit.rate, AVERAGE))
    return f"{unit.title} {rate} % on {_scored(method)}"


def embolden(
    cells: list[list[str]], column: int, best: Callable[[Iterable[float]], float] = min
) -> None:
    """Set the best figure of a column in bold, and all that print the same.

    A cell begins with its figure, or is a dash.
    """
    shown = {row[column]: float(row[column].split()[0]) for row in cells if row[column] != "-"}
    for row in cells:
        if row[column] in shown and shown[row[column]] == best(shown.values()):
            row[column] = f"**{row[column]}**"
