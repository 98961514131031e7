"""Tables: tab-separated files with a header, and tables for readers, in aligned columns."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from fedtools.core.atomic import write_lines
from fedtools.core.errors import UserError
from fedtools.core.text_files import stream_lines

# Where HTML begins a tag or a comment.
_TAG = re.compile("<(?=[A-Za-z/!?])")


def read_tsv(
    path: str | Path,
    columns: Sequence[str] | None,
    numbers: Collection[str] = (),
    unknown: Collection[str] = ("-",),
    lines: Iterable[str] | None = None,
) -> list[dict[str, str]]:
    """Read a tab-separated file whose header is exactly `columns`.

    Args:
        path: the file: UTF-8, "\\n" line ends, a header line, no quoting.
        columns: the names that the header must have, in this order; None takes any.
        numbers: columns that must exist and hold finite numbers.
        unknown: fields that may stand in such a column instead of a number.
        lines: its lines, if they have been read already.

    Returns:
        A mapping column -> field for each row, in the order of the file. A row's line number is its
        index + 2.

    Raises:
        UserError: naming file and line, if the file cannot be read, has another header, a row has
            another number of fields, or a field of `numbers` is not a number.
    """
    path = Path(path)
    lines = iter(stream_lines(path) if lines is None else lines)
    header = next(lines, "")
    names = header.split("\t")
    if columns is not None and names != list(columns):
        remedy = f"expected {' '.join(columns)}"
        raise UserError(f"the header is {header[:300]!r}", path=path, line=1, remedy=remedy)
    if len(set(names)) != len(names):
        raise UserError("a column name is duplicated", path=path, line=1)
    if missing := [name for name in numbers if name not in names]:
        raise UserError(f"no column {missing[0]!r}", path=path, line=1)
    rows = []
    for number, line in enumerate(lines, 2):
        fields = line.split("\t")
        if len(fields) != len(names):
            raise UserError(
                f"{len(fields)} fields, the header has {len(names)}", path=path, line=number
            )
        row = dict(zip(names, fields, strict=True))
        for name in numbers:
            if row[name] not in unknown and not _is_number(row[name]):
                problem = f"{name} is {row[name][:40]!r}, not a number"
                raise UserError(problem, path=path, line=number)
        rows.append(row)
    return rows


def _is_number(text: str) -> bool:
    # float() alone would let whitespace, underscores and other scripts' digits pass.
    known = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text, re.ASCII)
    return bool(known) and math.isfinite(float(text))


def known_number(text: str, otherwise: float) -> float:
    """Return the number in a field, or `otherwise` if it is unknown."""
    return float(text) if _is_number(text) else otherwise


def write_tsv(
    path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]
) -> None:
    """Write a tab-separated file with a header, atomically; `read_tsv` reads it back.

    Args:
        path: the file.
        columns: the header, and the order of the fields.
        rows: mappings that have every column; values are written by `str`, so round floats first.

    Raises:
        ValueError: if a field holds a tab, a line end or a NUL.
    """
    write_lines(path, _lines(columns, rows))


def _lines(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    yield "\t".join(columns)
    for row in rows:
        fields = [str(row[column]) for column in columns]
        if any(mark in field for field in fields for mark in "\t\n\0"):
            raise ValueError(f"a tab, a line end or a NUL in {fields}")
        yield "\t".join(fields)


def number(row: Mapping[str, str], column: str, path: str | Path, line: int) -> float:
    """Return the finite, non-negative number in a field of a row from `read_tsv`.

    Raises:
        UserError: naming file and line, if the field is anything else.
    """
    try:
        value = float(row[column])
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UserError(f"{column} is {row[column][:40]!r}, not a number", path=path, line=line)
    return value


def count(row: Mapping[str, str], column: str, path: str | Path, line: int) -> int:
    """Return the non-negative integer in a field of a row from `read_tsv`.

    Raises:
        UserError: naming file and line, if the field is anything else.
    """
    text = row[column]
    # isdecimal() alone would let other scripts' digits pass, and int() underscores and whitespace.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UserError(f"{column} is {text[:40]!r}, not a whole number", path=path, line=line)
    return int(text)


def with_deviation(values: Sequence[float], write: Callable[[float], str]) -> str:
    """Format the mean and, of several values, their sample standard deviation: "23.0 ± 2.9"."""
    deviation = f" ± {write(statistics.stdev(values))}" if len(values) > 1 else ""
    return write(statistics.fmean(values)) + deviation


def format_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], align: str | None = None
) -> str:
    """Format a table in plain text, with aligned columns, two spaces apart.

    Args:
        header: the columns' names.
        rows: the cells, written by `str`.
        align: a letter for each column, "l" or "r"; by default the first is "l", the others "r".

    Returns:
        The lines, each with a final "\\n", without trailing whitespace.
    """
    text = _tabulate("plain", header, rows, align)
    return "".join(f"{line.rstrip()}\n" for line in text.split("\n"))


def format_markdown(
    header: Sequence[str], rows: Iterable[Sequence[object]], align: str | None = None
) -> str:
    """Format a table in Markdown, readable as plain text; arguments as in `format_table`.

    Cells are no HTML: names in corpora may look like it.
    """
    escaped = [
        [_TAG.sub("&lt;", str(cell)).replace("|", "\\|") for cell in row] for row in (header, *rows)
    ]
    return _tabulate("pipe", escaped[0], escaped[1:], align) + "\n"


def _tabulate(
    form: str, header: Sequence[str], rows: Iterable[Sequence[object]], align: str | None
) -> str:
    import tabulate

    # tabulate pads headers by two columns because of numbers, which are plain text here.
    tabulate.MIN_PADDING = 0
    names = {"l": "left", "r": "right"}
    sides = [names[letter] for letter in align or "l" + "r" * (len(header) - 1)]
    cells = [list(map(str, row)) for row in rows]
    return tabulate.tabulate(cells, header, form, colalign=sides, disable_numparse=True)


def size_text(size: float) -> str:
    """Format bytes in the largest decimal unit with a digit before the point; a dash for none."""
    if not size:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} B"
