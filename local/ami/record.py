"""What a page of rescoring is made of, in one file beside it; see fedtools.report.section.

The file has the words and errors of each utterance, with its client and its person; for a page of
arms, whose tables are made by person, the words and errors of each person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from summary import Row

from fedtools.core.errors import UserError
from fedtools.data.text_units import WORD
from fedtools.report import section as sections
from fedtools.report.record import Strict
from fedtools.report.section import Section, Seeds

FORMAT: Final = "rescore1 report 1"


@dataclass(frozen=True)
class _Row(Strict):
    place: str
    name: str
    seeds: Seeds
    bytes: float
    seconds: float | None


@dataclass(frozen=True)
class _Record(Strict):
    format: Literal["rescore1 report 1"]
    section: Section
    rows: list[_Row]


def write_record(path: Path, section: Section, rows: Sequence[Row]) -> None:
    """Write what a section is made of."""
    seeds, systems = sections.numbered(row.counts for row in rows)
    kept = [
        _Row(row.place, row.name, own, float(row.bytes), row.seconds)
        for row, own in zip(rows, seeds, strict=True)
    ]
    sections.write_record(path, _Record(FORMAT, section, kept), systems)


def read_record(path: Path) -> tuple[Section, list[Row]]:
    """Read the file that `write_record` writes.

    Raises:
        UserError: if it is not such a file.
    """
    record, errors = sections.read_record(path, _Record, WORD.rate, "words")
    rows: list[Row] = []
    for row, own in zip(record.rows, errors, strict=True):
        rows.append(Row(row.place, row.name, own, row.bytes, row.seconds))
        first, problem = next(one for one in rows if one.place == row.place), ""
        data = next(iter(first.counts.values()))
        if own.keys() != first.counts.keys() or not all(map(data.is_of_same_data, own.values())):
            problem = f"seeds or utterances are not those of {first.name!r}"
        elif not data.tokens[WORD.rate].any():
            problem = "no word"
        elif min(row.bytes, row.seconds or 0) < 0:
            problem = "costs below 0"
        if problem:
            raise UserError(f"{row.name!r}: {problem}", path=path, line=1)
    return record.section, rows
