"""A report of the characters that normalisation removes from sentences."""

from __future__ import annotations

import unicodedata
from collections import Counter
from pathlib import Path

from fedtools.core.tables import format_table, write_tsv

COLUMNS = ("character", "code", "name", "count")
# Number of lines that are printed; the file has all of them.
MOST = 20


def report(path: Path, left_out: Counter[str]) -> None:
    """Write a table of the characters that were left out, and print its first rows.

    Letters and marks come before punctuation, and the most frequent first.
    """
    ordered = sorted(left_out.items(), key=lambda one: (not _is_letter(one[0]), -one[1], one[0]))
    rows = [dict(zip(COLUMNS, (*_described(mark), count), strict=True)) for mark, count in ordered]
    write_tsv(path, COLUMNS, rows)
    if not rows:
        return
    kinds = f"{len(rows)} character{'s' * (len(rows) > 1)}"
    rest = f"; {len(rows) - MOST} more of them in {path}" if len(rows) > MOST else ""
    print(f"left out of the sentences: {kinds}, {left_out.total()} times{rest}")
    print(format_table(COLUMNS, [list(row.values()) for row in rows[:MOST]]))


def _is_letter(mark: str) -> bool:
    return unicodedata.category(mark)[0] in "LM"


def _described(mark: str) -> tuple[str, str, str]:
    """Return a character in printable form, its code and its name."""
    # A combining mark needs a base, or it would combine with the preceding character.
    shown = "\u25cc" + mark if unicodedata.category(mark)[0] == "M" else mark
    name = unicodedata.name(mark, "control character").lower()
    return shown if shown.isprintable() else "-", f"U+{ord(mark):04X}", name
