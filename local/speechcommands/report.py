#!/usr/bin/env python3
"""Write a section of RESULTS.md from all experiments of the keyword recipe.

    report.py EXP RESULTS.md --section NAME --corpus NAME --release NAME [...]

EXP holds <task>/<network>/<method>/seed<k>. Draws RESULTS-<section>-accuracy.png and
RESULTS-<section>-ablation.png next to the page, and shows RESULTS-<section>-clients-<task>.png and
RESULTS-<section>-landscape.png if they exist. Writes RESULTS-<section>-errors.gz, from which
remake.py makes the section again, if errors were counted by clip. Leaves the page's other sections
unchanged, and prints the summary.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from learnt import learnt
from privacy import NOTE as NOTE_OF_EPSILON
from privacy import Accuracies
from runs import Runs, read_runs
from summary import rows_of
from tables import (
    Published,
    ablation_table,
    ablations,
    accuracy_table,
    centralized_table,
    clients_table,
    cost_table,
    detection_table,
    private_table,
    settings_table,
)
from thresholds import NOTE, places_drawn, plot_thresholds, threshold_table

from fedtools.core.atomic import write_text
from fedtools.core.errors import exit_with_message
from fedtools.core.text_files import read_lines
from fedtools.report.accuracies import note_of, summary_of, write_record
from fedtools.report.intervals import record_file
from fedtools.report.options import add_page_options, page_of
from fedtools.report.page import Page, image, provenance
from fedtools.report.section import Section, page_with
from fedtools.report.summary import Summary, on_terminal
from fedtools.score.detection import DEFINITION
from fedtools.score.last_evaluations import LAST

PAPER = "Li et al. 2022"
PICTURES = ("accuracy", "detection", "ablation")
# Of text on the terminal.
WIDTH = 100


@dataclass(frozen=True)
class KeywordPage(Page):
    """The contents of a section in addition to our own figures.

    Attributes:
        paper: a table of the paper's figures.
        config: the name of the experiments' configuration, for captions.
        notes: notes on the data, a line each.
        references: names of rows that accuracies are compared with.
    """

    paper: Path | None = None
    config: str = ""
    notes: Sequence[str] = ()
    references: Sequence[str] = ()


def write_report(root: str | Path, path: str | Path, page: KeywordPage) -> tuple[Summary, str]:
    """Write a section of RESULTS.md: provenance of the figures, tables, and pictures.

    Args:
        root: the folder of the experiments, <task>/<network>/<method>/seed<k>.
        path: the page; made if it is missing. Text outside of the section stays.
        page: the section's other contents.

    Returns:
        The summary, which is the section's first table, and the text below it, if any.

    Raises:
        UserError: if there is no complete experiment, a file is malformed, experiments of a task
            have different data, or the page's markers are damaged.
    """
    path, runs = Path(path), read_runs(root)
    rows = rows_of(runs)
    summary = summary_of(rows)
    pictures = {name: picture_path(path, page, name) for name in PICTURES}
    private = of_epsilon(runs)
    pictures |= {
        f"privacy-{one.task}": picture_path(path, page, f"privacy-{one.task}") for one in private
    }
    if not runs.methods(True):
        del pictures["accuracy"]
    if not runs.methods(True) or not ablations(runs):
        del pictures["ablation"]
    if not places_drawn(runs):
        del pictures["detection"]
    title, *below = _section(path, runs, page, pictures, private)
    if text := learnt(runs):
        below = [text, *below]
    head = [title, _provenance(path, runs, page)]
    reading = f"**{_caption(runs, page)}: summary.** {note_of(rows)}"
    section = Section(page.section, page.corpus.caption, [*head, reading], below)
    new = page_with(path, section, summary)
    # Imported late, because matplotlib is slow to import and not needed if the tables fail.
    from figures import plot_ablation, plot_accuracy

    drawings = {"accuracy": plot_accuracy, "detection": plot_thresholds, "ablation": plot_ablation}
    for name, draw in drawings.items():
        if name in pictures:
            draw(pictures[name], runs, _caption(runs, page))
    for one in private:
        one.draw(pictures[f"privacy-{one.task}"], _caption(runs, page))
    if all(row.counts for row in rows):
        write_record(record_file(path, page.section), section, rows)
    write_text(path, new)
    return summary, text


def of_epsilon(runs: Runs) -> list[Accuracies]:
    """Return what there is to compare of user-level privacy, by task."""
    return [one for one in (Accuracies(runs, task) for task in runs.tasks) if one.shown]


def picture_path(path: Path, page: Page, name: str) -> Path:
    """Return the path of a picture of the section."""
    return path.with_name(f"{path.stem}-{page.section}-{name}.png")


def _caption(runs: Runs, page: KeywordPage) -> str:
    """Return the names of corpus and configuration, with a note if test clips are in training."""
    shared = [(facts.trained_on, facts.test) for facts in runs.data.values() if facts.trained_on]
    counts = ", ".join(f"{both} of {test}" for both, test in shared)
    config = f", {page.config}" if page.config else ""
    shared_too = f" [{counts} test clips are in training]" if counts else ""
    return page.corpus.caption + config + shared_too


def _section(
    path: Path,
    runs: Runs,
    page: KeywordPage,
    pictures: dict[str, Path],
    private: Sequence[Accuracies],
) -> list[str]:
    """Return the section's title, and what is below the summary."""
    caption, published = _caption(runs, page), Published(page.paper)
    here = "mini" if page.corpus.mini else "here"
    best = "." if page.references else "; the best in bold."
    paper = f" Published figures are from {PAPER}, not measured here." if page.paper else ""
    accuracy = accuracy_table(runs, page.references)
    seeds = "Means over seeds ± standard deviations, the number of seeds in brackets."
    parts = [
        f"## {caption}",
        f"**{caption}: clients and clips** (table 1 of {PAPER}).{paper}",
        clients_table(runs, published, here),
        f"**{caption}: networks and centralised training** (table 2), accuracy on the test clips "
        f"after the last round. {seeds}{paper}",
        centralized_table(runs, published, here),
        f"**{caption}: settings.** The paper: 300 rounds of 50 steps of 32 clips at each client.",
        settings_table(runs),
        f"**{caption}: accuracy (%) of federated training** (figure 2) on the test clips, the mean "
        f"of the last {LAST} evaluations (of all, if there are fewer){best} {seeds}{accuracy.note}",
        accuracy.markdown(),
    ]
    if table := published.table("section 5", {str(facts.classes) for facts in runs.data.values()}):
        parts += [f"**Published, not measured here: {PAPER}, section 5**", table]
    if "accuracy" in pictures:
        parts.append(image(f"Accuracy by round, {caption}", pictures["accuracy"].name))
    if table := detection_table(runs, published, here):
        parts += [
            f"**{caption}: false accepts and false rejects (%)** (table 3) after the last round. "
            f"{DEFINITION} {seeds}{paper}",
            table,
        ]
    if table := threshold_table(runs):
        parts += [
            f"**{caption}: false rejects (%) at given false accepts** after the last round. {NOTE} "
            f"{seeds}",
            table,
        ]
    if "detection" in pictures:
        parts.append(image(f"False rejects and accepts, {caption}", pictures["detection"].name))
    if any(setting.option and not setting.alone for setting in runs.complete):
        ablated = ablation_table(runs, page.references)
        parts += [
            f"**{caption}: ablations, accuracy (%)** (figure 3), as in figure 2. "
            f"{seeds}{ablated.note}",
            ablated.markdown(),
        ]
    if "ablation" in pictures:
        parts.append(image(f"Ablations, {caption}", pictures["ablation"].name))
    for one in private:
        name = f"privacy-{one.task}"
        parts += [
            f"**{caption}: user-level privacy, task {one.task}.** {NOTE_OF_EPSILON}",
            one.table,
            image(f"Accuracy by epsilon, {caption}", pictures[name].name),
        ]
    if table := private_table(runs):
        parts += [
            f"**{caption}: private models, accuracy (%)** after the last round, on their own "
            "client's clips and on test clips, and the shared model on the same clips. A private "
            "model that is far better on its own client's clips overfits. Means over clients that "
            f"have one; {seeds[0].lower()}{seeds[1:]}",
            table,
        ]
    parts += [
        f"**{caption}: communication and computation**, means over seeds from the ledgers. Client "
        "steps, clips: gradient steps of a client in a round, and the clips of their batches; "
        "private: additional steps and clips of its private model. Client epochs: epochs of a "
        "client in all rounds, without private steps; the mean over all clients, sampled or not. "
        "Left out: refused updates of all runs. Comm.: the size of all messages, both ways.",
        cost_table(runs),
    ]
    drawn = {f"Clients of task {task} (figure 1)": f"clients-{task}" for task in runs.tasks}
    drawn["Accuracy between a model and two clients' models (figure 4)"] = "landscape"
    for title, name in drawn.items():
        if (picture := picture_path(path, page, name)).exists():
            parts += [f"**{caption}: {title}**", image(f"{title}, {caption}", picture.name)]
    return [part.strip() for part in parts]


def _provenance(path: Path, runs: Runs, page: KeywordPage) -> str:
    everything = runs.having()
    return provenance(
        path,
        page,
        seeds={run.seed for run in everything},
        rounds={run.options.rounds for run in everything},
        pictures=[],
        experiments=[run.path for run in everything],
        more=[
            *(f"Data: {note}." for note in page.notes),
            *(f"Left out, not finished: {name}." for name in runs.unfinished),
        ],
    )


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Run the command: 0 done, 1 bad input (one line on stderr), 2 wrong usage."""
    parser = argparse.ArgumentParser(description="Write a section of RESULTS.md.")
    add = parser.add_argument
    add("root", type=Path, metavar="EXP", help="folder of <task>/<network>/<method>/seed<k>")
    add("results", type=Path, help="the page; its other sections are left unchanged")
    add("--published", type=Path, metavar="TSV", help="the paper's figures")
    add("--config", default="", help="name of the configuration, for captions: paper.yaml")
    add("--notes", type=Path, metavar="TXT", help="notes on the data, a line each")
    reference = "name of a row that accuracies are compared with, in a separate column"
    add("--reference", action="append", default=[], metavar="ROW", help=reference)
    add_page_options(parser)
    options = parser.parse_args()
    with exit_with_message("report.py"):
        notes = read_lines(options.notes, "run stage 1 again") if options.notes else ()
        own = {"paper": options.published, "config": options.config, "notes": notes}
        own["references"] = options.reference
        page = page_of(parser, options, KeywordPage, **own)
        summary, text = write_report(options.root, options.results, page)
        print(on_terminal(page.corpus.caption, summary, sys.stdout), end="")
        if text:
            print(f"\n{textwrap.fill(text, WIDTH)}")


if __name__ == "__main__":
    main()
