#!/usr/bin/env python3
"""Write a section of RESULTS.md from the results of the FMP recipe.

    report.py EXP DATA RESULTS.md --seeds "0 1" --rounds "1 2" --section NAME [...]

EXP holds, by seed, am/ (the first pass), rescored/ (the neural language model alone), fmp<T>/,
optionally one with differential privacy, finetuned/ and sweeps/; DATA is the evaluation data. Draws
RESULTS-<section>-epsilon.png next to the page. Leaves the page's other sections unchanged, and
prints the summary.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from settings import PAPER, PERCENT, cut_by, plot_epsilon, table_3, table_4, words_table

from fedtools.federation.spending import spending
from fedtools.files.atomic import write_text
from fedtools.files.datadir import DataDir, read_table
from fedtools.files.errors import UserError, exit_with_message
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import SERVER_ROW, read_ledger
from fedtools.files.tables import format_markdown, with_deviation
from fedtools.privacy.ledger import LEVELS
from fedtools.report.options import add_page_options, page_of
from fedtools.report.page import (
    Page,
    image,
    provenance,
    with_section,
)
from fedtools.report.results import read_cost, size_text
from fedtools.report.summary import Line, Summary, note, on_terminal, rate_of
from fedtools.score.align import count_errors
from fedtools.score.crossed import difference

# AMI, WER in %.
TABLE_2 = {"rescored": 32.83, "fmp1": 31.44, "fmp2": 31.34, "fmp5": 31.27, "fmp10": 31.24}


@dataclass(frozen=True)
class Row:
    """A row of table 2.

    Attributes:
        name: the row's name in the table.
        folders: a folder for each seed, with the hypotheses in text.
        experiments: an experiment for each seed, if a federation produced the row.
        published: the paper's WER.
    """

    name: str
    folders: Sequence[Path]
    experiments: Sequence[Path] = ()
    published: float | None = None


class Scores:
    """Word errors by person.

    Args:
        data: the evaluation data: text, utt2client and utt2person.
    """

    def __init__(self, data: Path):
        self.data = DataDir.read(data, "text", "utt2client")
        self.person = read_table(data / "utt2person")
        if self.person.keys() != self.data.text.keys():
            raise UserError("not the utterances of text", path=data / "utt2person")
        self.persons = sorted(set(self.person.values()))
        self.words = self._sums({name: len(text.split()) for name, text in self.data.text.items()})

    def errors(self, folder: Path) -> np.ndarray:
        """Count the word errors of FOLDER/text: (persons,)."""
        hypotheses = read_table(folder / "text", values="optional")
        if hypotheses.keys() != self.data.text.keys():
            raise UserError(f"not the utterances of {self.data.path}", path=folder / "text")
        return self._sums({
            name: count_errors(reference.split(), hypotheses[name].split()).errors
            for name, reference in self.data.text.items()
        })  # fmt: skip

    def _sums(self, values: Mapping[str, int]) -> np.ndarray:
        sums = dict.fromkeys(self.persons, 0)
        for name, value in values.items():
            sums[self.person[name]] += value
        return np.array([sums[person] for person in self.persons], float)


def relative(own: np.ndarray, base: np.ndarray, words: np.ndarray) -> str:
    """Format the change in %, with an interval over seeds and persons; errors (seeds, persons)."""
    found = difference(own, base, words, np.zeros(len(words), int))
    # From percentage points to % of the base's WER.
    scale = 100 / (100 * base.mean(0).sum() / words.sum())
    bounds = (
        "" if np.isnan(found.low) else f" [{scale * found.low:+.1f}, {scale * found.high:+.1f}]"
    )
    return f"{scale * found.value:+.1f}{bounds}"


def summary_of(rows: Sequence[Row], found: Mapping[str, np.ndarray], words: np.ndarray) -> Summary:
    """Return the rows in five columns; errors are (seeds, persons), and words (persons,)."""
    first, lines = found[rows[0].name], []
    for row in rows:
        own = found[row.name]
        change = None if own is first else difference(own, first, words, np.zeros(len(words), int))
        size, seconds = cost(row.experiments)
        took = f"{seconds:.2f} s" if row.experiments else "-"
        lines.append(Line(row.name, rate_of(own, words), change, size, took))
    return Summary("WER", lines)


def table_2(rows: Sequence[Row], found: Mapping[str, np.ndarray], scores: Scores) -> str:
    """Return table 2: WER and costs, compared with the neural language model alone."""
    base = found[next(row.name for row in rows if row.published == TABLE_2["rescored"])]
    header = [
        *("Method", "WER %", "relative % [95 %]", f"{PAPER}, WER %", "relative %"),
        *("Comm./client", "Client seconds"),
    ]
    cells = []
    for row in rows:
        own = found[row.name]
        published = row.published
        change = f"{100 * (published / TABLE_2['rescored'] - 1):+.1f}" if published else "-"
        size, seconds = cost(row.experiments)
        cells.append([
            row.name,
            with_deviation([100 * errors.sum() / scores.words.sum() for errors in own], PERCENT),
            "-" if own is base else relative(own, base, scores.words),
            f"{published:.2f}" if published else "-",
            "-" if own is base else change,
            *((size_text(size), f"{seconds:.2f}") if row.experiments else ("-", "-")),
        ])  # fmt: skip
    return format_markdown(header, cells)


def cost(experiments: Sequence[Path]) -> tuple[float, float]:
    """Return a client's bytes sent and received, and its seconds of work, means over seeds."""
    if not experiments:
        return 0, 0
    sizes = [read_cost(Experiment(path)).client_bytes for path in experiments]
    seconds = []
    for path in experiments:
        rows = [row for row in read_ledger(Experiment(path)) if row.client != SERVER_ROW]
        seconds.append(sum(row.seconds for row in rows) / len({row.client for row in rows}))
    return statistics.fmean(sizes), statistics.fmean(seconds)


def rows_of(
    exp: Path, seeds: Sequence[int], rounds: Sequence[int], private: str | None
) -> list[Row]:
    """Return the rows of table 2; `private` names a federation with differential privacy."""

    def by_seed(name: str, inner: str = "") -> list[Path]:
        return [exp / name / f"seed{seed}" / inner for seed in seeds]

    rows = [
        Row("First pass", by_seed("am", "decode_eval")),
        Row("NNLM rescoring", by_seed("rescored", "best"), (), TABLE_2["rescored"]),
    ]
    for number in rounds:
        name = f"fmp{number}"
        experiments = by_seed(name)
        rows.append(
            Row(f"FMP, T = {number}", by_seed(name, "best"), experiments, TABLE_2.get(name))
        )
    if private:
        options = Experiment(by_seed(private)[0]).options.method_conf["privacy"]
        laplace = options["mechanism"] == "laplace"
        name = f"FMP, T = {max(rounds)}, as in table 4, epsilon {options['epsilon']:g}"
        name += f" for one {options['unit']}" if laplace else ", the paper's noise"
        if len(seeds) > 1:
            unit = options["unit"] if laplace else "utterance"
            total = dict(zip(LEVELS, spending(by_seed(private)).total, strict=True))
            name += f"; of all seeds {total[f'epsilon_{unit}']:g} for one {unit}"
        rows.append(Row(name, by_seed(private, "best"), by_seed(private)))
    tuned = f"Fine-tuning by FedAvg, T = {max(rounds)}"
    return [*rows, Row(tuned, by_seed("finetuned", "best"), by_seed("finetuned"))]


def write_report(
    exp: Path,
    data: Path,
    path: Path,
    page: Page,
    seeds: Sequence[int],
    rounds: Sequence[int],
    private: str | None,
) -> Summary:
    """Write the section, and the picture next to the page; return its first table."""
    scores, caption = Scores(data), page.corpus.caption
    rows = rows_of(exp, seeds, rounds, private)
    found = {row.name: np.stack([scores.errors(one) for one in row.folders]) for row in rows}
    summary = summary_of(rows, found, scores.words)
    base = found[rows[1].name].sum(1) / scores.words.sum()
    picture = path.with_name(f"{path.stem}-{page.section}-epsilon.png")
    title = f"WER and privacy, {caption}"
    plot_epsilon(picture, exp, seeds, 100 * float(base.mean()), title)
    head = provenance(
        path,
        page,
        seeds=seeds,
        rounds=rounds,
        pictures=[picture.name],
        experiments=[one for row in rows for one in row.experiments],
    )
    counted = (
        f"{len(scores.data.text):,} utterances, {int(scores.words.sum()):,} words, "
        f"{len(set(scores.data.utt2client.values()))} clients, {len(scores.persons)} persons"
    )
    several = len(seeds) > 1
    reading = note(
        "WER",
        f"over all words, with 95 % intervals over {'seeds and ' * several}persons",
        rows[0].name,
        "a client's seconds of work, mean over clients",
        several,
    )
    parts = [
        f"## {caption}",
        head,
        f"**{caption}: summary.** {reading}",
        summary.markdown(),
        f"**{caption}: second-pass rescoring** (table 2 of {PAPER}) on {counted}. Relative changes "
        "are against NNLM rescoring alone, paired, with 95 % intervals over seeds and persons; "
        "means ± standard deviations over seeds. Published figures are not measured here.",
        table_2(rows, found, scores),
        f"**{caption}: settings of FMP, T = {max(rounds)}** (table 3), on the same stored scores. "
        "Intervals, here and below, are from a bootstrap over clients; their bounds are means over "
        "the seeds.",
        table_3(exp, seeds),
        f"**{caption}: private words and density ratio**, T = {max(rounds)}. Clients list words of "
        "their first utterances, as corrected by the user, that are rare in the background text; "
        "bonuses and weight are tuned on dev. Listed words are counted in the utterances after "
        "that. Changes with private words in the first pass are against the NNLM alone on the same "
        "lists.",
        words_table(exp, seeds),
        f"**{caption}: differential privacy, T = {max(rounds)}, sigma 0.1, groups cut "
        f"{cut_by(exp, seeds)}** (table 4, where the paper's groups are even). README.md states "
        "what each epsilon protects. Rows with noise are means over draws of the noise; the spread "
        "is the standard deviation over draws of the relative change in %, per seed, and the worst "
        "draw is that of all seeds. All seeds and rows use the same people, so that their epsilons "
        "add up. Each row was simulated in memory; these WERs are computed from the transcripts, "
        "which epsilon does not protect.",
        table_4(exp, seeds),
        image(title, picture.name),
    ]
    section = "\n\n".join(part.strip() for part in parts)
    write_text(path, with_section(path, page.section, section))
    return summary


def numbers(text: str) -> list[int]:
    """Parse numbers separated by spaces, for argparse."""
    if not (found := [int(one) for one in text.split()]):
        raise ValueError(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("exp", "data", "results"):
        parser.add_argument(name, type=Path)
    for name in ("seeds", "rounds"):
        parser.add_argument(f"--{name}", required=True, type=numbers)
    parser.add_argument("--private", help="in EXP, a federation with differential privacy")
    add_page_options(parser)
    options = parser.parse_args()
    page = page_of(parser, options, Page)
    with exit_with_message("report.py"):
        summary = write_report(
            options.exp,
            options.data,
            options.results,
            page,
            options.seeds,
            options.rounds,
            options.private,
        )
        print(on_terminal(page.corpus.caption, summary, sys.stdout), end="")


if __name__ == "__main__":
    main()
