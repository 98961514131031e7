"""What a page of keyword spotting is made of, in one file beside it; see fedtools.report.record.

The first line has the text of the section and the costs of the summary's rows; then follow, for
each task, the evaluations and errors of each clip, by system. The summary is computed again from
these; other tables, of settings and thresholds, are kept as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from summary import Row, accuracy_of

from fedtools.files.errors import UserError
from fedtools.report.options import SECTION
from fedtools.report.page import with_section
from fedtools.report.record import Strict, read_file, write_file
from fedtools.report.summary import Summary
from fedtools.score.last_evaluations import CLIP
from fedtools.score.utterances import Utterances

FORMAT: Final = "kws1 report 1"


@dataclass(frozen=True)
class Section(Strict):
    """The text of a section: its name, the corpus, and what is above and below the summary."""

    name: str
    caption: str
    above: list[str]
    below: list[str]


@dataclass(frozen=True)
class _Row(Strict):
    place: str
    name: str
    # Seed and number of the system.
    seeds: list[tuple[int, int]]
    bytes: float
    epochs: float


@dataclass(frozen=True)
class _Record(Strict):
    format: Literal["kws1 report 1"]
    section: Section
    rows: list[_Row]


def write_record(path: Path, section: Section, rows: Sequence[Row]) -> None:
    """Write what a section is made of."""
    counts: dict[int, Utterances] = {}
    kept = []
    for row in rows:
        seeds = [(seed, len(counts) + place) for place, seed in enumerate(row.counts)]
        counts |= {number: row.counts[seed] for seed, number in seeds}
        kept.append(_Row(row.place, row.name, seeds, float(row.bytes), float(row.epochs)))
    write_file(path, asdict(_Record(FORMAT, section, kept)), counts)


def read_record(path: Path) -> tuple[Section, list[Row]]:
    """Read the file that `write_record` writes.

    Raises:
        UserError: if it is not such a file.
    """
    record, counts = read_file(path, _Record)
    rows = []
    for row in record.rows:
        own = {seed: counts[number] for seed, number in row.seeds if number in counts}
        if not own or len(own) != len(row.seeds) or not all(map(_is_whole, own.values())):
            problem = f"{row.name!r}: no errors of clips for each seed"
            raise UserError(problem, path=path, line=1)
        if min(row.bytes, row.epochs) < 0:
            raise UserError(f"{row.name!r}: costs below 0", path=path, line=1)
        accuracy = {seed: accuracy_of(one) for seed, one in own.items()}
        rows.append(Row(row.place, row.name, accuracy, own, row.bytes, row.epochs))
    if not rows:
        raise UserError("no rows", path=path, line=1)
    if not SECTION.fullmatch(record.section.name):
        raise UserError(f"{record.section.name!r} names no section", path=path, line=1)
    return record.section, rows


def page_with(path: Path, section: Section, summary: Summary) -> str:
    """Return the page with a section whose first table is the summary."""
    parts = [*section.above, summary.markdown(), *section.below]
    return with_section(path, section.name, "\n\n".join(part.strip() for part in parts))


def _is_whole(counts: Utterances) -> bool:
    """Return whether each clip was evaluated as often, and was not wrong more often."""
    tokens = counts.tokens.get(CLIP)
    if tokens is None or tokens.min() < 1 or tokens.min() != tokens.max():
        return False
    return bool((counts.errors[CLIP] <= tokens).all())
