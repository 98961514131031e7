#!/usr/bin/env python3
"""Write a section of RESULTS.md from what the attacks' recipe has left.

    report.py EXP DATA RESULTS.md --section NAME --corpus NAME --release NAME [...]

EXP holds global/, part1/, part2/, a1.<part>.<sets>/a1.tsv and a2/a2.h<layer>.tsv; DATA holds
partition.txt; --updates NAME=DIR is a folder that utils/attack_updates.sh has written, of what NAME
calls; NAME:ONE=DIR where ONE alone of that was its --exp, which costs and membership are of. Draws
RESULTS-<section>-layers.png (figures 4 and 5 of Tomashenko et al. 2022) and, of error trade-offs,
RESULTS-<section>-det.png beside the page. Leaves the page's other sections as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from scipy.stats import norm

from fedtools.attack.backend import PLDA, WAYS
from fedtools.attack.verify import COLUMNS, EASY, KINDS, OTHER, SAME
from fedtools.files.atomic import write_text
from fedtools.files.errors import UserError, exit_with_message
from fedtools.files.tables import format_markdown, read_tsv
from fedtools.files.text_files import read_text
from fedtools.report.options import add_page_options, page_of
from fedtools.report.page import (
    Page,
    Row,
    image,
    pooled_line,
    provenance,
    read_each,
    weight_lines,
    with_section,
)

PAPER = "Tomashenko et al. 2022"
# Table 2, EER in %, on 463 target trials of Part-2.
TABLE_2 = {("A1", "1"): "0.86", ("A1", "5"): "7.11", ("A2", "1"): "12.31", ("A2", "5"): "1.94"}
PLACES = {"affine": "before the ReLU", "relu": "after the ReLU", "norm": "after BatchNorm"}
NUMBERS = ("EER%", "low", "high")
TRIALS = {
    EASY: "easy trials",
    SAME: "target trials of one recording",
    OTHER: "target trials of two recordings",
}
SETS = {"part2": "Part-2", "part1+part2": "Part-1 + Part-2"}
MEASURES = ("minDCF", "minCllr", "Dsys", "TPR@0.1%", "TPR@1%", "targets", "others")
LEGAL = ("linked%", "singled%", "speakers")

Rows = Sequence[dict[str, str]]


def read_figures(exp: Path) -> tuple[dict[tuple[str, str], Rows], dict[str, Rows]]:
    """The rows of A1 by part of the layer and set of models, and of A2 by layer."""
    first: dict[tuple[str, str], Rows] = {
        (place, sets): read_tsv(path, COLUMNS, NUMBERS)
        for place in PLACES
        for sets in SETS
        if (path := exp / f"a1.{place}.{sets}" / "a1.tsv").exists()
    }
    paths = sorted((exp / "a2").glob("a2.h*.tsv"), key=lambda path: (len(path.name), path.name))
    second: dict[str, Rows] = {
        path.stem.partition(".h")[2]: read_tsv(path, COLUMNS, NUMBERS)
        for path in paths
        if ".det" not in path.name
    }
    if not first:
        raise UserError("no a1.*/a1.tsv", path=exp, remedy="run stage 7")
    return first, second


def rate(row: dict[str, str]) -> str:
    """An error rate with its interval; of few trials the interval alone."""
    bounds = f"[{row['low']}, {row['high']}]"
    return bounds if row["EER%"] == "-" else f"{row['EER%']} {bounds}"


def picked(rows: Rows, trials: str, scores: str) -> list[dict[str, str]]:
    return [row for row in rows if row["trials"] == trials and row["scores"] == scores]


def layer_table(rows: Rows, trials: str) -> str:
    """EER of A1 by layer, by means, deviations and both; other measures of both."""
    names = MEASURES + (LEGAL if trials == EASY else ())
    header = ["Layer", "EER %, both", "means", "deviations", *names]
    ways = [picked(rows, trials, way) for way in ("both", "means", "deviations")]
    cells = [
        [own[0]["layer"], *map(rate, own), *(own[0][name] for name in names)]
        for own in zip(*ways, strict=True)
    ]
    return format_markdown(header, cells)


def scores_table(rows: Rows, trials: str) -> str:
    """EER of A1 by layer and score, by means and deviations together and by deviations alone."""
    ways = {
        f"{way}, {score}": picked(rows, trials, way if score == "literal" else f"{way}, {score}")
        for way in ("both", "deviations")
        for score in ("literal", "unit", "cohort")
    }
    found = {name: own for name, own in ways.items() if own}
    cells = [[own[0]["layer"], *map(rate, own)] for own in zip(*found.values(), strict=True)]
    return format_markdown(["Layer", *found], cells)


def updates_table(rows: Rows) -> str:
    """What the attack on weights has of each part of the model."""
    header = ["Part", "Scores", "Trials", "EER %", "Cllr", "minCllr", "TPR@1%", "linked%"]
    cells = [
        [row["layer"], row["scores"], row["trials"], rate(row), *(row[name] for name in header[4:])]
        for row in rows
    ]
    return format_markdown(header, cells, "lll" + "r" * 5)


def attacks_table(first: Rows, second: dict[str, Rows], trials: str) -> str:
    """Table 2: both attacks at the layers that A2 was trained for."""
    layers = list(second)
    header = ["Attack", *(cell for h in layers for cell in (f"h={h}", f"h={h}, published"))]
    ours = {"A1": {row["layer"]: row for row in picked(first, trials, "both")}}
    numbers = {h: list(ours["A1"].values())[int(h) - 1] for h in layers}
    found = {"A1": numbers}
    for way in WAYS:
        name = "A2" if way == PLDA else f"A2, {way}"
        found[name] = {h: picked(rows, trials, way)[0] for h, rows in second.items()}
    cells = [
        [name, *(cell for h in layers for cell in (rate(own[h]), TABLE_2.get((name, h), "-")))]
        for name, own in found.items()
    ]
    return format_markdown(header, cells)


def measures_table(second: dict[str, Rows], trials: str) -> str:
    """What A2 has beside error rates, at each layer and by each of its scores."""
    names = ("minDCF", "Cllr", *MEASURES[1:], *(LEGAL if trials == EASY else ()))
    cells = [
        [f"h={h}", way, *(row[name] for name in names)]
        for h, rows in second.items()
        for way in WAYS
        for row in picked(rows, trials, way)
    ]
    return format_markdown(["Layer", "Scores", *names], cells, "ll" + "r" * len(names))


def activations(place: str) -> str:
    """Where both attacks take activations: A2 after the ReLU, A1 there if it did."""
    if place == "relu":
        return f"activations {PLACES['relu']}"
    return f"activations {PLACES[place]} for A1, {PLACES['relu']} for A2"


def second_attack(caption: str, place: str, first: Rows, second: dict[str, Rows]) -> Iterable[str]:
    """Captions and tables of A2, and of A1 beside it, whose activations are of `place`."""
    where = activations(place)
    found = {row["trials"] for rows in second.values() for row in rows}
    for trials in (kind for kind in KINDS if kind in found):
        yield (
            f"**{caption}: attacks A1 and A2 on Part-2, {TRIALS[trials]}, EER %** (table 2), "
            f"{where}. Published figures are not measured here."
        )
        yield attacks_table(first, second, trials)
        yield (
            f"**{caption}: attack A2 on Part-2, {TRIALS[trials]}, other measures**. Cllr is of "
            "log-likelihood ratios, which PLDA's scores alone are calibrated to be."
        )
        yield measures_table(second, trials)


def updates_tables(caption: str, names: str, folder: Path) -> Iterable[str]:
    """Captions and tables of what `utils/attack_updates.sh` has left.

    Args:
        names: of the models: NAME, or NAME:ONE, where costs and membership are of ONE alone.
    """
    name, _, one = names.partition(":")
    one = one or name
    tables = (
        (f"{name}: attributes of speakers, by layer, without a defence", "defence0/attributes.tsv"),
        (f"{one}: membership of a client's training data", "membership.tsv"),
    )
    weights = folder / "defence0" / "weights.tsv"
    if weights.exists() and (rows := read_tsv(weights, COLUMNS, NUMBERS)):
        yield (
            f"**{caption}, {name}: attack on what was changed of the weights, without a defence**: "
            "cosines from the mean of other people's models, by part of the model; `input` and "
            "`constant` are read out of the first layer, `together` is a regression of all."
        )
        yield updates_table(rows)
    card = folder / "card.md"
    if not card.exists():
        raise UserError("no card.md", path=folder, remedy="run utils/attack_updates.sh")
    yield f"{caption}, {name}; membership and costs are of {one} alone."
    yield read_text(card)
    for title, path in tables:
        if (folder / path).exists() and (rows := read_tsv(folder / path, None)):
            yield f"**{caption}, {title}**"
            yield format_markdown(list(rows[0]), [list(row.values()) for row in rows])


def plot_layers(path: Path, first: dict[tuple[str, str], Rows], title: str) -> None:
    """Figures 4 and 5: EER by layer, a panel for each place of the layer.

    Of few trials there are intervals instead, as there is no rate; other intervals are in tables.
    """
    from matplotlib.ticker import MaxNLocator

    from fedtools.files.drawing import drawing, look

    places = list(dict.fromkeys(place for place, _ in first))
    with drawing(path, (4.2 * len(places) + 0.4, 3.2)) as figure:
        panels = figure.subplots(1, len(places), squeeze=False, sharey=True)[0]
        for axes, place in zip(panels, places, strict=True):
            lines = [
                (SETS[sets] + (f", {way}" if way != "both" else ""), picked(rows, EASY, way))
                for (where, sets), rows in first.items()
                if where == place
                for way in (("both", "means", "deviations") if sets == "part2" else ("both",))
            ]
            for index, (name, rows) in enumerate(lines):
                known = [(n, row) for n, row in enumerate(rows, 1) if row["EER%"] != "-"]
                if known:
                    places_of, own = zip(*known, strict=True)
                    values = [float(row["EER%"]) for row in own]
                    axes.plot(places_of, values, label=name, **look(index))
                else:
                    middle = [(float(r["low"]) + float(r["high"])) / 2 for r in rows]
                    errors = [[m - float(r["low"]) for m, r in zip(middle, rows, strict=True)]] * 2
                    numbers = range(1, len(rows) + 1)
                    axes.errorbar(numbers, middle, errors, label=name, **look(index))
            axes.set_title(f"activations {PLACES[place]}", fontsize=9)
            axes.set_xlabel("Hidden layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("EER (%)")
        lines = panels[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(lines[0]), fontsize=8)
        figure.suptitle(title, fontsize=10)


def plot_det(path: Path, curves: Iterable[tuple[str, Path]], title: str) -> None:
    """Detection error trade-off, both rates on normal deviates."""
    from fedtools.files.drawing import drawing, look

    columns = ("threshold", "false_rejects", "false_accepts")
    ticks = [0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99, 0.999]
    reached: list[float] = []
    with drawing(path, (4.4, 4.0)) as figure:
        axes = figure.subplots()
        for index, (name, file) in enumerate(curves):
            rows = read_tsv(file, columns, columns[1:])
            points = [(float(r["false_accepts"]), float(r["false_rejects"])) for r in rows]
            inside = [(x, y) for x, y in points if 0 < x < 1 and 0 < y < 1]
            if inside:
                xs, ys = (norm.ppf(values) for values in zip(*inside, strict=True))
                reached += [*xs, *ys]
                axes.plot(xs, ys, label=name, **{**look(index), "marker": None})
        for axis, what in ((axes.xaxis, "False accepts (%)"), (axes.yaxis, "False rejects (%)")):
            axis.set_ticks(norm.ppf(ticks), [f"{100 * tick:g}" for tick in ticks])
            axis.set_label_text(what)
        # One scale for both, so that the diagonal has the equal error rates.
        ends = (min(reached, default=-2.0) - 0.1, max(reached, default=2.0) + 0.1)
        axes.set(xlim=ends, ylim=ends, aspect="equal")
        axes.axline((0, 0), slope=1, color="0.8", linewidth=0.8, zorder=0)
        axes.legend(fontsize=8)
        axes.set_title(title, fontsize=9, wrap=True)


def write_report(
    exp: Path, data: Path, path: Path, page: Page, updates: Sequence[tuple[str, Path]]
) -> None:
    """Write the section, and the pictures beside the page."""
    first, second = read_figures(exp)
    caption = page.corpus.caption
    main = ("relu", "part2") if ("relu", "part2") in first else next(iter(first))
    pictures = [path.with_name(f"{path.stem}-{page.section}-{n}.png") for n in ("layers", "det")]
    plot_layers(pictures[0], first, f"Attack A1, {caption}")
    folder = exp / f"a1.{'.'.join(main)}"
    layers = list(dict.fromkeys(row["layer"] for row in first[main]))
    some = [layers[0], layers[min(4, len(layers) - 1)]]
    curves = [(f"A1, {layer}", folder / f"a1.{layer}.{EASY}.det.tsv") for layer in some]
    curves += [(f"A2, h={h}", exp / "a2" / f"a2.h{h}.{EASY}.det.tsv") for h in second]
    plot_det(pictures[1], curves, f"Attacks on Part-2, {activations(main[0])}, {caption}")
    heard = read_each([Row("global", exp / "global", next((exp / "global").glob("decode_valid*")))])
    parts = [
        f"## {caption}",
        provenance(
            path,
            page,
            seeds=[run.seed for one in heard for run in one.runs if run.seed is not None],
            rounds=[run.cost.rounds for one in heard for run in one.runs],
            pictures=[picture.name for picture in pictures],
            experiments=[exp / "global", exp / "part1", exp / "part2"],
        ),
        f"**{caption}: who is in which set** (table 1 of {PAPER}, published figures beside ours)",
        f"```\n{read_text(data / 'partition.txt').rstrip()}\n```",
        f"{caption}, the global model on its validation data, held-out utterances of its own "
        "speakers, by which its best rounds and the weights of its search were chosen (so that "
        f"other utterances cost it more): {pooled_line(heard[0])}.",
        *weight_lines(heard),
    ]
    for (place, sets), rows in first.items():
        for trials in KINDS:
            if chosen := [row for row in rows if row["trials"] == trials]:
                parts += [
                    f"**{caption}: attack A1 on {SETS[sets]}, activations {PLACES[place]}, "
                    f"{TRIALS[trials]}** (figures 4 and 5): EER with 95 % intervals; the other "
                    "measures are of means and deviations together.",
                    layer_table(chosen, trials),
                ]
                if any(row["scores"] != "both" for row in chosen if "both" in row["scores"]):
                    parts += [
                        f"**{caption}: scores of attack A1 on {SETS[sets]}, activations "
                        f"{PLACES[place]}, {TRIALS[trials]}**, EER %: equation 4 as it is written, "
                        "of vectors of unit length, and cosines centred on and normed by a cohort.",
                        scores_table(chosen, trials),
                    ]
    parts += second_attack(caption, main[0], first[main], second)
    for name, folder in updates:
        parts += updates_tables(caption, name, folder)
    titles = (
        f"EER of attack A1 by layer, {TRIALS[EASY]}",
        f"DET curves, {TRIALS[EASY]}, {activations(main[0])}",
    )
    for title, picture in zip(titles, pictures, strict=True):
        parts += [f"**{caption}: {title}**", image(f"{title}, {caption}", picture.name)]
    section = "\n\n".join(part.strip() for part in parts)
    write_text(path, with_section(path, page.section, section))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("exp", "data", "results"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--updates", metavar="NAME[:ONE]=DIR", action="append", default=[])
    add_page_options(parser)
    options = parser.parse_args()
    page = page_of(parser, options, Page)
    updates = [text.partition("=")[::2] for text in options.updates]
    if not all(name and folder for name, folder in updates):
        parser.error("--updates: write NAME=DIR or NAME:ONE=DIR")
    with exit_with_message("report.py"):
        folders = [(name, Path(folder)) for name, folder in updates]
        write_report(options.exp, options.data, options.results, page, folders)


if __name__ == "__main__":
    main()
