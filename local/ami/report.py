#!/usr/bin/env python3
"""Write a section of RESULTS.md from what the recipe of FMP has left.

    report.py EXP DATA RESULTS.md --seeds "0 1" --rounds "1 2" --section NAME [...]

EXP holds, by seed, am/ (the first pass), rescored/ (the neural language model alone), fmp<T>/,
maybe one with differential privacy, finetuned/ and sweeps/; DATA is the evaluation data. Draws
RESULTS-<section>-epsilon.png beside the page. Leaves the page's other sections as they are.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.federation.spending import spending
from fedtools.files.atomic import write_text
from fedtools.files.config import read_yaml
from fedtools.files.datadir import DataDir, read_table
from fedtools.files.errors import UserError, exit_with_message
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import SERVER_ROW, read_ledger
from fedtools.files.tables import format_markdown, read_tsv, with_deviation
from fedtools.privacy.ledger import LEVELS
from fedtools.report.options import add_page_options, page_of
from fedtools.report.page import (
    Page,
    image,
    provenance,
    with_section,
)
from fedtools.report.results import read_cost, size_text
from fedtools.score.align import count_errors
from fedtools.score.bootstrap import interval, speaker_draws

PAPER = "Liu and Peng 2022"
PERCENT = "{:.2f}".format
# Tables 2, 3 and 4, AMI: WER in %.
TABLE_2 = {"rescored": 32.83, "fmp1": 31.44, "fmp2": 31.34, "fmp5": 31.27, "fmp10": 31.24}
TABLE_3 = {
    ("0.5", "0.25", "5.0"): 31.24,
    ("0.5", "0.25", "0.1"): 31.02,
    ("0.5", "0.25", "1.0"): 30.96,
    ("0.5", "0.25", "10.0"): 31.38,
    ("0.5", "0.25", "100.0"): 31.42,
    ("0.0", "0.75", "5.0"): 31.56,
    ("0.75", "0.0", "5.0"): 31.31,
}
TABLE_4 = {"2.0": 31.09, "1.0": 31.17, "0.5": 31.26, "0.1": 31.59}
MECHANISMS = {
    "paper": "the paper's equations 8 and 9 (protects less than it says)",
    "utterance": "Laplace on bounded counts, for an utterance",
    "user": "the same, for a user",
}


@dataclass(frozen=True)
class Row:
    """A row of table 2.

    Attributes:
        name: as the table has it.
        folders: by seed, with text.
        experiments: by seed, if a federation made it.
        published: the paper's WER.
    """

    name: str
    folders: Sequence[Path]
    experiments: Sequence[Path] = ()
    published: float | None = None


class Scores:
    """Word errors by client.

    Args:
        data: what was said, and by which client.
    """

    def __init__(self, data: Path):
        self.data = DataDir.read(data, "text", "utt2client")
        self.clients = sorted(set(self.data.utt2client.values()))
        self.words = self._sums({name: len(said.split()) for name, said in self.data.text.items()})

    def errors(self, folder: Path) -> np.ndarray:
        """(clients,) of FOLDER/text."""
        heard = read_table(folder / "text", values="optional")
        if heard.keys() != self.data.text.keys():
            raise UserError(f"not the utterances of {self.data.path}", path=folder / "text")
        return self._sums({
            name: count_errors(said.split(), heard[name].split()).errors
            for name, said in self.data.text.items()
        })  # fmt: skip

    def _sums(self, values: Mapping[str, int]) -> np.ndarray:
        sums = dict.fromkeys(self.clients, 0)
        for name, value in values.items():
            sums[self.data.utt2client[name]] += value
        return np.array([sums[client] for client in self.clients], float)


def relative(own: np.ndarray, base: np.ndarray) -> str:
    """The change in %, with an interval by drawing clients; errors (seeds, clients)."""
    change = 100 * (own.sum() / base.sum() - 1)
    draws = speaker_draws(own.shape[1], 1000, 0, "relative")
    low, high = interval(100 * (draws @ own.sum(0) / (draws @ base.sum(0)) - 1))
    bounds = "" if np.isnan(low) else f" [{low:+.1f}, {high:+.1f}]"
    return f"{change:+.1f}{bounds}"


def table_2(rows: Sequence[Row], scores: Scores) -> str:
    """WER and what it cost, against the neural language model alone."""
    found = {row.name: np.stack([scores.errors(one) for one in row.folders]) for row in rows}
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
        cells.append([
            row.name,
            with_deviation([100 * errors.sum() / scores.words.sum() for errors in own], PERCENT),
            "-" if own is base else relative(own, base),
            f"{published:.2f}" if published else "-",
            "-" if own is base else change,
            *cost(row.experiments),
        ])  # fmt: skip
    return format_markdown(header, cells)


def cost(experiments: Sequence[Path]) -> tuple[str, str]:
    """Bytes of a client both ways, and seconds of work of one, means over seeds."""
    if not experiments:
        return "-", "-"
    sizes = [read_cost(Experiment(path)).client_bytes for path in experiments]
    seconds = []
    for path in experiments:
        rows = [row for row in read_ledger(Experiment(path)) if row.client != SERVER_ROW]
        seconds.append(sum(row.seconds for row in rows) / len({row.client for row in rows}))
    return size_text(statistics.fmean(sizes)), f"{statistics.fmean(seconds):.2f}"


def sweep_rows(exp: Path, seeds: Sequence[int], name: str) -> list[tuple[dict[str, str], ...]]:
    """The settings of a sweep, each a row by seed."""
    numbers = ("wer", "relative", "low", "high")
    paths = [exp / "sweeps" / f"seed{seed}" / f"{name}.tsv" for seed in seeds]
    tables = [read_tsv(path, None, numbers) for path in paths]
    return list(zip(*tables, strict=True))


def wers(rows: Sequence[dict[str, str]]) -> list[float]:
    return [float(row["wer"]) for row in rows]


def figures(rows: Sequence[dict[str, str]]) -> list[str]:
    """WER, and its change with an interval; means over seeds, of bounds too."""
    change, low, high = (
        statistics.fmean(float("nan") if row[name] == "-" else float(row[name]) for row in rows)
        for name in ("relative", "low", "high")
    )
    bounds = "" if np.isnan(low) else f" [{low:+.1f}, {high:+.1f}]"
    return [with_deviation(wers(rows), PERCENT), f"{change:+.1f}{bounds}"]


def table_3(exp: Path, seeds: Sequence[int]) -> str:
    header = ["alpha", "beta", "sigma", "WER %", "relative % [95 %]", f"{PAPER}, WER %"]
    cells = []
    for name in ("sigma", "beta", "alpha"):
        for rows in sweep_rows(exp, seeds, name):
            key = rows[0]["alpha"], rows[0]["beta"], rows[0]["sigma"]
            cells.append([*key, *figures(rows), TABLE_3.get(key, "-")])
    for rows in sweep_rows(exp, seeds, "continuous"):
        more = "refreshed after each utterance"
        more += ", normalised" * (rows[0]["normalise"] == "True")
        cells.append(["0.5", "0.25", f"5.0, {more}", *figures(rows), "-"])
    return format_markdown(header, cells)


def table_4(exp: Path, seeds: Sequence[int]) -> str:
    """Privacy, with what seeds on the same data cost together where epsilon is a promise."""
    header = ["Mechanism", "epsilon", f"of {len(seeds)} seeds", "WER %", "relative % [95 %]"]
    header.append(f"{PAPER}, WER %")
    ((without,), (nothing,)) = (sweep_rows(exp, seeds, name) for name in ("none", "nothing"))
    cells: list[list[object]] = [
        ["none", "-", "-", *figures(without), TABLE_3[("0.5", "0.25", "0.1")]],
        ["nothing released (alpha 0)", "0", "0", *figures(nothing), "-"],
    ]
    for name, title in MECHANISMS.items():
        for rows in sweep_rows(exp, seeds, name):
            epsilon, promised = rows[0]["epsilon"], name != "paper"
            published = "-" if promised else TABLE_4.get(epsilon, "-")
            added = f"{len(seeds) * float(epsilon):g}" if promised else "-"
            cells.append([title, epsilon, added, *figures(rows), published])
    return format_markdown(header, cells)


def words_table(exp: Path, seeds: Sequence[int]) -> str:
    """What private words, in either pass, and the density ratio add to FMP."""
    header = ["", "WER %", "relative % [95 %]", "listed words said", "of them missed %"]
    plain, *_, second = sweep_rows(exp, seeds, "words")
    first = sweep_rows(exp, seeds, "first")
    bonus, in_first = values_of(second, "bonus"), first_bonuses(exp, seeds)
    density = sweep_rows(exp, seeds, "density")[-1]
    cells = []
    for title, rows in (
        ("FMP", plain),
        (f"private words, bonus {bonus} in the second pass", second),
        (f"private words, bonus {in_first} in the first pass", first[0]),
        ("private words, in both", first[-1]),
        (f"density ratio, weight {values_of(density, 'density')}", density),
    ):
        missed = [100 * int(row["missed"]) / max(1, int(row["listed"])) for row in rows]
        listed = statistics.fmean(int(row["listed"]) for row in rows)
        cells.append(
            [title, *figures(rows), f"{listed:.0f}", with_deviation(missed, "{:.1f}".format)]
        )
    return format_markdown(header, cells)


def first_bonuses(exp: Path, seeds: Sequence[int]) -> str:
    """Bonuses of the first pass, which no sweep varies."""
    files = [exp / "nnlm" / f"seed{seed}" / "first_bonus.yaml" for seed in seeds]
    return ", ".join(f"{value:g}" for value in sorted({read_yaml(one)["bonus"] for one in files}))


def cut_by(exp: Path, seeds: Sequence[int]) -> str:
    """How stage 9 cuts groups for differential privacy: by the clock, where there are times."""
    timed = "span" in read_yaml(exp / "nnlm" / f"seed{seeds[0]}" / "bounds.yaml")
    return "by the clock" if timed else "evenly"


def values_of(rows: Sequence[dict[str, str]], option: str) -> str:
    """The values that an option has, of all seeds."""
    return ", ".join(f"{value:g}" for value in sorted({float(row[option]) for row in rows}))


def plot_epsilon(path: Path, exp: Path, seeds: Sequence[int], base: float, title: str) -> None:
    """WER against epsilon, with the line of the baseline without adaptation."""
    from fedtools.files.drawing import drawing, look

    with drawing(path, (5.6, 4.2)) as figure:
        axes = figure.subplots()
        for index, (name, label) in enumerate(MECHANISMS.items()):
            settings = sweep_rows(exp, seeds, name)
            epsilons = [float(rows[0]["epsilon"]) for rows in settings]
            means = [statistics.fmean(wers(rows)) for rows in settings]
            axes.plot(epsilons, means, label=label, **look(index))
        (without,) = sweep_rows(exp, seeds, "none")
        noiseless = statistics.fmean(wers(without))
        axes.axhline(noiseless, color="0.4", linestyle=":", label="FMP without noise")
        (nothing,) = sweep_rows(exp, seeds, "nothing")
        alone = statistics.fmean(wers(nothing))
        axes.axhline(alone, color="0.6", linestyle="-.", label="FMP, nothing released (alpha 0)")
        axes.axhline(base, color="0.2", linestyle="--", label="no adaptation")
        axes.set_xscale("log")
        # Changes of less than a hundredth of the WER shall not fill the picture.
        low, high = axes.get_ylim()
        if high - low < 0.02 * base:
            axes.set_ylim(0.98 * base, 1.02 * base)
        axes.set_xlabel("epsilon (a small one protects more)")
        axes.set_ylabel("WER (%)")
        figure.legend(loc="outside lower center", ncols=1, fontsize=8)
        axes.set_title(title, fontsize=9)


def rows_of(
    exp: Path, seeds: Sequence[int], rounds: Sequence[int], private: str | None
) -> list[Row]:
    """The rows of table 2; `private` is the folder of a federation with differential privacy."""

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
) -> None:
    """Write the section, and the picture beside the page."""
    scores, caption = Scores(data), page.corpus.caption
    rows = rows_of(exp, seeds, rounds, private)
    base = np.stack([scores.errors(one) for one in rows[1].folders]).sum(1) / scores.words.sum()
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
        f"{len(scores.clients)} clients"
    )
    parts = [
        f"## {caption}",
        head,
        f"**{caption}: second-pass rescoring** (table 2 of {PAPER}) on {counted}. Relative changes "
        "are against NNLM rescoring alone, intervals by drawing clients, of all seeds' errors "
        "together; means ± standard deviations over seeds. Published figures are not measured "
        "here.",
        table_2(rows, scores),
        f"**{caption}: settings of FMP, T = {max(rounds)}** (table 3), on the same stored scores. "
        "Bounds of intervals, here and below, are means over the seeds.",
        table_3(exp, seeds),
        f"**{caption}: private words and density ratio**, T = {max(rounds)}. Clients list words of "
        "what they say first, as they have corrected it, that the background text hardly has; "
        "bonuses and weight by dev. Listed words are counted in what is said after that. Changes "
        "with a first pass of private words are against the NNLM alone on its lists.",
        words_table(exp, seeds),
        f"**{caption}: differential privacy, T = {max(rounds)}, sigma 0.1, groups cut "
        f"{cut_by(exp, seeds)}** (table 4, where the paper's groups are even). What each epsilon "
        "is promised for: README.md. Seeds are of the same people, so that what they release adds "
        "up, and so do the rows. Each row was tried in memory: of these WERs, which are counted "
        "against what was said, epsilon promises nothing.",
        table_4(exp, seeds),
        image(title, picture.name),
    ]
    section = "\n\n".join(part.strip() for part in parts)
    write_text(path, with_section(path, page.section, section))


def numbers(text: str) -> list[int]:
    """Numbers between blanks, for argparse."""
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
        write_report(
            options.exp,
            options.data,
            options.results,
            page,
            options.seeds,
            options.rounds,
            options.private,
        )


if __name__ == "__main__":
    main()
