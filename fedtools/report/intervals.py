"""Error rates with 95 % intervals: a table per rate, and all of a section's in one TSV."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedtools.core.tables import format_markdown, write_tsv
from fedtools.report.differences import Compared
from fedtools.report.results import Interval, Method
from fedtools.score.bootstrap import AVERAGE
from fedtools.score.crossed import Difference

COLUMNS = ["table", "method", "rate", "client", "value", "low", "high"]
# In rows of the mean over clients, by the main rate: the difference to the table's first row; bytes
# of a client, both ways, and computation in epochs. "-" in other rows, and where there is none.
COLUMNS += ["difference", "difference_low", "difference_high", "bytes", "computation"]


def interval_file(page: Path, section: str) -> Path:
    """Return the path of a section's TSV of intervals, next to the page."""
    return page.with_name(f"{page.stem}-{section}-intervals.tsv")


def record_file(page: Path, section: str) -> Path:
    """Return the path of what a section's tables are made of, next to the page."""
    return page.with_name(f"{page.stem}-{section}-errors.gz")


def write_intervals(path: Path, tables: Iterable[tuple[str, Sequence[Method]]]) -> None:
    """Write every rate of every table, by client, in %; a dash is a bound that is not known.

    Args:
        path: the TSV.
        tables: captions of a section's tables, and their rows.
    """
    rows = [row for caption, methods in tables for row in _rows(caption, methods)]
    write_tsv(path, COLUMNS, rows)


def _rows(caption: str, methods: Sequence[Method]) -> Iterator[dict[str, str]]:
    (differences,) = Compared.of(methods, methods[:1]).found
    for method, difference in zip(methods, differences, strict=True):
        main = method.runs[0].unit.rate, AVERAGE
        for rate, clients in method.runs[0].rates.items():
            for client in clients:
                found = method.interval(rate, client)
                bounds = (found.value, found.low, found.high)
                cells = ("-" if bound is None else f"{bound:.2f}" for bound in bounds)
                more = _summed(method, difference) if (rate, client) == main else ["-"] * 5
                values = (caption, method.name, rate, client, *cells, *more)
                yield dict(zip(COLUMNS, values, strict=True))


def _summed(method: Method, difference: Difference | None) -> list[str]:
    """Return a method's cells in the last columns."""
    bounds = (math.nan,) * 3 if difference is None else difference[:3]
    cells = ["-" if math.isnan(bound) else f"{bound:.2f}" for bound in bounds]
    size, epochs = method.cost.client_bytes, method.cost.computation
    return [*cells, f"{size:.0f}" if size else "-", f"{epochs:.4f}" if epochs else "-"]


def interval_table(methods: Sequence[Method], rate: str) -> str:
    """Format one rate ("wer" or "cer") by client, with its 95 % intervals."""
    clients = list(methods[0].runs[0].rates[rate])
    cells = [
        [method.marked, *(with_interval(method.interval(rate, client)) for client in clients)]
        for method in methods
    ]
    return format_markdown(["Method", *map(heading, clients)], cells)


def with_interval(rate: Interval) -> str:
    """Format a rate in %, with its interval if that is known."""
    if rate.low is None or rate.high is None:
        return f"{rate.value:.1f}"
    return f"{rate.value:.1f} [{rate.low:.1f}, {rate.high:.1f}]"


def heading(client: str) -> str:
    """Return the heading of a client's column; AVG for the mean over clients."""
    return "AVG" if client == AVERAGE else client
