"""One leakage card per experiment: each attack by each attacker, behind each defence.

It is made from the tables that attacks wrote to a folder or any folder in it: weights.tsv, a1.tsv,
a2.h<layer>.tsv, attributes.tsv, membership.tsv, inversion.tsv, attacks.tsv (of features) and
utility.tsv. A row of the card is one measure of one attack by one attacker.

A real attacker adapts to each defence. So each cell is the strongest of all layers and scores that
the attacker has for these trials behind this defence, and a last row, of the strongest attacker, is
the maximum over attackers. The strongest is picked by the values on the card: it is a maximum over
as many estimates as the cell says, and its interval, of the picked one alone, does not cover the
choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fedtools.attack.knowledge import ANY, ATTACKERS, NO_DEFENCE
from fedtools.attack.speakers.verify import EASY, OTHER, SAME
from fedtools.core.errors import UserError
from fedtools.core.tables import known_number, read_tsv
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
