"""One leakage card per experiment: each attack by each attacker, behind each defence.

It is made from the tables that attacks wrote to a folder or any folder in it: weights.tsv, a1.tsv,
a2.h<layer>.tsv, attributes.tsv, membership.tsv, inversion.tsv, attacks.tsv (of features) and
utility.tsv. A row of the card is one measure of one attack by one attacker.

A real attacker adapts to each defence. So each cell is the strongest of all layers and scores that
the attacker has for these trials behind this defence, and a last row, of the strongest attacker, is
the maximum over attackers. The strongest is picked by the values on the card: it is a maximum over
as many estimates as the cell says, and its interval, of the picked one alone, does not cover the
choice. The card is written as Markdown with a picture, for readers, and its cells as a table.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from fedtools.attack.knowledge import ANY, ATTACKERS, NO_DEFENCE
from fedtools.attack.speakers.verify import EASY, OTHER, SAME
from fedtools.core.atomic import atomic_path, write_text
from fedtools.core.drawing import drawing
from fedtools.core.errors import UserError
from fedtools.core.provenance import git_hash, records
from fedtools.core.tables import format_markdown, known_number, read_tsv, write_tsv
from fedtools.report.page import image, with_section
from fedtools.score.bootstrap import AVERAGE

# The card's names for the trials of `fedtools.attack.speakers.verify`.
_TRIALS = {EASY: "same speaker", SAME: "same recording", OTHER: "same speaker, other recording"}
_MEMBERSHIP = "attack", "score", "references"
_SAME_PEOPLE = "defence", "attacker", "layer", "scores"
# The values of attacks on features if everything leaks.
_ALL_TOLD = {"EER%": "0", "top1%": "100", "kNN%": "100", "named%": "100", "MRR": "1", "NMI": "1",
             "ARI": "1", "MCD dB": "0", "MCD dB, centred": "0"}  # fmt: skip
# In place of the value if everything leaks: differences from a control are then below 0.
FALLS = "below"
_ERRORS = ("WER%", "EER%")
# How dark the cell is of a leak whose size cannot be compared with that of everything.
_SOME = 0.25
_RATES = {"wer": "greedy WER%", "accuracy": "accuracy%"}
# In place of an attacker: whichever does best behind a defence.
STRONGEST = "strongest"
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Cell:
    """One measure of one attack by one attacker behind one defence, with numbers as text.

    Attributes:
        attack: its name, as in the command.
        of: the attack's question, and its family of scores.
        attacker: see `fedtools.attack.knowledge`; or `STRONGEST`.
        measure: such as "EER%".
        nothing: the value if nothing leaks; "-" if it is not known.
        everything: the value if everything leaks; "-" if it is not known.
        defence: see `fedtools.attack.defences`.
        value, low, high: the value with its 95 % interval; "-" if not known.
        by: the layer and scores, and for `STRONGEST` the attacker; "-" if there is one alone.
        best_of: the number of estimates that the value is the strongest of.
        people, trials: the number of people, and of trials, models or items; "-" if not known.
    """

    attack: str
    of: str
    attacker: str
    measure: str
    nothing: str
    everything: str
    defence: str
    value: str
    low: str
    high: str
    by: str = "-"
    best_of: int = 1
    people: str = "-"
    trials: str = "-"

    @property
    def key(self) -> tuple[str, ...]:
        """Return what identifies a row of the card."""
        return self.attack, self.of, self.attacker, self.measure

    @property
    def text(self) -> str:
        """Return the cell's text on a card: the value, its interval, of how many it is best."""
        value, low, high = (self._short(one) for one in (self.value, self.low, self.high))
        bounds = "" if "-" in (low, high) else f"[{low}, {high}]"
        several = f"best of {self.best_of}" if self.best_of > 1 else ""
        return " ".join(part for part in (value, bounds, several) if part not in ("", "-")) or "-"

    @property
    def counts(self) -> str:
        """Return the numbers of people and trials, as far as they are known."""
        known = ((self.people, "people"), (self.trials, "trials"))
        return ", ".join(f"{number} {what}" for number, what in known if number != "-")

    def _short(self, number: str) -> str:
        """Format a number in % with one decimal; return others as they are."""
        known = known_number(number, math.nan)
        percent = self.measure.endswith("%") and math.isfinite(known)
        return f"{known:.1f}" if percent else number

    @property
    def leak(self) -> float:
        """Return how far the value, or its interval's middle, is from nothing (0) to all (1).

        A value whose interval contains nothing, or that has no interval, does not show a leak. The
        largest difference from a control is unknown: one that shows a leak is `_SOME`.
        """
        low, high, nothing = (
            known_number(text, math.nan) for text in (self.low, self.high, self.nothing)
        )
        shown = low > nothing or high < nothing
        if not math.isfinite(self.strength):
            shown = high < nothing if self.everything == FALLS else low > nothing
            return _SOME if shown else 0.0
        return min(max(self.strength, 0.0), 1.0) if shown else 0.0

    @property
    def strength(self) -> float:
        """Return `leak` without its bounds, so that attacks on the wrong side of nothing differ."""
        low, high, value, nothing, all_of_it = (
            known_number(text, math.nan)
            for text in (self.low, self.high, self.value, self.nothing, self.everything)
        )
        value = (low + high) / 2 if math.isnan(value) else value
        return (value - nothing) / (all_of_it - nothing) if all_of_it != nothing else math.nan


COLUMNS = tuple(one.name for one in fields(Cell))


@dataclass(frozen=True)
class Card:
    """The leakage card of an experiment.

    Attributes:
        cells: of attacks, with those of one attack together.
        costs: of defences, likewise.
        defences: in the order of the columns, with no defence first.
    """

    cells: list[Cell]
    costs: list[Cell]
    defences: list[str]


def read_card(folder: Path) -> Card:
    """Read the card from the tables that attacks wrote to a folder.

    Raises:
        UserError: if there is no table, or one is malformed.
    """
    found = _strongest([cell for read in _READERS for cell in read(folder)])
    if not found:
        remedy = "run utils/attack_updates.sh, or fedtools attack"
        raise UserError("no table of an attack", path=folder, remedy=remedy)
    costs = _costs(folder)
    names = dict.fromkeys(cell.defence for cell in (*costs, *found))
    first = [name for name in names if name == NO_DEFENCE]
    return Card(found, costs, first + [name for name in names if name not in first])


def _strongest(cells: Iterable[Cell]) -> list[Cell]:
    """Return the strongest cell of each row and defence, and those of the strongest attacker.

    A cell of which it is not known what reveals more stays as it is.
    """
    found: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault((*cell.key, cell.defence), []).append(cell)
    best = [one for some in found.values() for one in _best(some)]
    behind: dict[tuple[str, ...], list[Cell]] = {}
    for cell in best:
        if cell.attacker in ATTACKERS and math.isfinite(cell.strength):
            by = ", ".join(part for part in (cell.attacker, cell.by) if part != "-")
            known = replace(cell, attacker=STRONGEST, by=by)
            behind.setdefault((*known.key, known.defence), []).append(known)
    return [*best, *(one for some in behind.values() for one in _best(some))]


def _best(cells: list[Cell]) -> list[Cell]:
    """Return the strongest of a row's cells; all of them if that is not known."""
    known = [one for one in cells if math.isfinite(one.strength)]
    count = sum(one.best_of for one in known)
    return [replace(max(known, key=lambda one: one.strength), best_of=count)] if known else cells


def by_row(cells: Iterable[Cell]) -> dict[tuple[str, ...], list[Cell]]:
    """Group cells by row; cells without a defence are in the row of each attacker."""
    found: dict[tuple[str, ...], list[Cell]] = {}
    plain: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        place = plain if cell.attacker == ANY and cell.defence == NO_DEFENCE else found
        place.setdefault(cell.key, []).append(cell)
    for key, some in plain.items():
        rows = [one for one in found if (one[0], one[1], one[3]) == (key[0], key[1], key[3])]
        for row in rows or [key]:
            found[row] = [*some, *found.get(row, [])]
    order = {cell.key[:2]: index for index, cell in reversed(list(enumerate(cells)))}
    who = (ANY, *ATTACKERS, STRONGEST)
    return dict(sorted(found.items(), key=lambda one: (order[one[0][:2]], who.index(one[0][2]))))


def _tables(folder: Path, pattern: str) -> Rows:
    """Read the rows of all tables of a name in a folder and its subfolders, 10 sorted after 9."""
    paths = sorted(folder.rglob(pattern), key=lambda one: (len(str(one)), str(one)))
    return [row for path in paths if ".det" not in path.name for row in read_tsv(path, None)]


def _of_trials(folder: Path) -> Iterator[Cell]:
    """Yield the cells of attacks that decide whether two models are of one speaker."""
    for attack, pattern in (("weights", "weights.tsv"), ("a1", "a1.tsv"), ("a2", "a2.h*.tsv")):
        rows = _tables(folder, pattern)
        kinds = {row["trials"] for row in rows}
        # Tables name the people once, with the trials of all kinds.
        people = {
            tuple(row[name] for name in _SAME_PEOPLE): row["speakers"]
            for row in rows
            if row["trials"] == EASY
        }
        for kind in [SAME, OTHER] if {SAME, OTHER} <= kinds else [EASY]:
            for row in rows:
                if row["trials"] == kind:
                    what = f"{_TRIALS[kind]}{_family(attack, row['scores'])}"
                    by = f"{row['layer']}, {row['scores']}"
                    who = people.get(tuple(row[name] for name in _SAME_PEOPLE), "-")
                    found = _cell(row, attack, what, "EER%", "50", "0", by=by)
                    yield replace(found, people=who, trials=_sum(row, "targets", "others"))


def _family(attack: str, scores: str) -> str:
    """Return the name of the paper's scores of A1, or of those that improve on them."""
    if attack != "a1":
        return ""
    return f", {scores.partition(', ')[2] or 'literal'}"


def _of_attributes(folder: Path) -> Iterator[Cell]:
    for row in _tables(folder, "attributes.tsv"):
        renamed = {**row, "low": row["AUClow"], "high": row["AUChigh"]}
        own = row["attribute"], "AUC%", "50", "100"
        found = _cell(renamed, "attributes", *own, by=row["layer"])
        yield replace(found, trials=_sum(row, "models"))


def _of_membership(folder: Path) -> Iterator[Cell]:
    """Yield all attacks, compared with what audio alone reveals of the trials."""
    rows = _tables(folder, "membership.tsv")
    heard: dict[str, float] = {}
    for row in rows:
        if row["attack"] == "blind":
            kind, area = row["others_of"], known_number(row["AUC%"], 50)
            heard[kind] = max(area, heard.get(kind, 50.0))
    for row in rows:
        if row["attack"] != "blind":
            kind, by = row["others_of"], ", ".join(row[name] for name in _MEMBERSHIP)
            own = f"others of {kind}", "AUC%", f"{heard.get(kind, 50.0):.2f}", "100"
            found = _cell(row, "membership", *own, by=by)
            yield replace(found, trials=_sum(row, "members", "others"))


def _of_inversion(folder: Path) -> Iterator[Cell]:
    """Yield differences from a control, with their intervals."""
    for row in _tables(folder, "inversion.tsv"):
        what, measure = f"{row['attack']}, {row['steps']}", f"{row['measure']} - {row['against']}"
        everything = FALLS if row["measure"] in _ERRORS else "-"
        found = _cell(row, "inversion", what, measure, "0", everything, "difference")
        yield replace(found, trials=_sum(row, "items"))


def _of_features(folder: Path) -> Iterator[Cell]:
    for row in _tables(folder, "attacks.tsv"):
        if row["client"] == AVERAGE:
            everything = _ALL_TOLD.get(row["measure"], "-")
            own = row["attack"], row["measure"], row["chance"], everything, "value"
            yield replace(_cell(row, "features", *own), trials=_sum(row, "utterances"))


def _costs(folder: Path) -> list[Cell]:
    return [
        _cell(row, "cost", row["on"], _RATES.get(row["rate"], row["rate"]), "-", "-", "value")
        for row in _tables(folder, "utility.tsv")
    ]


def _cell(
    row: Mapping[str, str],
    attack: str,
    of: str,
    measure: str,
    nothing: str,
    everything: str,
    value: str = "",
    by: str = "-",
) -> Cell:
    """Make a cell from a row with columns low, high, and perhaps defence and attacker."""
    who = row.get("defence", NO_DEFENCE), row.get("attacker", ANY)
    return Cell(
        attack, of, who[1], measure, nothing, everything, who[0], row[value or measure], row["low"],
        row["high"], by, people=row.get("speakers", "-"),
    )  # fmt: skip


def _sum(row: Mapping[str, str], *names: str) -> str:
    """Return the sum of counts in a row, or "-" if one is not known."""
    counts = [row.get(name, "") for name in names]
    return str(sum(map(int, counts))) if all(map(str.isdecimal, counts)) else "-"


_READERS = (_of_trials, _of_attributes, _of_membership, _of_inversion, _of_features)


# Data available to the attacker, by attack.
HAS = {
    "weights": "the updates of a round",
    "a1": "the updates, and speech of any speaker",
    "a2": "the updates, speech of any speaker, and updates of known people",
    "attributes": "the updates, speech of any speaker, and attributes of other people",
    "membership": "the updates, candidates with their transcripts, and how clients train",
    "inversion": "an update, and how clients train",
    "features": "the clients' features",
}
KNOWS = {
    "ignorant": "no defence: it enrols undefended models, and is trained on them",
    "lazy-informed": "the defence: it enrols defended models, and is trained on undefended ones",
    "semi-informed": "the defence: it enrols defended models, and is trained on other people's",
    STRONGEST: "what any of these knows: it is whichever does best behind a defence",
}
TERMS = {
    "EER%": "equal error rate of telling whether two models are of one speaker; 50 is a guess, 0 "
    "tells all, so that lower is worse for privacy",
    "AUC%": "how often one of a kind scores above one of the other kind; 50 is a guess, 100 tells "
    "all, so that higher is worse for privacy",
    "literal": "A1's scores as its paper's equation 4 is written",
    "unit": "A1's scores of vectors of unit length, the equation's other reading",
    "cohort": "A1's scores relative to other speakers' models, which improve on the paper's",
    "regression": "a score trained on the updates of other people",
    "PLDA": "the log-likelihood ratio of probabilistic linear discriminant analysis",
    "LiRA": "the likelihood ratio of an item's loss under models with and without it (Carlini et "
    "al. 2022)",
    "RMIA": "the share of other items that a model favours less than this one (Zarifzadeh et al. "
    "2024)",
}
NOTHING = {
    "membership": "the AUC of whoever hears the audio alone, without any model, because members "
    "and others differ in how they sound; only what is above it is a model's leak",
    "features": "the measure for vectors without information",
    "inversion": "0, no difference from the control that the measure names",
}
COSTS = {
    "own": "each client's update, on its held-out speech",
    "newcomers": "the next global model, on people who are not clients",
    "everybody": "the next global model, on both",
}


def write_card(folder: Path, card: Card, title: str) -> str:
    """Write FOLDER/card.tsv, card.md and card.png with a title; return the text of card.md."""
    write_tsv(
        folder / "card.tsv",
        COLUMNS,
        [dict(zip(COLUMNS, astuple(cell), strict=True)) for cell in (*card.cells, *card.costs)],
    )
    draw_card(folder / "card.png", card, title)
    text = f"**Leakage card of {title}**\n\n{markdown(card)}"
    write_text(folder / "card.md", text)
    return text


def put_on_page(page: Path, folder: Path, experiment: Path, text: str) -> None:
    """Put a card on a page as a section, and its picture next to the page.

    Args:
        page: the Markdown file; made if it is missing. Text outside the section stays.
        folder: has card.png.
        experiment: the attacked experiment, after which the section is named.
        text: the text returned by `write_card`.
    """
    name = "-".join(part for part in experiment.parts if part not in ("exp", "/", ".", ".."))
    picture = page.with_name(f"{page.stem}-card-{name}.png")
    written = [f":(exclude){one}" for one in (page.name, f"{page.stem}-*")]
    section = [
        f"## What {experiment} gives away",
        f"- Git, of this card: {git_hash(page.parent, *written)}.\n"
        f"- Experiment begun with: {records([experiment])}.",
        text,
        image(f"Leakage card of {experiment}", picture.name),
    ]
    new = with_section(page, f"card-{name}", "\n\n".join(part.strip() for part in section))
    with atomic_path(picture) as temporary:
        shutil.copyfile(folder / "card.png", temporary)
    write_text(page, new)


def markdown(card: Card) -> str:
    """Format the card: tables of attacks and costs, and notes on attackers and measures."""
    head = ["Attack", "Attacker", "Measure", "No leak", *(_code(one) for one in card.defences)]
    rows = [
        [f"{key[0]}: {key[1]}", key[2], key[3], some[0].nothing, *_texts(some, card.defences)]
        for key, some in by_row(card.cells).items()
    ]
    parts = [format_markdown(head, rows, "lll" + "r" * (len(head) - 3))]
    if card.costs:
        costs = [
            [key[1], key[3], *_texts(some, card.defences)]
            for key, some in by_row(card.costs).items()
        ]
        names = ["Cost", "Measure", *(_code(one) for one in card.defences)]
        parts.append(format_markdown(names, costs, "ll" + "r" * (len(names) - 2)))
    attacks = dict.fromkeys(cell.attack for cell in card.cells)
    attackers = dict.fromkeys(cell.attacker for cell in card.cells)
    notes = [f"- {name} has {HAS[name]}." for name in attacks]
    notes += [f"- {name} knows {KNOWS[name]}." for name in attackers if name in KNOWS]
    notes += [f"- {cell.of}: {COSTS[cell.of]}." for cell in _first(card.costs)]
    notes += [f"- {name}: {TERMS[name]}." for name in TERMS if _has(card.cells, name)]
    notes += [
        f"- No leak, in rows of {name}: {NOTHING[name]}." for name in attacks if name in NOTHING
    ]
    notes.append(
        "- In the picture, darker cells leak more. A cell whose interval contains the value of no "
        "leak is white: these trials do not show a leak, and do not exclude one. A difference from "
        "a control is light, whatever its size."
    )
    notes.append(
        "- Cells have 95 % intervals. `best of n` is the one that reveals most among n layers, "
        "scores and attackers, in card.tsv under `by`: a maximum, whose interval is of that one "
        "alone and does not cover the choice."
    )
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def _has(cells: Iterable[Cell], term: str) -> bool:
    """Return whether a card's cells have a term: as measure, in scores, or in what is best."""
    texts = (word for one in cells for word in (one.measure, one.of, one.by))
    return any(re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text) for text in texts)


def _texts(cells: Sequence[Cell], defences: Sequence[str]) -> list[str]:
    known = {
        cell.defence: "; ".join(part for part in (cell.text, cell.counts) if part) for cell in cells
    }
    return [known.get(name, "") for name in defences]


def _first(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.of: cell for cell in cells}.values())


def _code(defence: str) -> str:
    """Format a defence as code if its patterns have stars."""
    return defence if "*" not in defence else f"`{defence}`"


# Inches.
_ROW, _NAMES, _COLUMN, _HEAD = 0.2, 4.2, 1.5, 0.8
_COLOUR = "#0072B2"


def draw_card(path: Path, card: Card, title: str) -> None:
    """Draw all cells: values with their intervals, and below them the defences' costs.

    Args:
        path: the PNG.
        title: the name of what was attacked.
    """
    attacks, costs = by_row(card.cells), by_row(card.costs)
    rows, columns = len(attacks) + len(costs), len(card.defences)
    width = _NAMES + _COLUMN * columns
    with drawing(path, (width, _HEAD + _ROW * rows)) as figure:
        axes = figure.subplots()
        axes.set_xlim(0, columns)
        axes.set_ylim(rows, 0)
        for y, cells in enumerate([*attacks.values(), *costs.values()]):
            known = {cell.defence: cell for cell in cells}
            for x, name in enumerate(card.defences):
                if name not in known:
                    continue
                shade = 0.85 * known[name].leak if y < len(attacks) else 0.0
                axes.axvspan(
                    x, x + 1, 1 - (y + 1) / rows, 1 - y / rows, color=_COLOUR, alpha=shade, lw=0
                )
                colour = "white" if shade > 0.5 else "black"
                where = x + 0.5, y + 0.5
                axes.text(
                    *where, known[name].text, color=colour, size=6.5, ha="center", va="center"
                )
        axes.set_yticks(
            [y + 0.5 for y in range(rows)],
            [_name(key) for key in (*attacks, *costs)],
            fontsize=7,
        )
        names = [name.replace("+", " +\n").replace(",", ",\n") for name in card.defences]
        axes.set_xticks([x + 0.5 for x in range(columns)], names, fontsize=7)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(False)
        if costs:
            axes.axhline(len(attacks), color="black", linewidth=0.8)
        figure.suptitle(
            f"{title}: darker cells leak more, and white ones do not show a leak; "
            "the strongest layer and score in each",
            x=0.01,
            ha="left",
            fontsize=9,
        )


def _name(key: tuple[str, ...]) -> str:
    attack, of, attacker, measure = key
    parts = [f"{attack}: {of}", attacker if attacker != "-" else "", measure]
    return ", ".join(part for part in parts if part)
