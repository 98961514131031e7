"""The rows of a page of rescoring, and its first table; see fedtools.report.summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedtools.data.text_units import WORD
from fedtools.report.summary import Line, Summary, note, rate_of
from fedtools.score.crossed import Difference, Effects, difference, differences, effects
from fedtools.score.utterances import Utterances


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        place: rows of one place are compared with the first of them.
        name: as the summary shows it.
        counts: seed -> word errors by utterance, whose speakers are persons.
        bytes: what a client sends and receives, mean over clients.
        seconds: a client's work, mean over clients; None if it was not measured.
    """

    place: str
    name: str
    counts: Mapping[int, Utterances]
    bytes: float = 0.0
    seconds: float | None = None

    @cached_property
    def words(self) -> np.ndarray:
        """Words by person, (persons,)."""
        return next(iter(self.counts.values())).by_person(WORD.rate)[1]

    @cached_property
    def errors(self) -> np.ndarray:
        """Word errors by person, (seeds, persons)."""
        return np.stack([one.by_person(WORD.rate)[2] for one in self.counts.values()])

    def rates(self) -> list[float]:
        """Return the WER in % of each seed."""
        return [100 * one.sum() / self.words.sum() for one in self.errors]

    def less(self, other: Row) -> Difference:
        """Return this row's WER minus another row's, in percentage points.

        The interval is over seeds and persons, each with the utterances of all clients.
        """
        return difference(*self._with(other))

    def effects(self, other: Row) -> Effects:
        """Return the same with its mean squares, for a column of differences."""
        return effects(*self._with(other))

    def _with(self, other: Row) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        if (self.words != other.words).any():
            raise ValueError("rows of other words")
        return self.errors, other.errors, self.words, np.zeros(len(self.words), int)


def relative(found: Difference, base: Row, bold: bool = False) -> str:
    """Format a difference in % of the base's WER, with its interval."""
    rate = float(np.mean(base.rates()))
    text = f"{100 * found.value / rate:+.1f}"
    if not np.isnan(found.low):
        text += f" [{100 * found.low / rate:+.1f}, {100 * found.high / rate:+.1f}]"
    return f"**{text}**" if bold else text


def summary_of(rows: Sequence[Row]) -> Summary:
    """Return the rows in five columns."""
    changes: dict[int, Difference | None] = {}
    for place in {row.place for row in rows}:
        first, *rest = (row for row in rows if row.place == place)
        found = differences([row.effects(first) for row in rest])
        changes |= {id(row): one for row, one in zip(rest, found, strict=True)}
    lines = []
    for row in rows:
        took = "-" if row.seconds is None else f"{row.seconds:.2f} s"
        rate = rate_of(row.errors, row.words)
        lines.append(Line(row.name, rate, changes.get(id(row)), row.bytes, took))
    return Summary("WER", lines)


def note_of(first: str, computation: str, several: bool) -> str:
    """Return how to read the summary.

    Args:
        first: what differences are to.
        computation: what the last column is.
        several: whether there are several seeds.
    """
    measure = f"over all words, with 95 % intervals over {'seeds and ' * several}persons"
    return note("WER", measure, first, computation, several)
