"""Tables and the plot of FMP's settings and of privacy, from the results of sweeps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtools.core.config import read_yaml
from fedtools.core.tables import format_markdown, read_tsv, with_deviation
from fedtools.score.crossed import mean_bounds

PAPER = "Liu and Peng 2022"
PERCENT = "{:.2f}".format
# Tables 3 and 4, AMI: WER in %.
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
    "paper": "the paper's equations 8 and 9 (weaker protection than claimed)",
    "utterance": "Laplace on bounded counts, per utterance",
    "doubt_utterance": "the same, clients ignoring releases that are mostly noise",
    "user": "Laplace on bounded counts, per user",
    "doubt_user": "the same per user, clients ignoring releases that are mostly noise",
}


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
    """Return table 4 on privacy, with the epsilon of all releases together if it is a guarantee.

    Each draw of noise is a release of the same people's counts, of each seed.
    """
    header = ["Mechanism", "epsilon", "of all seeds and draws", "WER %", "relative %"]
    header += ["spread of draws", "worst draw", f"{PAPER}, WER %"]
    (without,) = sweep_rows(exp, seeds, "none")
    published: object = TABLE_3[("0.5", "0.25", "0.1")]
    cells: list[list[object]] = [["none", "-", "-", *undrawn(without), published]]
    for rows in sweep_rows(exp, seeds, "nothing"):
        title = f"nothing released (alpha 0, beta {float(rows[0]['beta']):g})"
        cells.append([title, "0", "0", *undrawn(rows), "-"])
    for name, title in MECHANISMS.items():
        chosen = doubt_of(exp, seeds, name)
        for epsilon, by_seed in drawn(exp, seeds, name).items():
            promised = name != "paper"
            published = "-" if promised else TABLE_4.get(epsilon, "-")
            releases = sum(len(rows) for rows in by_seed)
            added = f"{releases * float(epsilon):g}" if promised else "-"
            cells.append([title + chosen, epsilon, added, *over_draws(by_seed), published])
    return format_markdown(header, cells)


def drawn(exp: Path, seeds: Sequence[int], name: str) -> dict[str, list[list[dict[str, str]]]]:
    """Return the rows of a sweep over epsilon: epsilon -> seed -> a row for each draw of noise."""
    found: dict[str, list[list[dict[str, str]]]] = {}
    for rows in sweep_rows(exp, seeds, name):
        by_seed = found.setdefault(rows[0]["epsilon"], [[] for _ in seeds])
        for own, row in zip(by_seed, rows, strict=True):
            own.append(row)
    return found


def over_draws(by_seed: Sequence[Sequence[dict[str, str]]]) -> list[str]:
    """Return mean WER and its mean change over draws and seeds, the spread, and the worst draw."""
    changes = [[float(row["relative"]) for row in rows] for rows in by_seed]
    everything = [one for rows in changes for one in rows]
    means = [statistics.fmean(wers(rows)) for rows in by_seed]
    # Variance within seeds, because differences between seeds are not due to the noise.
    spread = statistics.fmean(statistics.pvariance(rows) for rows in changes)
    draws = len(changes[0])
    spread *= draws / max(1, draws - 1)
    found = [with_deviation(means, PERCENT), f"{statistics.fmean(everything):+.1f}"]
    return [*found, f"{spread**0.5:.1f}" if draws > 1 else "-", f"{max(everything):+.1f}"]


def undrawn(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the cells of a row without noise, with an interval over seeds and clients."""
    return [*figures(rows), "-", "-"]


def doubt_of(exp: Path, seeds: Sequence[int], name: str) -> str:
    """Return the value tuned on dev for the rule by which clients ignore a release, as text."""
    if not name.startswith("doubt"):
        return ""
    files = [exp / "nnlm" / f"seed{seed}" / f"{name}.yaml" for seed in seeds]
    values = sorted({read_yaml(one)["doubt"] for one in files})
    return f" (doubt {', '.join(f'{value:g}' for value in values)})"


def words_table(exp: Path, seeds: Sequence[int]) -> str:
    """Return the table of FMP with private words, in either pass."""
    header = ["", "WER %", "relative % [95 %]", "listed words said", "of them missed %"]
    plain, *_, second = sweep_rows(exp, seeds, "words")
    first = sweep_rows(exp, seeds, "first")
    bonus, in_first = values_of(second, "bonus"), first_bonuses(exp, seeds)
    cells = []
    for title, rows in (
        ("FMP", plain),
        (f"private words, bonus {bonus} in the second pass", second),
        (f"private words, bonus {in_first} in the first pass", first[0]),
        ("private words, in both", first[-1]),
    ):
        missed = [100 * int(row["missed"]) / max(1, int(row["listed"])) for row in rows]
        listed = statistics.fmean(int(row["listed"]) for row in rows)
        cells.append(
            [title, *figures(rows), f"{listed:.0f}", with_deviation(missed, "{:.1f}".format)]
        )
    return format_markdown(header, cells)


def first_bonuses(exp: Path, seeds: Sequence[int]) -> str:
    """Return the bonuses of the first pass, which no sweep varies."""
    files = [exp / "nnlm" / f"seed{seed}" / "first_bonus.yaml" for seed in seeds]
    return ", ".join(f"{value:g}" for value in sorted({read_yaml(one)["bonus"] for one in files}))


def cut_by(exp: Path, seeds: Sequence[int]) -> str:
    """Return how stage 9 cuts groups for differential privacy: by time if times exist."""
    timed = "span" in read_yaml(exp / "nnlm" / f"seed{seeds[0]}" / "bounds.yaml")
    return "by the clock" if timed else "evenly"


def values_of(rows: Sequence[dict[str, str]], option: str) -> str:
    """Return the values of an option over all seeds, as text."""
    return ", ".join(f"{value:g}" for value in sorted({float(row[option]) for row in rows}))


def sweep_rows(exp: Path, seeds: Sequence[int], name: str) -> list[tuple[dict[str, str], ...]]:
    """Read the settings of a sweep, each with a row for each seed."""
    numbers = ("wer", "relative", "low", "high")
    paths = [exp / "sweeps" / f"seed{seed}" / f"{name}.tsv" for seed in seeds]
    tables = [read_tsv(path, None, numbers) for path in paths]
    return list(zip(*tables, strict=True))


def wers(rows: Sequence[dict[str, str]]) -> list[float]:
    return [float(row["wer"]) for row in rows]


def figures(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return WER and its change, means over seeds, with an interval over seeds and clients."""
    each = [
        [float("nan") if row[name] == "-" else float(row[name]) for row in rows]
        for name in ("relative", "low", "high")
    ]
    low, high = mean_bounds(*each)
    bounds = "" if np.isnan(low) else f" [{low:+.1f}, {high:+.1f}]"
    return [with_deviation(wers(rows), PERCENT), f"{statistics.fmean(each[0]):+.1f}{bounds}"]


def plot_epsilon(path: Path, exp: Path, seeds: Sequence[int], base: float, title: str) -> None:
    """Plot WER against epsilon, with a line for the baseline without adaptation."""
    from fedtools.core.drawing import drawing, line_style

    with drawing(path, (5.6, 4.2)) as figure:
        axes = figure.subplots()
        for index, (name, label) in enumerate(MECHANISMS.items()):
            settings = drawn(exp, seeds, name)
            means = [statistics.fmean(map(statistics.fmean, map(wers, rows)))
                     for rows in settings.values()]  # fmt: skip
            axes.plot([float(one) for one in settings], means, label=label, **line_style(index))
        (without,) = sweep_rows(exp, seeds, "none")
        noiseless = statistics.fmean(wers(without))
        axes.axhline(noiseless, color="0.4", linestyle=":", label="FMP without noise")
        # Which row dev would have chosen is unknown: the best one is an optimistic bound.
        alone = min(statistics.fmean(wers(rows)) for rows in sweep_rows(exp, seeds, "nothing"))
        axes.axhline(alone, color="0.6", linestyle="-.", label="FMP, nothing released (best beta)")
        axes.axhline(base, color="0.2", linestyle="--", label="no adaptation")
        axes.set_xscale("log")
        # Keep changes of less than a hundredth of the WER from filling the plot.
        low, high = axes.get_ylim()
        if high - low < 0.02 * base:
            axes.set_ylim(0.98 * base, 1.02 * base)
        axes.set_xlabel("epsilon (smaller protects more)")
        axes.set_ylabel("WER (%)")
        figure.legend(loc="outside lower center", ncols=1, fontsize=8)
        axes.set_title(title, fontsize=9)
