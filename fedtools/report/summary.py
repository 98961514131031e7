"""The summary of a page: five columns, the first table of a page and the last on the terminal."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np

from fedtools.core.tables import format_markdown, format_table
from fedtools.report.differences import Compared, cells
from fedtools.report.intervals import with_interval
from fedtools.report.results import Interval, Method, computation_text
from fedtools.score.bootstrap import AVERAGE
from fedtools.score.crossed import Difference, difference

# The longest line on the terminal, and the width that a method's name has at least.
_WIDTH, _LEAST = 100, 20


@dataclass(frozen=True)
class Line:
    """A row of a summary.

    Attributes:
        method: as the tables name it.
        rate: the error rate or accuracy, in %.
        difference: to the first row, in percentage points; None for that row.
        bytes: what a client sends and receives in all rounds, mean over clients.
        computation: as the page's other tables have it.
    """

    method: str
    rate: Interval
    difference: Difference | None
    bytes: float
    computation: str


@dataclass(frozen=True)
class Summary:
    """A page's methods in five columns.

    Attributes:
        measure: the name of the rate, such as "WER".
        lines: the rows.
        better: the sign of a difference that is an improvement.
    """

    measure: str
    lines: Sequence[Line]
    better: int = -1

    def markdown(self) -> str:
        """Return the table in Markdown, with significant improvements in bold."""
        return format_markdown(self._header, self._cells(lambda text: f"**{text}**"))

    def text(self, colour: bool = False) -> str:
        """Return the table in plain text of at most 100 columns; long names take several lines.

        Args:
            colour: whether significant improvements are set in bold by escape sequences.
        """
        mark: Callable[[str], str] = (lambda text: f"\033[1m{text}\033[0m") if colour else str
        found, plain = self._cells(mark), self._cells(str)
        taken = sum(
            2 + max(len(row[column]) for row in (self._header, *plain))
            for column in range(1, len(self._header))
        )
        rows = []
        for name, *rest in found:
            first, *more = textwrap.wrap(name, max(_LEAST, _WIDTH - taken)) or [""]
            rows += [[first, *rest], *([f"  {line}", "", "", "", ""] for line in more)]
        return format_table(self._header, rows)

    @property
    def _header(self) -> list[str]:
        return ["Method", f"{self.measure} (%)", "to first row", "MB/client", "Computation"]

    def _cells(self, mark: Callable[[str], str]) -> list[list[str]]:
        (differences,) = cells([[line.difference for line in self.lines]], self.better)
        return [
            [
                line.method,
                with_interval(line.rate),
                mark(text.strip("*")) if text.startswith("**") else text,
                megabytes(line.bytes),
                line.computation,
            ]
            for line, text in zip(self.lines, differences, strict=True)
        ]


def summarise(methods: Sequence[Method]) -> Summary:
    """Return the summary of methods that were scored on the same data.

    Raises:
        UserError: if they are of other test data.
    """
    unit = methods[0].runs[0].unit
    (found,) = Compared.of(methods, methods[:1]).found
    lines = [
        Line(
            method.marked,
            method.interval(unit.rate, AVERAGE),
            one,
            method.cost.client_bytes,
            computation_text(method, methods),
        )
        for method, one in zip(methods, found, strict=True)
    ]
    return Summary(unit.title, lines)


def rate_of(errors: np.ndarray, tokens: np.ndarray) -> Interval:
    """Return an error rate in % with its interval, over seeds and speakers, of a single group.

    Args:
        errors: (seeds, speakers).
        tokens: (speakers,).
    """
    none, groups = np.zeros_like(errors), np.zeros(len(tokens), int)
    found = difference(errors, none, tokens, groups)
    if np.isnan(found.low):
        return Interval(found.value, None, None)
    return Interval(found.value, max(0.0, found.low), min(100.0, found.high))


def note(measure: str, of_rate: str, first: str, computation: str, over_seeds: bool) -> str:
    """Return how to read a summary, in sentences.

    Args:
        measure: as in the summary.
        of_rate: what the rate and its interval are.
        first: what the differences are to.
        computation: what the last column is.
        over_seeds: whether there are several seeds.
    """
    return (
        f"{measure}: {of_rate}. To first row: difference to {first} in percentage points, with "
        f"95 % intervals over {'seeds and ' * over_seeds}test speakers, not adjusted; in bold "
        f"where a method is better with Holm's adjusted p below 0.05"
        f"{', which rows of one seed do not have' * (not over_seeds)}. MB/client: what one client "
        "sends and receives in all rounds, mean over clients. Computation: "
        f"{computation}."
    )


def megabytes(size: float) -> str:
    """Format bytes in MB with three significant digits; a dash for none."""
    if not size:
        return "-"
    value = size / 1e6
    # The exponent of the rounded value: 0.9996 is 1.00.
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{max(0, 2 - exponent)}f}"


def on_terminal(caption: str, summary: Summary, stream: TextIO) -> str:
    """Return a page's summary for a stream, below the name of its corpus.

    Args:
        caption: the corpus, marked if it is a mini corpus.
        summary: its rows.
        stream: colours are used if it is a terminal and NO_COLOR is not set.
    """
    colour = stream.isatty() and not os.environ.get("NO_COLOR")
    heading = f"\033[1m{caption}\033[0m" if colour else caption
    return f"{heading}\n\n{summary.text(colour)}"
