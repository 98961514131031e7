#!/usr/bin/env python3
"""Write a section of RESULTS.md from the results of the attacks' recipe.

    report.py EXP DATA RESULTS.md --section NAME --corpus NAME --release NAME [...]

EXP holds global/, part1/, part2/, a1.<part>.<sets>/a1.tsv and a2/a2.h<layer>.tsv; DATA holds
partition.txt. --updates NAME=DIR gives a folder that utils/attack_updates.sh wrote, and a name for
its models; with NAME:ONE=DIR, costs and membership are of ONE alone, which was its --exp. Draws
RESULTS-<section>-layers.png (figures 4 and 5 of Tomashenko et al. 2022) and the detection error
trade-offs RESULTS-<section>-det.png next to the page, and copies all rows of all attacks there as
RESULTS-<section>-<attack>.tsv. Leaves the page's other sections unchanged, and prints the lowest
error rate of each attack.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scipy.stats import norm

from fedtools.attack.speakers.backend import PLDA, WAYS
from fedtools.attack.speakers.verify import COLUMNS, EASY, KINDS, OTHER, SAME
from fedtools.attack.speakers.weights import WHOLE
from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.errors import UserError, exit_with_message
from fedtools.core.tables import (
    format_markdown,
    format_table,
    known_number,
    read_tsv,
    write_tsv,
)
from fedtools.core.text_files import read_text
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
PLACES = {"relu": "after the ReLU", "norm": "after BatchNorm"}
NUMBERS = ("EER%", "low", "high")
TRIALS = {
    EASY: "all",
    SAME: "same recording",
    OTHER: "other recording",
}
SETS = {"part2": "Part-2", "part1+part2": "Part-1 + Part-2"}

Rows = Sequence[dict[str, str]]


def read_figures(exp: Path) -> tuple[dict[tuple[str, str], Rows], dict[str, Rows]]:
    """Read the rows of A1 by part of the layer and set of models, and of A2 by layer."""
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
    """Format an error rate with its interval, or the interval alone if trials are few."""
    bounds = f"[{row['low']}, {row['high']}]"
    return bounds if row["EER%"] == "-" else f"{row['EER%']} {bounds}"


def picked(rows: Rows, trials: str, scores: str) -> list[dict[str, str]]:
    return [row for row in rows if row["trials"] == trials and row["scores"] == scores]


def middle_error(row: Mapping[str, str]) -> float:
    """Return the error rate, or its interval's middle if there are too few trials for a rate."""
    if row["EER%"] != "-":
        return float(row["EER%"])
    return (known_number(row["low"], math.inf) + known_number(row["high"], math.inf)) / 2


def best(rows: Rows, trials: str, scores: str) -> str:
    """Format the lowest error rate of all layers, and its layer, or "-" if there is none."""
    own = picked(rows, trials, scores)
    if not own:
        return "-"
    least = min(own, key=middle_error)
    return f"{rate(least)} at {least['layer']}"


def kinds_of(rows: Iterable[dict[str, str]]) -> list[str]:
    """Return the kinds of trials that occur."""
    found = {row["trials"] for row in rows}
    return [kind for kind in KINDS if kind in found]


def summary(first: dict[tuple[str, str], Rows], second: dict[str, Rows]) -> list[list[str]]:
    """Return the lowest error rate of each attack on all trials, below a header."""
    cells = [["Attack", "Models", "Activations", "EER (%)", "Layer"]]
    for (place, sets), rows in first.items():
        cells.append(["A1", SETS[sets], PLACES[place], *_lowest(rows, "both")])
    for way in WAYS:
        rows = [row for of_layer in second.values() for row in of_layer]
        if picked(rows, EASY, way):
            cells.append([f"A2, {way}", SETS["part2"], PLACES["relu"], *_lowest(rows, way)])
    return cells


def _lowest(rows: Rows, scores: str) -> tuple[str, str]:
    """Return the lowest error rate on all trials, and its layer."""
    found = best(rows, EASY, scores)
    value, _, layer = found.partition(" at ")
    return value, layer or "-"


def first_table(first: dict[tuple[str, str], Rows]) -> str:
    """Return A1's table: lowest error rate by place, set and score, for each kind of trials."""
    kinds = kinds_of(row for rows in first.values() for row in rows)
    cells = []
    for (place, sets), rows in first.items():
        for scores in dict.fromkeys(row["scores"] for row in rows):
            way, _, score = scores.partition(", ")
            own = [best(rows, kind, scores) for kind in kinds]
            cells.append([SETS[sets], PLACES[place], score or "literal", way, *own])
    header = ["Models", "Activations", "Score", "Of", *(TRIALS[kind] for kind in kinds)]
    return format_markdown(header, cells, "llll" + "r" * len(kinds))


def second_table(first: Rows, second: dict[str, Rows]) -> str:
    """Return table 2: both attacks at the layers of A2, for each kind of trials."""
    kinds = kinds_of(row for rows in second.values() for row in rows)
    cells = []
    for h, rows in second.items():
        layer = list(dict.fromkeys(row["layer"] for row in first))[int(h) - 1]
        ours = [row for row in first if row["layer"] == layer and row["scores"] == "both"]
        of_ways = [(way, [row for row in rows if row["scores"] == way]) for way in WAYS]
        for name, own in (("A1", ours), *of_ways):
            known = {row["trials"]: row for row in own}
            rates = [rate(known[kind]) for kind in kinds]
            ratios = [known[kinds[-1]][name] for name in ("Cllr", "minCllr")]
            attack = name if name == "A1" else f"A2, {name}"
            paper = TABLE_2.get(("A2" if name == PLDA else name, h), "-")
            cells.append([f"h={h}", attack, *rates, *ratios, paper])
    header = ["Layer", "Attack", *(TRIALS[kind] for kind in kinds), "Cllr", "minCllr", "published"]
    return format_markdown(header, cells, "ll" + "r" * (len(header) - 2))


def activations(place: str) -> str:
    """Describe where both attacks take activations: A2 after the ReLU, A1 at `place`."""
    if place == "relu":
        return f"activations {PLACES['relu']}"
    return f"activations {PLACES[place]} for A1, {PLACES['relu']} for A2"


def weights_table(rows: Rows) -> str:
    """Return the table of the attack on weight changes: the best part, and the whole models."""
    kinds = kinds_of(rows)
    layers = dict.fromkeys(row["layer"] for row in rows)
    parts = [one for one in layers if one not in WHOLE]
    least = min(parts, key=lambda one: middle_error(*picked_of(rows, kinds[-1], one)))
    cells = []
    for name in (least, *(one for one in WHOLE if one in layers)):
        own = [picked_of(rows, kind, name)[0] for kind in kinds]
        cells.append([name, own[0]["scores"], *map(rate, own), own[-1]["Cllr"], own[-1]["minCllr"]])
    header = ["Part", "Scores", *(TRIALS[kind] for kind in kinds), "Cllr", "minCllr"]
    return format_markdown(header, cells, "ll" + "r" * (len(header) - 2))


def picked_of(rows: Rows, trials: str, layer: str) -> list[dict[str, str]]:
    return [row for row in rows if row["trials"] == trials and row["layer"] == layer]


def updates_tables(caption: str, names: str, folder: Path, picture: Path) -> Iterable[str]:
    """Yield captions and tables of the results of `utils/attack_updates.sh`, and its card.

    Args:
        caption: the name of the corpus.
        names: the models' name: NAME, or NAME:ONE if costs and membership are of ONE alone.
        folder: the results.
        picture: path to which the card's picture is copied.
    """
    name, _, one = names.partition(":")
    one = one or name
    weights = folder / "defence0" / "weights.tsv"
    if weights.exists() and (rows := read_tsv(weights, COLUMNS, NUMBERS)):
        yield (
            f"**{caption}, {name}: attack on weight changes, without a defence**, EER %: cosines "
            "relative to the mean of other people's models, for the best part of the model and for "
            "`all`; `input` and `constant` are derived from the first layer, `together` is a "
            "regression of all parts."
        )
        yield weights_table(rows)
    card = folder / "card.md"
    if not card.exists():
        raise UserError("no card.md", path=folder, remedy="run utils/attack_updates.sh")
    yield f"{caption}, {name}; membership and costs are of {one} alone."
    yield read_text(card)
    with atomic_path(picture) as temporary:
        shutil.copyfile(folder / "card.png", temporary)
    yield image(f"Leakage card, {caption}, {name}", picture.name)


def keep_tables(path: Path, section: str, exp: Path, updates: Sequence[Path]) -> list[str]:
    """Copy all rows of all attacks to files next to the page; return the files' names."""
    sources: dict[str, list[tuple[str, Path]]] = {}
    for place in PLACES:
        for sets in SETS:
            sources.setdefault("a1", []).append(
                (f"{place}, {sets}", exp / f"a1.{place}.{sets}" / "a1.tsv")
            )
    sources["a2"] = [
        ("", one) for one in sorted((exp / "a2").glob("a2.h*.tsv")) if ".det" not in one.name
    ]
    for folder in updates:
        for table in ("a1", "weights", "attributes", "membership", "inversion", "utility"):
            found = sorted(folder.rglob(f"{table}.tsv"))
            sources.setdefault(table, []).extend((one.parent.name, one) for one in found)
        found = sorted(folder.rglob("a2.h*.tsv"))
        sources["a2"].extend(
            (one.parent.parent.name, one) for one in found if ".det" not in one.name
        )
    names = []
    for name, tables in sources.items():
        rows = [
            {"of": of, **row} for of, one in tables if one.exists() for row in read_tsv(one, None)
        ]
        if rows:
            names.append(f"{path.stem}-{section}-{name}.tsv")
            write_tsv(path.with_name(names[-1]), list(rows[0]), rows)
    return names


def plot_layers(path: Path, first: dict[tuple[str, str], Rows], title: str) -> None:
    """Plot figures 4 and 5: EER by layer, a panel for each place of the layer.

    If trials are too few for a rate, intervals are drawn; other intervals are in the tables.
    """
    from matplotlib.ticker import MaxNLocator

    from fedtools.core.drawing import drawing, line_style

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
                    axes.plot(places_of, values, label=name, **line_style(index))
                else:
                    middle = [(float(r["low"]) + float(r["high"])) / 2 for r in rows]
                    errors = [[m - float(r["low"]) for m, r in zip(middle, rows, strict=True)]] * 2
                    numbers = range(1, len(rows) + 1)
                    axes.errorbar(numbers, middle, errors, label=name, **line_style(index))
            axes.set_title(f"activations {PLACES[place]}", fontsize=9)
            axes.set_xlabel("Hidden layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0].set_ylabel("EER (%)")
        lines = panels[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(lines[0]), fontsize=8)
        figure.suptitle(title, fontsize=10)


def plot_det(path: Path, curves: Iterable[tuple[str, Path]], title: str) -> None:
    """Plot detection error trade-offs, both rates on normal deviate scales."""
    from fedtools.core.drawing import drawing, line_style

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
                axes.plot(xs, ys, label=name, **{**line_style(index), "marker": None})
        for axis, what in ((axes.xaxis, "False accepts (%)"), (axes.yaxis, "False rejects (%)")):
            axis.set_ticks(norm.ppf(ticks), [f"{100 * tick:g}" for tick in ticks])
            axis.set_label_text(what)
        # The same scale on both axes, so that equal error rates are on the diagonal.
        ends = (min(reached, default=-2.0) - 0.1, max(reached, default=2.0) + 0.1)
        axes.set(xlim=ends, ylim=ends, aspect="equal")
        axes.axline((0, 0), slope=1, color="0.8", linewidth=0.8, zorder=0)
        axes.legend(fontsize=8)
        axes.set_title(title, fontsize=9, wrap=True)


def write_report(
    exp: Path, data: Path, path: Path, page: Page, updates: Sequence[tuple[str, Path]]
) -> list[list[str]]:
    """Write the section, and the pictures next to the page; return its first table."""
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
    header, *rows = summary(first, second)
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
        f"**{caption}: summary**, the lowest EER of all layers on all trials, with 95 % intervals; "
        "a minimum over layers is optimistic, and 50 % is chance.",
        format_markdown(header, rows, "lllrr"),
        f"**{caption}: partition** (table 1 of {PAPER}, published figures next to ours)",
        f"```\n{read_text(data / 'partition.txt').rstrip()}\n```",
        f"{caption}, the global model on its validation data, held-out utterances of its own "
        "speakers, on which its best rounds and the weights of its search were chosen (so the "
        f"rate is optimistic): {pooled_line(heard[0])}.",
        *weight_lines(heard),
    ]
    parts += [
        f"**{caption}: attack A1** (figures 4 and 5): the lowest EER of all layers, with 95 % "
        "intervals; a minimum over layers is optimistic. `literal` is equation 4 as written, "
        "`unit` uses vectors of unit length, `cohort` uses cosines centred on and normalised by "
        "other people's models.",
        first_table(first),
    ]
    if second:
        parts += [
            f"**{caption}: attacks A1 and A2 on Part-2, EER %** (table 2), {activations(main[0])}. "
            "Published figures are not measured here. Cllr is for the last kind of trials.",
            second_table(first[main], second),
        ]
    for number, (name, folder) in enumerate(updates, 1):
        card = path.with_name(f"{path.stem}-{page.section}-card{number}.png")
        parts += updates_tables(caption, name, folder, card)
    titles = (
        "EER of attack A1 by layer, all trials",
        f"DET curves, all trials, {activations(main[0])}",
    )
    for title, picture in zip(titles, pictures, strict=True):
        parts += [f"**{caption}: {title}**", image(f"{title}, {caption}", picture.name)]
    tables = keep_tables(path, page.section, exp, [folder for _, folder in updates])
    parts.append(
        f"All layers, measures and trials are in {', '.join(f'`{one}`' for one in tables)}."
    )
    section = "\n\n".join(part.strip() for part in parts)
    write_text(path, with_section(path, page.section, section))
    return [header, *rows]


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
        parser.error("--updates: give NAME=DIR or NAME:ONE=DIR")
    with exit_with_message("report.py"):
        folders = [(name, Path(folder)) for name, folder in updates]
        header, *rows = write_report(options.exp, options.data, options.results, page, folders)
        print(f"{page.corpus.caption}\n\n{format_table(header, rows, 'lllrr')}", end="")


if __name__ == "__main__":
    main()
