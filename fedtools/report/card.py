"""One leakage card per experiment: each attack, what its attacker knows, behind each defence.

Read are the tables that attacks have left in a folder, in whichever of its folders they lie:
weights.tsv, a1.tsv, a2.h<layer>.tsv, attributes.tsv, membership.tsv, inversion.tsv, attacks.tsv (of
features) and utility.tsv. A row of the card is one measure of one attack by one attacker. Of many
layers or scores an attack has one row: of that which tells most without a defence, for all of the
card. It was picked by what is shown, so that its cell of no defence is the best of several.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from fedtools.attack.knowledge import ANY, ATTACKERS, NO_DEFENCE
from fedtools.attack.verify import EASY, OTHER, SAME
from fedtools.files.atomic import atomic_path, write_text
from fedtools.files.errors import UserError
from fedtools.files.provenance import git_hash, records
from fedtools.files.tables import format_markdown, known_number, read_tsv, write_tsv
from fedtools.report.page import image, with_section
from fedtools.score.bootstrap import AVERAGE

# What an attacker has, by attack.
HAS = {
    "weights": "the updates of a round",
    "a1": "the updates, and speech of anybody",
    "a2": "the updates, speech of anybody, and updates of people it knows",
    "attributes": "the updates, speech of anybody, and other people's attributes",
    "membership": "the updates, candidates with their transcripts, and how clients train",
    "inversion": "an update, and how clients train",
    "features": "the features that clients sent",
}
KNOWS = {
    "ignorant": "of no defence: it enrols and learns from undefended models",
    "lazy-informed": "the defence: it enrols defended models, and has learnt from undefended ones",
    "semi-informed": "the defence: it enrols and learns from defended models of other people",
}
COSTS = {
    "own": "each client's own model, as it was sent, on its held-out speech",
    "newcomers": "the next global model, on people with no client",
    "everybody": "the next global model, on both",
}
# The trials of `fedtools.attack.verify`, as a card calls them.
_TRIALS = {EASY: "same speaker", SAME: "same recording", OTHER: "same speaker, other recording"}
_RATES = {"wer": "greedy WER%", "accuracy": "accuracy%"}
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Cell:
    """One measure of one attack by one attacker behind one defence; numbers are written out.

    Attributes:
        attack: its file's name, a key of `HAS`.
        of: what it is asked, and which of its layers and scores this is.
        attacker: see `fedtools.attack.knowledge`.
        measure: such as "EER%".
        nothing: the value where nothing leaks; "-" where it is not known.
        everything: the value where all leaks.
        defence: see `fedtools.attack.defences`.
        value, low, high: with a 95 % interval; "-" for what is not known.
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

    @property
    def key(self) -> tuple[str, ...]:
        """What a row of the card is of."""
        return self.attack, self.of, self.attacker, self.measure

    @property
    def text(self) -> str:
        """What a card shows: the value and its interval."""
        value, low, high = (self._short(one) for one in (self.value, self.low, self.high))
        bounds = "" if "-" in (low, high) else f"[{low}, {high}]"
        return " ".join(part for part in (value, bounds) if part not in ("", "-")) or "-"

    def _short(self, number: str) -> str:
        """A number in % with one digit behind the point; others as they are."""
        known = known_number(number, math.nan)
        percent = self.measure.endswith("%") and math.isfinite(known)
        return f"{known:.1f}" if percent else number

    @property
    def leak(self) -> float:
        """How far the value, or the middle of its interval, is from nothing (0) to all (1)."""
        low, high, value, nothing, all_of_it = (
            known_number(text, math.nan)
            for text in (self.low, self.high, self.value, self.nothing, self.everything)
        )
        value = (low + high) / 2 if math.isnan(value) else value
        found = (value - nothing) / (all_of_it - nothing) if all_of_it != nothing else math.nan
        return min(max(found, 0.0), 1.0) if math.isfinite(found) else math.nan


COLUMNS = tuple(one.name for one in fields(Cell))


@dataclass(frozen=True)
class Card:
    """What is known of an experiment.

    Attributes:
        cells: of attacks, an attack's together.
        costs: of defences, likewise.
        defences: in the order of the columns, none first.
    """

    cells: list[Cell]
    costs: list[Cell]
    defences: list[str]


def read_card(folder: Path) -> Card:
    """The card of what attacks have left in a folder.

    Raises:
        UserError: if none has left a table there, or one is malformed.
    """
    found = [cell for read in _READERS for cell in read(folder)]
    if not found:
        remedy = "run utils/attack_updates.sh, or fedtools attack"
        raise UserError("no table of an attack", path=folder, remedy=remedy)
    costs = _costs(folder)
    names = dict.fromkeys(cell.defence for cell in (*costs, *found))
    first = [name for name in names if name == NO_DEFENCE]
    return Card(found, costs, first + [name for name in names if name not in first])


def write_card(folder: Path, card: Card, title: str) -> str:
    """Write FOLDER/card.tsv, card.md and card.png, called by a title; return what is in card.md."""
    from fedtools.report.card_picture import draw_card

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
    """Put a card that was written in a folder on a page, as a section, and its picture beside it.

    Args:
        page: the Markdown; made if it is missing. What is outside of the section stays.
        folder: has card.png.
        experiment: what it is of, which gives the section its name.
        text: what `write_card` returned.
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
    """The card: a table of attacks, one of costs, and what the attackers have and know."""
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
    said = [f"- {name} has {HAS[name]}." for name in attacks]
    said += [f"- {name} knows {KNOWS[name]}." for name in attackers if name in KNOWS]
    said += [f"- {cell.of}: {COSTS[cell.of]}." for cell in _first(card.costs)]
    said.append(
        "- Cells have 95 % intervals. Of several layers or scores, a row is of the one that tells "
        "most without a defence."
    )
    return "\n\n".join([*parts, "\n".join(said)]) + "\n"


def by_row(cells: Iterable[Cell]) -> dict[tuple[str, ...], list[Cell]]:
    """The cells of each row; what was found without a defence is in each attacker's."""
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
    who = (ANY, *ATTACKERS)
    return dict(sorted(found.items(), key=lambda one: (order[one[0][:2]], who.index(one[0][2]))))


def _texts(cells: Sequence[Cell], defences: Sequence[str]) -> list[str]:
    known = {cell.defence: cell.text for cell in cells}
    return [known.get(name, "") for name in defences]


def _first(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.of: cell for cell in cells}.values())


def _code(defence: str) -> str:
    """As code: what is not sent is told by patterns, with stars."""
    return defence if "*" not in defence else f"`{defence}`"


def _tables(folder: Path, pattern: str) -> Rows:
    """The rows of all tables of a name, in a folder and those in it, of 10 after 9."""
    paths = sorted(folder.rglob(pattern), key=lambda one: (len(str(one)), str(one)))
    return [row for path in paths if ".det" not in path.name for row in read_tsv(path, None)]


def _of_trials(folder: Path) -> Iterator[Cell]:
    """Attacks that decide whether two models are of one speaker."""
    for attack, pattern, families in (
        ("weights", "weights.tsv", _of_weights),
        ("a1", "a1.tsv", _of_a1),
        ("a2", "a2.h*.tsv", _of_a2),
    ):
        rows = _tables(folder, pattern)
        kinds = {row["trials"] for row in rows}
        shown = [SAME, OTHER] if {SAME, OTHER} <= kinds else [EASY]
        for name, chosen in families(rows):
            for kind in shown:
                for row in chosen:
                    if row["trials"] == kind:
                        what = f"{_TRIALS[kind]}, {name}"
                        yield _cell(row, attack, what, "EER%", "50", "0")


Families = Iterator[tuple[str, Rows]]


def _of_weights(rows: Rows) -> Families:
    """All parts by regression, or all weights as one vector; and what the first layer tells."""
    layers = {row["layer"] for row in rows}
    for name in ("together" if "together" in layers else "all", "constant"):
        if name in layers:
            yield name, [row for row in rows if row["layer"] == name]


def _of_a1(rows: Rows) -> Families:
    """As the paper scores, and with a cohort, each in its best layer."""
    for scores, name in (("both", "literal"), ("both, cohort", "cohort")):
        own = [row for row in rows if row["scores"] == scores]
        if own:
            layer = _best(own, "layer", _error)
            yield f"{name}, {layer}", [row for row in own if row["layer"] == layer]


def _of_a2(rows: Rows) -> Families:
    own = [row for row in rows if row["scores"] == "PLDA"]
    if own:
        layer = _best(own, "layer", _error)
        yield f"PLDA, {layer}", [row for row in own if row["layer"] == layer]


def _error(row: Mapping[str, str]) -> float:
    """The error rate, or the middle of its interval where there are too few trials to tell it."""
    if row["EER%"] != "-":
        return float(row["EER%"])
    return (known_number(row["low"], math.inf) + known_number(row["high"], math.inf)) / 2


def _best(rows: Rows, column: str, badness: Callable[[Mapping[str, str]], float]) -> str:
    """The column's value in the row of least badness without a defence; of the first on a tie."""
    plain = [row for row in rows if row.get("defence", NO_DEFENCE) == NO_DEFENCE]
    return min(plain or rows, key=badness)[column]


def _of_attributes(folder: Path) -> Iterator[Cell]:
    rows = _tables(folder, "attributes.tsv")
    for name in dict.fromkeys(row["attribute"] for row in rows):
        own = [row for row in rows if row["attribute"] == name]
        layer = _best(own, "layer", lambda row: -known_number(row["AUC%"], -math.inf))
        for row in own:
            if row["layer"] == layer:
                renamed = {**row, "low": row["AUClow"], "high": row["AUChigh"]}
                yield _cell(renamed, "attributes", f"{name}, {layer}", "AUC%", "50", "100")


def _of_membership(folder: Path) -> Iterator[Cell]:
    """The attack that tells most, against what audio alone tells of the same trials."""
    rows = _tables(folder, "membership.tsv")
    kinds = dict.fromkeys(row["others_of"] for row in rows)
    for kind in kinds:
        own = [row for row in rows if row["others_of"] == kind]
        told = [known_number(row["AUC%"], 50) for row in own if row["attack"] == "blind"]
        heard = max(50.0, *told)
        own = [
            {**row, "all": ", ".join((row["attack"], row["score"], row["references"]))}
            for row in own
            if row["attack"] != "blind"
        ]
        if not own:
            continue
        best = _best(own, "all", lambda row: -known_number(row["AUC%"], -math.inf))
        for row in own:
            if row["all"] == best:
                what = f"others of {kind}, {best}"
                yield _cell(row, "membership", what, "AUC%", f"{heard:.2f}", "100")


def _of_inversion(folder: Path) -> Iterator[Cell]:
    for row in _tables(folder, "inversion.tsv"):
        what = f"{row['attack']}, {row['steps']}"
        yield _cell(row, "inversion", what, row["measure"], row["control"], "-", "value")


def _of_features(folder: Path) -> Iterator[Cell]:
    for row in _tables(folder, "attacks.tsv"):
        if row["client"] == AVERAGE:
            own = row["attack"], row["measure"], row["chance"], "-", "value"
            yield _cell(row, "features", *own)


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
) -> Cell:
    """A cell of a row with columns low, high, and perhaps defence and attacker."""
    who = row.get("defence", NO_DEFENCE), row.get("attacker", ANY)
    return Cell(
        attack, of, who[1], measure, nothing, everything, who[0], row[value or measure], row["low"],
        row["high"],
    )  # fmt: skip


_READERS = (_of_trials, _of_attributes, _of_membership, _of_inversion, _of_features)
