#!/usr/bin/env python3
"""Write a section of RESULTS.md that compares FMP with controls, with near and far text (arms).

    arms.py ARMS RESULTS.md --arms "near far" --seeds "0 1 2" --rounds 10 [...]

ARMS/<arm>/rows/seed<n>.tsv come from `fedtools rescore-rows`, ARMS/far/sweeps from the recipe's
stage 9. Differences are paired: on the same utterances, over seeds of the neural model and persons
(see fedtools/score/crossed.py). Intervals are not adjusted; bold figures are better by a p value
that is adjusted for all columns of its arm. Writes RESULTS-<section>-errors.gz next to the page:
the errors of each person, from which remake.py makes the section again. Prints the summary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from record import write_record
from report import numbers
from settings import PAPER, PERCENT, plot_epsilon, table_4
from summary import Row, note_of, relative, summary_of

from fedtools.core.atomic import write_text
from fedtools.core.config import read_yaml
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.tables import count, format_markdown, read_tsv, with_deviation
from fedtools.data.text_units import WORD
from fedtools.federation.fmp.rows import ALL, COLUMNS, SOME
from fedtools.report.intervals import record_file
from fedtools.report.options import add_page_options, page_of
from fedtools.report.page import Page, image, provenance
from fedtools.report.section import Section, page_with
from fedtools.report.summary import Summary, on_terminal
from fedtools.score import bootstrap
from fedtools.score.crossed import Difference, differences, holm
from fedtools.score.utterances import Utterances

# Rows of conf/fmp.yaml, section sweeps.rows -> their names in tables.
BASE = "nnlm"
TITLES = {
    "nnlm": "NNLM",
    "fmp": "FMP",
    "alpha": "alpha alone (0.5)",
    "beta25": "beta alone (0.25)",
    "other25": "beta 0.25, another person's counts",
    "beta75": "beta alone (0.75)",
    "other75": "beta 0.75, another person's counts",
    "static": "static unigram of the training meetings, no federation",
    "refreshed": "FMP, refreshed after each utterance",
    "adapted": "FMP, counts of the best hypothesis after adaptation",
    "posterior": "FMP, counts by posterior weights",
    "reference": "a bound: FMP, counts of the reference text",
}
ARMS = {
    "near": "near: both models trained on other meetings",
    "far": "far: both models trained on open chat",
}
# Threshold fixed before any result was seen: change of the far arm's row "fmp", in % of its NNLM.
REPRODUCED = -2.0
# Of each arm, in the summary.
MAIN = (BASE, "fmp", "alpha", "beta25")
OWN = (("beta25", "other25"), ("beta75", "other75"))


Arm = Mapping[tuple[str, str], Row]


def read_arm(folder: Path, seeds: Sequence[int]) -> dict[tuple[str, str], Row]:
    """Read (row, way of scoring) -> errors, of all seeds.

    Raises:
        UserError: if seeds differ in their rows, persons or words.
    """
    tables: list[dict[tuple[str, str], Utterances]] = []
    for seed in seeds:
        path = folder / "rows" / f"seed{seed}.tsv"
        tables.append(found := read_rows(path))
        first = tables[0]
        if found.keys() != first.keys() or not all(
            one.is_of_same_data(first[key]) for key, one in found.items()
        ):
            raise UserError("rows, persons or words differ from the first seed's", path=path)
    return {
        key: Row(
            folder.name,
            f"{folder.name}: {TITLES.get(key[0], key[0])}",
            {seed: table[key] for seed, table in zip(seeds, tables, strict=True)},
        )
        for key in tables[0]
    }


def read_rows(path: Path) -> dict[tuple[str, str], Utterances]:
    """Read a table of `fedtools rescore-rows`; a person's words count as one utterance."""
    found: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for line, row in enumerate(read_tsv(path, COLUMNS), 2):
        counts = count(row, "words", path, line), count(row, "errors", path, line)
        found.setdefault((row["row"], row["scored"]), []).append((row["person"], *counts))
    return {
        key: Utterances(
            [(bootstrap.ALL, person, person) for person, _, _ in rows],
            {WORD.rate: np.array([words for _, words, _ in rows], int)},
            {WORD.rate: np.array([errors for _, _, errors in rows], int)},
        )
        for key, rows in found.items()
    }


def arm_table(arm: Arm, ways: Sequence[str]) -> str:
    """Return an arm's table: WER and its difference to the NNLM's, with and without fillers."""
    names = [name for name in TITLES if (name, ALL) in arm]
    header, columns = ["Method"], [[TITLES[name] for name in names]]
    changes = [
        differences([
            arm[name, way].effects(arm[BASE, way]) if name != BASE else None for name in names
        ])
        for way in ways
    ]  # fmt: skip
    # All columns are one family of tests.
    adjusted = iter(holm([one.p if one else np.nan for found in changes for one in found]))
    for way, found in zip(ways, changes, strict=True):
        base = arm[BASE, way]
        header += ["WER %" if way == ALL else "without fillers, WER %", "to NNLM, relative %"]
        columns.append([with_deviation(arm[name, way].rates(), PERCENT) for name in names])
        columns.append([
            "-" if one is None else relative(one, base, p < 0.05 and one.value < 0)
            for one, p in zip(found, adjusted, strict=False)
        ])  # fmt: skip
    return format_markdown(header, [list(row) for row in zip(*columns, strict=True)])


def own_counts(arms: Mapping[str, Arm]) -> str:
    """Return the table of beta alone against another person's counts of the same round."""
    cells = []
    for name, arm in arms.items():
        cells.append([ARMS[name]])
        for own, other in OWN:
            found = arm[own, ALL].less(arm[other, ALL])
            cells[-1].append(relative(found, arm[BASE, ALL]))
    header = ["Arm", *(f"{TITLES[own]}, own counts to another person's, %" for own, _ in OWN)]
    return format_markdown(header, cells)


def chosen(folder: Path, names: Sequence[str], seeds: Sequence[int]) -> str:
    """Return a table of the values chosen on dev for each arm, by seed."""
    cells = []
    for name in names:
        models = [folder / name / "nnlm" / f"seed{seed}" for seed in seeds]
        weights = [read_yaml(one / "weights.yaml") for one in models]
        scales = [read_yaml(one / "scale.yaml") for one in models]
        cells.append([
            ARMS[name],
            ", ".join(f"{one['lm_weight']:g}" for one in weights),
            ", ".join(f"{one['word_score']:g}" for one in weights),
            ", ".join(f"{one['scale']:g}" for one in scales),
        ])  # fmt: skip
    header = ["Arm", "LM weight", "word score", "lambda (0: dev is best without FMP)"]
    return format_markdown(header, cells)


def decide(found: Difference, base: Row, limit: float) -> str:
    """Return "yes", "no" or "undecided": is the whole interval below a limit, in % of base WER."""
    rate = float(np.mean(base.rates()))
    if np.isnan(found.low):
        return "undecided (too few persons)"
    if 100 * found.high / rate < limit:
        return "yes"
    return "no" if 100 * found.low / rate >= limit else "undecided"


def verdicts(arms: Mapping[str, Arm]) -> list[str]:
    """Return the conclusions from the rows by the predetermined rules."""
    if "far" not in arms:
        return ["- The far arm, which decides whether the paper is reproduced, was not run."]
    far = arms["far"]
    base, beta = far[BASE, ALL], far["beta25", ALL].less(far["other25", ALL])
    fmp = far["fmp", ALL].less(base)
    return [
        f"- Reproduced ({TITLES['fmp']}, far arm: the whole interval is below {REPRODUCED:g} % of "
        f"NNLM): **{decide(fmp, base, REPRODUCED)}**, {relative(fmp, base)} %.",
        f"- Personalised ({TITLES['beta25']}, far arm: the whole interval against another person's "
        f"counts is below 0): **{decide(beta, base, 0.0)}**, {relative(beta, base)} %.",
    ]


def write_report(
    folder: Path, path: Path, page: Page, names: Sequence[str], seeds: Sequence[int], rounds: int,
    experiments: Sequence[Path],
) -> Summary:  # fmt: skip
    """Write the section, and files next to the page; return its first table."""
    arms = {name: read_arm(folder / name, seeds) for name in names}
    caption = page.corpus.caption
    picture = path.with_name(f"{path.stem}-{page.section}-epsilon.png")
    pictures = [picture.name] if "far" in arms else []
    head = provenance(
        path, page, seeds=seeds, rounds=[rounds], pictures=pictures, experiments=experiments
    )
    rows = [arm[name, ALL] for arm in arms.values() for name in MAIN if (name, ALL) in arm]
    summary = summary_of(rows)
    below = tables_of_arms(folder, arms, seeds, rounds, caption)
    if "far" in arms:
        title = f"WER and privacy, far arm, {caption}"
        base = float(np.mean(arms["far"][BASE, ALL].rates()))
        plot_epsilon(picture, folder / "far", seeds, base, title)
        below.append(image(title, picture.name))
    above = [f"## {caption}", head, f"**{caption}: summary.** {reading(names, len(seeds) > 1)}"]
    section = Section(page.section, caption, above, [part.strip() for part in below])
    new = page_with(path, section, summary)
    write_record(record_file(path, page.section), section, rows)
    write_text(path, new)
    return summary


def reading(names: Sequence[str], several: bool) -> str:
    """Return how to read the summary, with what its arms are."""
    unmeasured = "like MB/client not measured, since rows are simulated on stored scores"
    arms = "; ".join(ARMS[name].replace(":", ",", 1) for name in names)
    return f"{note_of(f'the {TITLES[BASE]} of the same arm', unmeasured, several)} Arms: {arms}."


def tables_of_arms(
    folder: Path, arms: Mapping[str, Arm], seeds: Sequence[int], rounds: int, caption: str
) -> list[str]:
    """Return the verdicts and the tables of all arms, each below its text."""
    spoken = next(iter(arms.values()))[BASE, ALL].words
    parts = [
        f"**{caption}: the gain of FMP and its components** ({PAPER} reports -4.8 % for T = 10 on "
        f"AMI), T = {rounds}, on {int(spoken.sum()):,} words of {len(spoken)} persons. Differences "
        "are paired by utterance, in % of that arm's NNLM, with 95 % intervals over seeds of the "
        "neural model and persons; bold rows are better with Holm-adjusted p below 0.05 among the "
        "rows and columns of an arm. Lambda and weights were fixed on dev for each arm and seed.",
        "\n".join(verdicts(arms)),
        f"**{caption}: weights and lambda**, by seed.",
        chosen(folder, list(arms), seeds),
    ]
    for name, arm in arms.items():
        ways = [way for way in (ALL, SOME) if (BASE, way) in arm]
        parts += [f"**{caption}: arm {ARMS[name]}.**", arm_table(arm, ways)]
    parts += [f"**{caption}: own counts against another person's.**", own_counts(arms)]
    if "far" in arms:
        parts += [
            f"**{caption}: differential privacy in the far arm**, T = {rounds}, sigma 0.1, groups "
            "cut by the clock (table 4). Rows with noise are means over draws of the noise; the "
            "spread is the standard deviation over draws of the relative change in %, per seed.",
            table_4(folder / "far", seeds),
        ]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, metavar="ARMS")
    parser.add_argument("results", type=Path, metavar="RESULTS.md")
    parser.add_argument("--arms", required=True, type=str.split)
    parser.add_argument("--seeds", required=True, type=numbers)
    parser.add_argument("--rounds", required=True, type=int)
    parser.add_argument("--experiment", type=Path, action="append", default=[])
    add_page_options(parser)
    options = parser.parse_args()
    page = page_of(parser, options, Page)
    with exit_with_message("arms.py"):
        summary = write_report(
            *(options.folder, options.results, page, options.arms, options.seeds),
            options.rounds,
            options.experiment,
        )
        print(on_terminal(page.corpus.caption, summary, sys.stdout), end="")


if __name__ == "__main__":
    main()
