"""What a page of keyword spotting is made of, in one file beside it; see fedtools.report.section.

The file has, for each task, the evaluations and errors of each clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from summary import Row, accuracy_of

from fedtools.files.errors import UserError
from fedtools.report import section as sections
from fedtools.report.record import Strict
from fedtools.report.section import Section, Seeds
from fedtools.score.last_evaluations import CLIP
from fedtools.score.utterances import Utterances

FORMAT: Final = "kws1 report 1"


@dataclass(frozen=True)
class _Row(Strict):
    place: str
    name: str
    seeds: Seeds
    bytes: float
    epochs: float


@dataclass(frozen=True)
class _Record(Strict):
    format: Literal["kws1 report 1"]
    section: Section
    rows: list[_Row]


def write_record(path: Path, section: Section, rows: Sequence[Row]) -> None:
    """Write what a section is made of."""
    seeds, systems = sections.numbered(row.counts for row in rows)
    kept = [
        _Row(row.place, row.name, own, float(row.bytes), float(row.epochs))
        for row, own in zip(rows, seeds, strict=True)
    ]
    sections.write_record(path, _Record(FORMAT, section, kept), systems)


def read_record(path: Path) -> tuple[Section, list[Row]]:
    """Read the file that `write_record` writes.

    Raises:
        UserError: if it is not such a file.
    """
    record, errors = sections.read_record(path, _Record, CLIP, "clips")
    rows = []
    for row, own in zip(record.rows, errors, strict=True):
        if not all(map(_is_whole, own.values())):
            problem = f"{row.name!r}: no errors of clips for each seed"
            raise UserError(problem, path=path, line=1)
        if min(row.bytes, row.epochs) < 0:
            raise UserError(f"{row.name!r}: costs below 0", path=path, line=1)
        accuracy = {seed: accuracy_of(one) for seed, one in own.items()}
        rows.append(Row(row.place, row.name, accuracy, own, row.bytes, row.epochs))
    return record.section, rows


def _is_whole(counts: Utterances) -> bool:
    """Return whether each clip was evaluated as often, and was not wrong more often."""
    tokens = counts.tokens[CLIP]
    if tokens.min() < 1 or tokens.min() != tokens.max():
        return False
    return bool((counts.errors[CLIP] <= tokens).all())
