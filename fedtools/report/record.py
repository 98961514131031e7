"""What the tables of a page are made of, in one file beside it, and the page from that file.

The file is compressed by gzip; `zcat` shows it. Its first line is a JSON object: the text of the
page, and for each row of a table and each seed what its ledger sums up to and the bounds of its
intervals. Then follows a table for each test data set, below an empty line: an utterance in each
line, with its client and speaker, its number of words (or characters), and its errors by each
system, whose number is the `scores` of rows above. Rates, differences and costs are computed from
these; no path of an experiment is kept. The same figures give the same bytes.

A file may come from anybody: its size, types, numbers and names are checked before anything is
written.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from fedtools.core.atomic import atomic_write
from fedtools.core.errors import UserError
from fedtools.core.text_files import lines_of, read_bytes
from fedtools.data.text_units import CHARACTER, WORD, TextUnit
from fedtools.decode.lists import TunedWeights
from fedtools.report.options import page_facts
from fedtools.report.page import Cells, Contents, Page
from fedtools.report.results import Cost, Interval, Method, Run, check_comparable, group
from fedtools.score.bootstrap import ALL, AVERAGE
from fedtools.score.pairs import cuts_of
from fedtools.score.utterances import KEYS, Utterances

Kind = TypeVar("Kind")

FORMAT = "fedtools report 1"
# A page that is committed should have no larger file.
USUAL = 200_000
# The largest files that are read, compressed and not.
_MOST, _MOST_UNPACKED = 32 << 20, 128 << 20
_NUMBER = re.compile(r"\d{1,6}", re.ASCII)
# The rates that a system of a page may have.
_RATES = tuple(tuple(cuts_of(unit)) for unit in (WORD, CHARACTER))


class Strict:
    """The types of the first line: no other field, and no NaN."""

    __pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # noqa: RUF012


@dataclass(frozen=True)
class _Text(Strict):
    """The text of a page; `plot` and the pictures are names of files beside it."""

    section: str
    corpus: str
    release: str
    mini: bool
    command: str
    note: str
    references: list[str]
    plot: str | None
    pictures: list[tuple[str, str]]
    measured: list[tuple[str, Cells]]
    published: list[tuple[str, Cells]]
    begun: str


@dataclass(frozen=True)
class _Row(Strict):
    """A row of a table with one seed, as `Run`; its errors are those of the system `scores`.

    `cost` has the attributes of `Cost`, null for seconds that are not known, and `bounds` rate and
    client -> the ends of the interval, null for none.
    """

    name: str
    seed: int | None
    trained: bool
    scores: int
    cost: dict[str, int | float | None]
    bounds: dict[str, dict[str, tuple[float | None, float | None]]]
    curve: list[tuple[int, dict[str, float]]]
    weights: tuple[float, float] | None
    collapsed: dict[str, int]
    averaged: dict[str, list[int]]
    # What the weights were tuned on, "" if on nothing; earlier records have tuned weights alone.
    tuned_on: str = "validation data"


@dataclass(frozen=True)
class _Record(Strict):
    """The first line; tables have the indices of their rows."""

    format: Literal["fedtools report 1"]
    page: _Text
    rows: list[_Row]
    methods: list[int]
    further: list[tuple[str, list[int]]]
    elsewhere: list[int]


# --- writing --------------------------------------------------------------------------------------


def write_record(path: str | Path, contents: Contents, page: Page) -> None:
    """Write what a page's tables are made of; see `write_file`."""
    runs: list[Run] = []
    scores: dict[Path, int] = {}

    def indices(methods: Iterable[Method]) -> list[int]:
        own = [run for method in methods for run in method.runs]
        runs.extend(own)
        return list(range(len(runs) - len(own), len(runs)))

    tables = {
        "methods": indices(contents.methods),
        "further": [(caption, indices(methods)) for caption, methods in contents.further],
        "elsewhere": indices(contents.elsewhere),
    }
    rows = [asdict(_row(run, scores.setdefault(run.scores, len(scores)))) for run in runs]
    text = _Text(
        page.section,
        page.corpus.name,
        page.corpus.release,
        page.corpus.mini,
        page.command,
        page.note,
        list(page.references),
        page.plot.name if page.plot else None,
        [(caption, picture.name) for caption, picture in page.pictures],
        list(contents.measured),
        list(contents.published),
        contents.begun,
    )
    head = {"format": FORMAT, "page": asdict(text), "rows": rows, **tables}
    write_file(path, head, {scores[run.scores]: run.counts for run in runs})


def write_file(path: str | Path, head: object, counts: Mapping[int, Utterances]) -> None:
    """Write a first line of JSON and the tables of systems by number.

    If the file is unusually large, a line on stderr says so.
    """
    lines = [json.dumps(head, ensure_ascii=False, allow_nan=False), *_lines(counts)]
    packed = io.BytesIO()
    # Without a name and a time, so that the same figures give the same bytes.
    with gzip.GzipFile("", "wb", 9, packed, 0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
    with atomic_write(path, "wb") as out:
        out.write(packed.getvalue())
    if (size := len(packed.getvalue())) > USUAL:
        print(f"{path}: {size / 1000:.0f} kB, more than {USUAL / 1000:.0f}", file=sys.stderr)


def _row(run: Run, scores: int) -> _Row:
    cost = {name: None if value != value else value for name, value in asdict(run.cost).items()}
    bounds = {
        rate: {client: (one.low, one.high) for client, one in of.items()}
        for rate, of in run.rates.items()
    }
    weights = (float(run.weights.lm_weight), float(run.weights.word_score)) if run.weights else None
    return _Row(
        run.name,
        run.seed,
        run.experiment is not None,
        scores,
        cost,
        bounds,
        list(run.curve.items()),
        weights,
        dict(run.collapsed),
        {client: list(rounds) for client, rounds in run.averaged.items()},
        run.weights.tuned_on if run.weights else "",
    )


def _lines(counts: Mapping[int, Utterances]) -> Iterator[str]:
    """Yield the tables of utterances, one for each test data set."""
    sets: list[list[int]] = []
    for number, one in counts.items():
        same = (own for own in sets if counts[own[0]].is_of_same_data(one))
        if (found := next(same, None)) is None:
            sets.append([number])
        else:
            found.append(number)
    for numbers in sets:
        first = counts[numbers[0]]
        yield ""
        yield "\t".join([*KEYS, *_columns(first.tokens, numbers)])
        columns = [first.tokens[rate] for rate in first.tokens]
        columns += [counts[number].errors[rate] for number in numbers for rate in first.tokens]
        for key, values in zip(first.keys, np.stack(columns, 1).tolist(), strict=True):
            yield "\t".join([*key, *map(str, values)])


def _columns(rates: Iterable[str], numbers: Iterable[object]) -> list[str]:
    """Return the names of the columns of numbers: tokens by rate, then errors by system."""
    return [*rates, *(f"{number}.{rate}" for number in numbers for rate in rates)]


# --- reading --------------------------------------------------------------------------------------


def read_record(path: str | Path, results: str | Path) -> tuple[Contents, Page]:
    """Read the file that `write_record` writes.

    Args:
        path: the file.
        results: the page that is to be made, beside which its pictures are; those that are missing
            are left out, with a line on stderr.

    Raises:
        UserError: if it is damaged, too large, or not such a file.
    """
    path = Path(path)
    record, scores = read_file(path, _Record, _RATES)
    runs = [_run(row, scores, path) for row in record.rows]
    try:
        contents = Contents(
            _methods(runs, record.methods, path),
            [(caption, _methods(runs, own, path)) for caption, own in record.further],
            _apart([runs[index] for index in _checked(record.elsewhere, runs, path)]),
            [(caption, _table(cells, path)) for caption, cells in record.page.measured],
            [(caption, _table(cells, path)) for caption, cells in record.page.published],
            record.page.begun,
        )
        return contents, _page(record.page, contents, Path(results))
    except ValueError as error:
        raise UserError(str(error), path=path, line=1) from None


def format_of(path: Path) -> str:
    """Return the format that a file of `write_file` says it has; "" if it says none."""
    line = next(lines_of(io.BytesIO(_unpacked(path)), path), "")
    said = re.match(r'\{"format": "([^"]*)"', line)
    return said[1] if said else ""


def read_file(
    path: Path, kind: type[Kind], rates: Sequence[Sequence[str]]
) -> tuple[Kind, dict[int, Utterances]]:
    """Read a file of `write_file`: its first line, checked against a dataclass, and its systems.

    Args:
        path: the file.
        kind: the dataclass.
        rates: the names of a system's rates; a table has one of these sequences.

    Raises:
        UserError: if it is damaged, too large, or not such a file, or a text is not printable or
            could end a section of a page.
    """
    lines = enumerate(lines_of(io.BytesIO(_unpacked(path)), path), 1)
    return _head(next(lines, (1, ""))[1], kind, path), _scores(lines, path, rates)


def _unpacked(path: Path) -> bytes:
    packed, unpacker = read_bytes(path, _MOST), zlib.decompressobj(wbits=31)
    try:
        content = unpacker.decompress(packed, _MOST_UNPACKED)
    except zlib.error as error:
        raise UserError(f"not compressed by gzip, or damaged: {error}", path=path) from None
    if unpacker.unconsumed_tail:
        raise UserError(f"more than {_MOST_UNPACKED} bytes uncompressed", path=path)
    if not unpacker.eof:
        raise UserError("file cut off?", path=path)
    if unpacker.unused_data:
        raise UserError("bytes after the end of the compressed content", path=path)
    return content


def _head(line: str, kind: type[Kind], path: Path) -> Kind:
    from pydantic import TypeAdapter, ValidationError

    try:
        head = TypeAdapter(kind).validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        problem = f"{where}: {first['msg']}" if where else first["msg"]
        remedy = "give the file that the page's report wrote"
        raise UserError(problem, path=path, line=1, remedy=remedy) from None
    for text in _texts(asdict(head)):  # type: ignore[call-overload]
        # No text may end a section.
        if _is_unsafe(text.replace("\n", " ")):
            problem = f"{text[:40]!r} is not the text of a page"
            raise UserError(problem, path=path, line=1)
    return head


def _is_unsafe(text: str) -> bool:
    return not text.isprintable() or "<!--" in text


def _texts(value: object) -> Iterator[str]:
    """Yield all texts in nested lists and mappings, with the mappings' keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _texts(key)
            yield from _texts(below)
    elif isinstance(value, Sequence):
        for below in value:
            yield from _texts(below)


def _scores(
    lines: Iterator[tuple[int, str]], path: Path, rates: Sequence[Sequence[str]]
) -> dict[int, Utterances]:
    """Read the tables of utterances: number of a system -> its errors."""
    tables: list[_Table] = []
    for number, line in lines:
        if not line:
            at, header = next(lines, (number + 1, ""))
            tables.append(_Table.below(header.split("\t"), path, at, rates))
        elif not tables:
            raise UserError("no empty line above a table", path=path, line=number)
        else:
            tables[-1].add(line.split("\t"), number)
    scores: dict[int, Utterances] = {}
    for table in tables:
        for system, one in table.utterances():
            if system in scores:
                raise UserError(f"system {system} is duplicated", path=path, line=table.line)
            scores[system] = one
    return scores


@dataclass
class _Table:
    """A table of utterances, whose header is in a line of a file.

    Attributes:
        rates: of tokens and errors.
        systems: the numbers of its systems.
    """

    path: Path
    line: int
    rates: Sequence[str]
    systems: list[int]
    values: list[np.ndarray] = field(default_factory=list)
    keys: dict[str, tuple[str, str, str]] = field(default_factory=dict)

    @classmethod
    def below(
        cls, header: list[str], path: Path, line: int, known: Sequence[Sequence[str]]
    ) -> _Table:
        """Return a table without rows, of one of the known sequences of rates."""
        start = header[len(KEYS) :]
        rates = next((one for one in known if start[: len(one)] == list(one)), known[0])
        pattern = re.compile(rf"(\d{{1,6}})\.{rates[0]}", re.ASCII)
        systems = [int(found[1]) for found in map(pattern.fullmatch, header) if found]
        if not systems or header != [*KEYS, *_columns(rates, systems)]:
            problem = f"the header is {' '.join(header)[:80]!r}, not of utterances and their errors"
            raise UserError(problem, path=path, line=line)
        return cls(path, line, rates, systems)

    def add(self, fields: list[str], line: int) -> None:
        """Add an utterance."""
        keys, numbers, problem = fields[: len(KEYS)], fields[len(KEYS) :], ""
        if len(numbers) != len(self.rates) * (1 + len(self.systems)):
            problem = f"{len(fields)} fields, unlike the header"
        elif wrong := [one for one in keys if one.split() != [one] or _is_unsafe(one)]:
            problem = f"{wrong[0][:40]!r} is not a name"
        elif keys[2] in self.keys:
            problem = f"utterance {keys[2][:40]!r} is duplicated"
        elif wrong := [one for one in numbers if not _NUMBER.fullmatch(one)]:
            problem = f"{wrong[0][:40]!r} is not a number of words or errors"
        elif keys[0] == AVERAGE:
            problem = f"a client is named {AVERAGE!r}, like the total"
        if problem:
            raise UserError(problem, path=self.path, line=line)
        self.keys[keys[2]] = keys[0], keys[1], keys[2]
        self.values.append(np.array([int(one) for one in numbers], np.int32))

    def utterances(self) -> Iterator[tuple[int, Utterances]]:
        """Yield the number of each system, and its errors."""
        if not self.values:
            raise UserError("a header but no row", path=self.path, line=self.line)
        keys, columns = list(self.keys.values()), np.stack(self.values, 1).astype(int)
        if ALL in (clients := {client for client, _, _ in keys}) and len(clients) > 1:
            problem = f"a client is named {ALL!r}, like the total"
            raise UserError(problem, path=self.path, line=self.line)
        width = len(self.rates)
        tokens = dict(zip(self.rates, columns[:width], strict=True))
        for place, system in enumerate(self.systems, 1):
            own = columns[place * width : (place + 1) * width]
            yield system, Utterances(keys, tokens, dict(zip(self.rates, own, strict=True)))


def _unit(columns: Sequence[str]) -> TextUnit:
    return WORD if WORD.rate in columns else CHARACTER


def _run(row: _Row, scores: Mapping[int, Utterances], path: Path) -> Run:
    """Return a row of a table; rates are rounded as `fedtools score` rounds them."""
    if row.scores not in scores:
        raise UserError(f"no errors of system {row.scores}, {row.name!r}", path=path)
    counts = scores[row.scores]
    found, unit = counts.rates(path), _unit(list(counts.tokens))
    places = {rate: list(of) for rate, of in found.items()}
    if {rate: list(of) for rate, of in row.bounds.items()} != places:
        raise UserError(f"{row.name!r}: intervals are not of {places}", path=path, line=1)
    names = set(asdict(Cost()))
    known = {name: value for name, value in row.cost.items() if value is not None}
    if row.cost.keys() != names or names - known.keys() > {"speech"} or min(known.values()) < 0:
        raise UserError(f"{row.name!r}: costs are not {sorted(names)}", path=path, line=1)
    curve = dict(row.curve)
    if sorted(curve) != [at for at, _ in row.curve] or any(not one for one in curve.values()):
        raise UserError(f"{row.name!r}: rounds are not in order", path=path, line=1)
    return Run(
        row.name,
        Cost(**{name: known.get(name, math.nan) for name in names}),
        row.seed,
        unit,
        counts.sizes(unit.rate),
        {
            rate: {
                client: Interval(float(f"{value:.2f}"), *row.bounds[rate][client])
                for client, value in of.items()
            }
            for rate, of in found.items()
        },
        curve,
        Path(f"{path}, {row.name}") if row.trained else None,
        Path(f"{path}, system {row.scores}"),
        counts,
        TunedWeights(*row.weights, row.tuned_on) if row.weights else None,
        row.collapsed,
        row.averaged,
    )


def _methods(runs: Sequence[Run], indices: Sequence[int], path: Path) -> list[Method]:
    chosen = [runs[index] for index in _checked(indices, runs, path)]
    if not chosen:
        raise UserError("a table without rows", path=path, line=1)
    try:
        check_comparable(chosen)
        return group(chosen)
    except UserError as error:
        raise UserError(str(error), path=path, line=1) from None


def _apart(runs: Sequence[Run]) -> list[Method]:
    """Group runs that need not be comparable."""
    names = dict.fromkeys(run.name for run in runs)
    return [group([run for run in runs if run.name == name])[0] for name in names]


def _checked(indices: Sequence[int], runs: Sequence[Run], path: Path) -> Sequence[int]:
    if not all(0 <= index < len(runs) for index in indices):
        raise UserError("a table has rows that are not there", path=path, line=1)
    return indices


def _table(cells: Cells, path: Path) -> Cells:
    if len(cells) < 2 or len({len(line) for line in cells}) != 1 or not cells[0]:
        raise UserError("a table whose lines have other cells than its header", path=path, line=1)
    return cells


def _page(text: _Text, contents: Contents, results: Path) -> Page:
    """Return the page's text; raise ValueError if a name is malformed."""
    if "```" in text.command or any(
        "\n" in one for one in _texts(asdict(replace(text, command="")))
    ):
        raise ValueError("a text of several lines, or one that ends the block of the command")
    facts = page_facts(text.section, text.corpus, text.release, text.mini, text.command, None)
    for name in [*(name for _, name in text.pictures), *([text.plot] if text.plot else [])]:
        # Nothing is read or written that does not belong to the page.
        if "/" in name or not name.startswith(results.stem) or not name.endswith(".png"):
            raise ValueError(f"picture {name!r} does not belong to {results.name}")
    if text.plot and not any(method.curve for method in contents.methods):
        raise ValueError("a plot, but no rates by round")
    pictures = [(caption, results.with_name(name)) for caption, name in text.pictures]
    for _, missing in [one for one in pictures if not one[1].is_file()]:
        print(f"{missing}: left out, since it is missing", file=sys.stderr)
    return Page(
        **facts,
        note=text.note,
        plot=results.with_name(text.plot) if text.plot else None,
        references=text.references,
        pictures=[one for one in pictures if one[1].is_file()],
    )
