"""One leakage card per experiment: each attack by each attacker, behind each defence.

It is made from the tables that attacks wrote to a folder or any folder in it: weights.tsv, a1.tsv,
a2.h<layer>.tsv, attributes.tsv, membership.tsv, inversion.tsv, attacks.tsv (of features) and
utility.tsv. A row of the card is one measure of one attack by one attacker. An attack with several
layers or scores has one row, for the one that reveals most without a defence. It is picked by the
values on the card, so its cell without a defence is the best of several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from fedtools.attack.knowledge import ANY, ATTACKERS, NO_DEFENCE
from fedtools.attack.verify import EASY, OTHER, SAME
from fedtools.files.errors import UserError
from fedtools.files.tables import known_number, read_tsv
from fedtools.score.bootstrap import AVERAGE

# The card's names for the trials of `fedtools.attack.verify`.
_TRIALS = {EASY: "same speaker", SAME: "same recording", OTHER: "same speaker, other recording"}
_RATES = {"wer": "greedy WER%", "accuracy": "accuracy%"}
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Cell:
    """One measure of one attack by one attacker behind one defence, with numbers as text.

    Attributes:
        attack: its name, as in the command.
        of: the attack's question, and its layer or scores.
        attacker: see `fedtools.attack.knowledge`.
        measure: such as "EER%".
        nothing: the value if nothing leaks; "-" if it is not known.
        everything: the value if everything leaks; "-" if it is not known.
        defence: see `fedtools.attack.defences`.
        value, low, high: the value with its 95 % interval; "-" if not known.
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
        """Return what identifies a row of the card."""
        return self.attack, self.of, self.attacker, self.measure

    @property
    def text(self) -> str:
        """Return the cell's text on a card: the value and its interval."""
        value, low, high = (self._short(one) for one in (self.value, self.low, self.high))
        bounds = "" if "-" in (low, high) else f"[{low}, {high}]"
        return " ".join(part for part in (value, bounds) if part not in ("", "-")) or "-"

    def _short(self, number: str) -> str:
        """Format a number in % with one decimal; return others as they are."""
        known = known_number(number, math.nan)
        percent = self.measure.endswith("%") and math.isfinite(known)
        return f"{known:.1f}" if percent else number

    @property
    def leak(self) -> float:
        """Return how far the value, or its interval's middle, is from nothing (0) to all (1)."""
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
    found = [cell for read in _READERS for cell in read(folder)]
    if not found:
        remedy = "run utils/attack_updates.sh, or fedtools attack"
        raise UserError("no table of an attack", path=folder, remedy=remedy)
    costs = _costs(folder)
    names = dict.fromkeys(cell.defence for cell in (*costs, *found))
    first = [name for name in names if name == NO_DEFENCE]
    return Card(found, costs, first + [name for name in names if name not in first])


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
    who = (ANY, *ATTACKERS)
    return dict(sorted(found.items(), key=lambda one: (order[one[0][:2]], who.index(one[0][2]))))


def _tables(folder: Path, pattern: str) -> Rows:
    """Read the rows of all tables of a name in a folder and its subfolders, 10 sorted after 9."""
    paths = sorted(folder.rglob(pattern), key=lambda one: (len(str(one)), str(one)))
    return [row for path in paths if ".det" not in path.name for row in read_tsv(path, None)]


def _of_trials(folder: Path) -> Iterator[Cell]:
    """Yield the cells of attacks that decide whether two models are of one speaker."""
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
    """Yield all parts by regression, or all weights as one vector; then the first layer's part."""
    layers = {row["layer"] for row in rows}
    for name in ("together" if "together" in layers else "all", "constant"):
        if name in layers:
            yield name, [row for row in rows if row["layer"] == name]


def _of_a1(rows: Rows) -> Families:
    """Yield the paper's scores, and those with a cohort, each in its best layer."""
    for scores, name in (("both", "literal"), ("both, cohort", "cohort")):
        own = [row for row in rows if row["scores"] == scores]
        if own:
            layer = _best(own, "layer", middle_error)
            yield f"{name}, {layer}", [row for row in own if row["layer"] == layer]


def _of_a2(rows: Rows) -> Families:
    own = [row for row in rows if row["scores"] == "PLDA"]
    if own:
        layer = _best(own, "layer", middle_error)
        yield f"PLDA, {layer}", [row for row in own if row["layer"] == layer]


def middle_error(row: Mapping[str, str]) -> float:
    """Return the error rate, or its interval's middle if there are too few trials for a rate."""
    if row["EER%"] != "-":
        return float(row["EER%"])
    return (known_number(row["low"], math.inf) + known_number(row["high"], math.inf)) / 2


def _best(rows: Rows, column: str, badness: Callable[[Mapping[str, str]], float]) -> str:
    """Return the column's value in the first row of least badness among those without a defence."""
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
    """Yield the attack that reveals most, compared with what audio alone reveals of the trials."""
    rows = _tables(folder, "membership.tsv")
    kinds = dict.fromkeys(row["others_of"] for row in rows)
    for kind in kinds:
        own = [row for row in rows if row["others_of"] == kind]
        blind = [known_number(row["AUC%"], 50) for row in own if row["attack"] == "blind"]
        heard = max(50.0, *blind)
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
    """Yield differences from a control, with their intervals."""
    for row in _tables(folder, "inversion.tsv"):
        what, measure = f"{row['attack']}, {row['steps']}", f"{row['measure']} - {row['against']}"
        yield _cell(row, "inversion", what, measure, "0", "-", "difference")


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
    """Make a cell from a row with columns low, high, and perhaps defence and attacker."""
    who = row.get("defence", NO_DEFENCE), row.get("attacker", ANY)
    return Cell(
        attack, of, who[1], measure, nothing, everything, who[0], row[value or measure], row["low"],
        row["high"],
    )  # fmt: skip


_READERS = (_of_trials, _of_attributes, _of_membership, _of_inversion, _of_features)
