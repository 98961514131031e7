"""Sections that recipes' own reports write, and the files beside a page that remake them.

A file is as in `fedtools.report.record`: its first line has the text of a section and the rows of
its summary, and then follow the errors of each utterance, by system. The summary is computed again
from these; other tables are kept as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError, exit_with_message
from fedtools.report.options import SECTION
from fedtools.report.page import with_section
from fedtools.report.record import Strict, read_file, write_file
from fedtools.report.summary import Summary, on_terminal
from fedtools.score.utterances import Utterances

# Seed -> errors by utterance of a row.
Errors = dict[int, Utterances]
# Seed and number of a system.
Seeds = list[tuple[int, int]]


@dataclass(frozen=True)
class Section(Strict):
    """The text of a section: its name, the corpus, and what is above and below the summary."""

    name: str
    caption: str
    above: list[str]
    below: list[str]


class Row(Protocol):
    """What a file has of each row of a summary, besides facts of the recipe."""

    @property
    def name(self) -> str:
        """The row's name."""

    @property
    def seeds(self) -> Seeds:
        """The systems, by seed."""


class Record(Protocol):
    """The first line of a file, a dataclass that derives from `Strict`."""

    @property
    def section(self) -> Section:
        """The text."""

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the summary."""


Kind = TypeVar("Kind", bound=Record)
Rows = TypeVar("Rows")


def numbered(rows: Iterable[Mapping[int, Utterances]]) -> tuple[list[Seeds], Errors]:
    """Number the systems of all rows; return those of each row, and number -> errors."""
    systems: Errors = {}
    found = []
    for counts in rows:
        found.append([(seed, len(systems) + place) for place, seed in enumerate(counts)])
        systems |= {number: counts[seed] for seed, number in found[-1]}
    return found, systems


def write_record(path: Path, record: Record, systems: Mapping[int, Utterances]) -> None:
    """Write what a section is made of."""
    write_file(path, asdict(record), systems)  # type: ignore[call-overload]


def read_record(path: Path, kind: type[Kind], rate: str, unit: str) -> tuple[Kind, list[Errors]]:
    """Read a file of `write_record`, and return the errors of each row by seed.

    Args:
        path: the file.
        kind: the dataclass of its first line.
        rate: the name of the only rate.
        unit: what errors are counted of, for messages.

    Raises:
        UserError: if it is not such a file.
    """
    record, systems = read_file(path, kind, [[rate]])
    found = []
    for row in record.rows:
        own = {seed: systems[number] for seed, number in row.seeds if number in systems}
        if not own or len(own) != len(row.seeds):
            raise UserError(f"{row.name!r}: no errors of {unit} for each seed", path=path, line=1)
        found.append(own)
    if not found:
        raise UserError("no rows", path=path, line=1)
    if not SECTION.fullmatch(record.section.name):
        raise UserError(f"{record.section.name!r} names no section", path=path, line=1)
    return record, found


def page_with(path: Path, section: Section, summary: Summary) -> str:
    """Return the page with a section whose first table is the summary."""
    parts = [*section.above, summary.markdown(), *section.below]
    return with_section(path, section.name, "\n\n".join(part.strip() for part in parts))


def remake(
    description: str,
    read: Callable[[Path], tuple[Section, Rows]],
    summary_of: Callable[[Rows], Summary],
) -> None:
    """Run a recipe's `remake.py`: 0 done, 1 bad input (one line on stderr), 2 wrong usage.

    Args:
        description: what the command does.
        read: reads the file of a section, and returns its text and the rows of its summary.
        summary_of: makes the summary.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("file", type=Path, help="the file that the report wrote beside its page")
    parser.add_argument(
        "results", type=Path, help="the page; its other sections are left unchanged"
    )
    options = parser.parse_args()
    with exit_with_message("remake.py"):
        section, rows = read(options.file)
        summary = summary_of(rows)
        write_text(options.results, page_with(options.results, section, summary))
        print(on_terminal(section.caption, summary, sys.stdout), end="")
