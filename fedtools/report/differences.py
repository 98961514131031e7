"""Differences of methods on the same test speakers, as columns of tables.

See `fedtools.score.crossed` for intervals and p. A family of tests is one table: all of its columns
and rows. Rows of one seed are not tested.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtools.core.errors import UserError
from fedtools.report.results import Method
from fedtools.score.crossed import Difference, Effects, differences, effects, holm

_ALPHA = 0.05
# Client and speaker of each column; errors, (seeds, speakers); tokens, (speakers,).
Counts = tuple[list[tuple[str, str]], np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Compared:
    """The differences of a table's methods to some references.

    Attributes:
        references: the methods that others are compared with.
        found: for each reference, a difference of each method; None for a method with itself.
        seeds: the number of seeds of each method.
    """

    references: Sequence[Method] = ()
    found: Sequence[Sequence[Difference | None]] = ()
    seeds: int = 1

    @classmethod
    def of(cls, methods: Sequence[Method], references: Sequence[Method]) -> Compared:
        """Compare methods with references.

        Raises:
            UserError: if they are of other test data.
        """
        counts = {id(one): _of_speakers(one) for one in (*methods, *references) if references}
        found = [
            differences([_effects(method, one, counts) for method in methods]) for one in references
        ]
        return cls(references, found, len(methods[0].runs))

    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Return a column for each reference: its heading, and a cell for each method.

        A cell is the difference of the mean over clients, in percentage points, with its 95 %
        interval; in bold if the method is significantly better by a p that is adjusted for the
        table. "-" is the reference itself.
        """
        return [f"to {one.name}" for one in self.references], cells(self.found)

    @property
    def note(self) -> str:
        """Return a note on how to read the columns, and which differences the data can show."""
        return note_of([one.name for one in self.references], self.found, self.seeds > 1)


def usable(references: Sequence[Method], table: Sequence[Method]) -> list[Method]:
    """Return the references of a further table: its rows of these names, or those on its data."""
    own = {method.name: method for method in table}
    keys, _, tokens = _of_speakers(table[0])
    found = []
    for one in references:
        others, _, counts = _of_speakers(one)
        if one.name in own:
            found.append(own[one.name])
        elif others == keys and (counts == tokens).all():
            found.append(one)
    return found


def cells(found: Sequence[Sequence[Difference | None]], better: int = -1) -> list[list[str]]:
    """Format columns of differences, each to one reference; "-" is the reference itself.

    Args:
        found: in percentage points; p is adjusted for all of them together.
        better: the sign of an improvement.
    """
    adjusted = iter(holm([np.nan if one is None else one.p for column in found for one in column]))
    return [[_cell(one, next(adjusted), better) for one in column] for column in found]


def note_of(
    names: Sequence[str],
    found: Sequence[Sequence[Difference | None]],
    seeds: bool,
    of: str = "AVG",
) -> str:
    """Return a note on how to read such columns, and which differences the data can show.

    Args:
        names: of the references.
        found: the differences to each.
        seeds: whether there are several seeds.
        of: the measure whose differences these are.
    """
    note = (
        f"To {' and '.join(names)}: difference of {of} in percentage points, with 95 % intervals "
        f"over {'seeds and ' * seeds}test speakers, not adjusted; in bold where a method is better "
        f"with Holm's adjusted p below {_ALPHA:g}, of all rows and columns"
        f"{', which rows of one seed do not have' * (not seeds)}."
    )
    known = [one for column in found for one in column if one and not np.isnan(one.low)]
    if known:
        # Half of the median interval.
        least = statistics.median((one.high - one.low) / 2 for one in known)
        note += f" Differences above about {least:.1f} points can be distinguished from zero."
    return note


def _cell(found: Difference | None, p: float, better: int) -> str:
    if found is None:
        return "-"
    if np.isnan(found.low):
        return f"{found.value:.1f}"
    text = f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]"
    return f"**{text}**" if found.value * better > 0 and p < _ALPHA else text


def _effects(method: Method, reference: Method, counts: Mapping[int, Counts]) -> Effects | None:
    """Return the difference of error rates; None for a method with itself."""
    if method.runs[0].scores == reference.runs[0].scores:
        return None
    keys, errors, tokens = counts[id(method)]
    others_keys, others, others_tokens = counts[id(reference)]
    if keys != others_keys or (tokens != others_tokens).any():
        problem = f"not the test data of {reference.name}"
        raise UserError(problem, path=method.runs[0].scores)
    clients = sorted({client for client, _ in keys})
    numbers = np.array([clients.index(client) for client, _ in keys])
    return effects(errors, others, tokens, numbers)


def _of_speakers(method: Method) -> Counts:
    """Sum errors over speakers, for all seeds of a method."""
    rate, (first, *others) = method.runs[0].unit.rate, method.runs
    if not all(first.counts.is_of_same_data(other.counts) for other in others):
        raise UserError("the test data differ between seeds", path=first.scores)
    found = [run.counts.by_speaker(rate) for run in method.runs]
    keys, tokens, _ = found[0]
    return keys, np.array([errors for _, _, errors in found]), tokens
