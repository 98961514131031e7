#!/usr/bin/env python3
"""Write a section of RESULTS.md from the results of the FMP recipe.

    report.py EXP DATA RESULTS.md --seeds "0 1" --rounds "1 2" --section NAME [...]

EXP holds, by seed, am/ (the first pass), rescored/ (the neural language model alone), fmp<T>/,
optionally one with differential privacy, finetuned/ and sweeps/; DATA is the evaluation data. Draws
RESULTS-<section>-epsilon.png next to the page, and writes RESULTS-<section>-errors.gz, from which
remake.py makes the section again. Leaves the page's other sections unchanged, and prints the
summary.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from record import write_record
from settings import PAPER, PERCENT, cut_by, plot_epsilon, table_3, table_4, words_table
from summary import Row, note_of, relative, summary_of

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.tables import format_markdown, size_text, with_deviation
from fedtools.data.datadir import DataDir, read_table
from fedtools.data.text_units import WORD
from fedtools.exchange.experiment import Experiment
from fedtools.exchange.ledger import SERVER_ROW, read_ledger
from fedtools.federation.fmp.spending import spending
from fedtools.privacy.ledger import LEVELS
from fedtools.report.intervals import record_file
from fedtools.report.options import add_page_options, page_of
from fedtools.report.page import Page, image, provenance
from fedtools.report.results import read_cost
from fedtools.report.section import Section, page_with
from fedtools.report.summary import Summary, on_terminal
from fedtools.score.align import count_errors
from fedtools.score.utterances import Utterances

# AMI, WER in %.
TABLE_2 = {"rescored": 32.83, "fmp1": 31.44, "fmp2": 31.34, "fmp5": 31.27, "fmp10": 31.24}


@dataclass(frozen=True)
class System:
    """What a row of table 2 is made of.

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
    """Word errors by utterance.

    Args:
        path: the evaluation data: text, utt2client and utt2person.
    """

    def __init__(self, path: Path):
        data = DataDir.read(path, "text", "utt2client")
        self.path, self._text, person = path, data.text, read_table(path / "utt2person")
        for name, table in (("utt2client", data.utt2client), ("utt2person", person)):
            if table.keys() != data.text.keys():
                raise UserError("not the utterances of text", path=path / name)
        self.keys = [(data.utt2client[name], person[name], name) for name in data.text]
        self.words = np.array([len(text.split()) for text in data.text.values()], int)

    def row(self, system: System, seeds: Sequence[int]) -> Row:
        """Count the errors of a system's hypotheses, and sum up its costs."""
        counts = dict(zip(seeds, map(self._errors, system.folders), strict=True))
        costs = cost(system.experiments) if system.experiments else (0.0, None)
        return Row("", system.name, counts, *costs)

    def _errors(self, folder: Path) -> Utterances:
        hypotheses = read_table(folder / "text", values="optional")
        if hypotheses.keys() != self._text.keys():
            raise UserError(f"not the utterances of {self.path}", path=folder / "text")
        errors = [
            count_errors(reference.split(), hypotheses[name].split()).errors
            for name, reference in self._text.items()
        ]
        return Utterances(self.keys, {WORD.rate: self.words}, {WORD.rate: np.array(errors, int)})


def table_2(systems: Sequence[System], rows: Sequence[Row]) -> str:
    """Return table 2: WER and costs, compared with the neural language model alone."""
    base = rows[[one.published for one in systems].index(TABLE_2["rescored"])]
    header = [
        *("Method", "WER %", "relative % [95 %]", f"{PAPER}, WER %", "relative %"),
        *("Comm./client", "Client seconds"),
    ]
    cells = []
    for system, row in zip(systems, rows, strict=True):
        published = system.published
        change = f"{100 * (published / TABLE_2['rescored'] - 1):+.1f}" if published else "-"
        cells.append([
            row.name,
            with_deviation(row.rates(), PERCENT),
            "-" if row is base else relative(row.less(base), base),
            f"{published:.2f}" if published else "-",
            "-" if row is base else change,
            *(("-", "-") if row.seconds is None else (size_text(row.bytes), f"{row.seconds:.2f}")),
        ])  # fmt: skip
    return format_markdown(header, cells)


def cost(experiments: Sequence[Path]) -> tuple[float, float]:
    """Return a client's bytes sent and received, and its seconds of work, means over seeds."""
    sizes = [read_cost(Experiment(path)).client_bytes for path in experiments]
    seconds = []
    for path in experiments:
        rows = [row for row in read_ledger(Experiment(path)) if row.client != SERVER_ROW]
        seconds.append(sum(row.seconds for row in rows) / len({row.client for row in rows}))
    return statistics.fmean(sizes), statistics.fmean(seconds)


def systems_of(
    exp: Path, seeds: Sequence[int], rounds: Sequence[int], private: str | None
) -> list[System]:
    """Return the systems of table 2; `private` names a federation with differential privacy."""

    def by_seed(name: str, inner: str = "") -> list[Path]:
        return [exp / name / f"seed{seed}" / inner for seed in seeds]

    systems = [
        System("First pass", by_seed("am", "decode_eval")),
        System("NNLM rescoring", by_seed("rescored", "best"), (), TABLE_2["rescored"]),
    ]
    for number in rounds:
        name = f"fmp{number}"
        experiments = by_seed(name)
        systems.append(
            System(f"FMP, T = {number}", by_seed(name, "best"), experiments, TABLE_2.get(name))
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
        systems.append(System(name, by_seed(private, "best"), by_seed(private)))
    tuned = f"Fine-tuning by FedAvg, T = {max(rounds)}"
    return [*systems, System(tuned, by_seed("finetuned", "best"), by_seed("finetuned"))]


def write_report(
    exp: Path,
    data: Path,
    path: Path,
    page: Page,
    seeds: Sequence[int],
    rounds: Sequence[int],
    private: str | None,
) -> Summary:
    """Write the section, and files next to the page; return its first table."""
    scores, caption = Scores(data), page.corpus.caption
    systems = systems_of(exp, seeds, rounds, private)
    rows = [scores.row(system, seeds) for system in systems]
    summary = summary_of(rows)
    picture = path.with_name(f"{path.stem}-{page.section}-epsilon.png")
    title = f"WER and privacy, {caption}"
    plot_epsilon(picture, exp, seeds, float(np.mean(rows[1].rates())), title)
    head = provenance(
        path,
        page,
        seeds=seeds,
        rounds=rounds,
        pictures=[picture.name],
        experiments=[one for system in systems for one in system.experiments],
    )
    work = "a client's seconds of work, mean over clients"
    reading = f"**{caption}: summary.** {note_of(rows[0].name, work, len(seeds) > 1)}"
    counted = (
        f"{len(scores.keys):,} utterances, {scores.words.sum():,} words, "
        f"{len({client for client, _, _ in scores.keys})} clients, {len(rows[0].words)} persons"
    )
    below = [
        f"**{caption}: second-pass rescoring** (table 2 of {PAPER}) on {counted}. Relative changes "
        "are against NNLM rescoring alone, paired, with 95 % intervals over seeds and persons; "
        "means ± standard deviations over seeds. Published figures are not measured here.",
        table_2(systems, rows),
        *tables_of_sweeps(exp, seeds, max(rounds), caption),
        image(title, picture.name),
    ]
    above = [f"## {caption}", head, reading]
    section = Section(page.section, caption, above, [part.strip() for part in below])
    new = page_with(path, section, summary)
    write_record(record_file(path, page.section), section, rows)
    write_text(path, new)
    return summary


def tables_of_sweeps(exp: Path, seeds: Sequence[int], most: int, caption: str) -> list[str]:
    """Return tables 3 and 4 and that of private words, each below its text; `most` is T."""
    return [
        f"**{caption}: settings of FMP, T = {most}** (table 3), on the same stored scores. "
        "Intervals, here and below, are from a bootstrap over clients; their bounds are means over "
        "the seeds.",
        table_3(exp, seeds),
        f"**{caption}: private words**, T = {most}. Clients list words of their first utterances, "
        "as corrected by the user, that are rare in the background text; bonuses are tuned on dev. "
        "Listed words are counted in the utterances after that. Changes with private words in the "
        "first pass are against the NNLM alone on the same lists.",
        words_table(exp, seeds),
        f"**{caption}: differential privacy, T = {most}, sigma 0.1, groups cut "
        f"{cut_by(exp, seeds)}** (table 4, where the paper's groups are even). README.md states "
        "what each epsilon protects. Rows with noise are means over draws of the noise; the spread "
        "is the standard deviation over draws of the relative change in %, per seed, and the worst "
        "draw is that of all seeds. All seeds and rows use the same people, so that their epsilons "
        "add up. Each row was simulated in memory; these WERs are computed from the transcripts, "
        "which epsilon does not protect.",
        table_4(exp, seeds),
    ]


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
