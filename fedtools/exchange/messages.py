"""The messages that clients send in a round, and their validation by the server.

    update.<job>.tsv           a row for each client of the job; written last, so that it marks the
                               job as complete
    update.<job>.safetensors   the clients' tensors, stacked on dimension 0 in the order of the
                               rows; a client that sends nothing has zeros there
    features.<client>.ark .scp a client's features, if the method asks for them
    update.<job>.answer .sig   of a site: see `fedtools.exchange.answers`
    secure.*                   of secure sums instead: see `fedtools.federation.secure_round`

`MessageWriter` writes these files. `read_messages` looks only at the headers of tensors;
`fedtools.server.aggregate` checks the values while it reads them. Nothing that comes from a client
is trusted: no pickle, no size, no name, no path, no value, no file of another client.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from fedtools.core.atomic import atomic_path, remove
from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv, write_tsv
from fedtools.core.untrusted import Seal, open_received, received_lines, seal_of, sum_of
from fedtools.data.datadir import check_id
from fedtools.exchange.origin import Origin
from fedtools.exchange.sent_features import (
    Features,
    check_features,
    feature_paths,
    received_bytes,
    write_features,
)
from fedtools.exchange.signed import signature_of
from fedtools.exchange.states import (
    Layout,
    Spec,
    as_array,
    check_spec,
    layout_of,
    make_header,
    read_at,
    read_layout,
    row_bytes,
    write_at,
)
from fedtools.exchange.values import Values

if TYPE_CHECKING:
    import torch

COLUMNS = (
    *("client", "utterances", "steps", "loss", "seconds", "bytes"),
    *("experiment", "round", "base", "status"),
)

# Statuses of messages that count. With COLLAPSED, nearly all pseudo-labels were empty, so that the
# model is learning to output nothing. With CAPPED, the server has lowered the weight, by
# `Method.max_weight_ratio`. With LARGE, a few clients have most of what the server uses. With
# OTHER, a site has another torch or processor than the server, so that its training may differ by
# rounding from that of the server's machine. With CLIPPED and LEFT_OUT, a robust rule has shortened
# the update, or given it no share: the message is sound, and what the client keeps of the round is.
OK, COLLAPSED, CAPPED, LARGE = "ok", "collapsed", "weight lowered", "large share"
OTHER = "other torch or processor"
CLIPPED, LEFT_OUT = "clipped", "left out by the robust rule"
COUNTED = OK, COLLAPSED, CAPPED, LARGE, OTHER, CLIPPED, LEFT_OUT
COLLAPSED_FROM = 0.95  # share of empty labels in a round

# Of these files; sites and server must have the same.
FORMAT = 1
# Far more than any client has, or can do.
MOST_UTTERANCES, _MOST_STEPS = 10**6, 10**9
# A mean over utterances or clips, in nats; with a larger loss, training has diverged.
MAX_LOSS = 1e6
# Clocks of machines may differ; a client gains nothing from a day more.
_MORE_SECONDS = 86_400.0


@dataclass(frozen=True)
class Payload:
    """What each client sends in addition to its row; by default nothing.

    Attributes:
        tensors: shapes and types of one client's tensors, of a model or others (counts).
        features: bounds on features, or None.
        values: bounds on the elements of tensors by name; other tensors need only be finite.
        norm: for tensors of whole numbers, the largest norm of all of them together; or None.
    """

    tensors: Spec = field(default_factory=dict)
    features: Features | None = None
    values: Mapping[str, Values] = field(default_factory=dict)
    norm: int | None = None


@dataclass(frozen=True)
class Limits:
    """Upper limits on the numbers of a client's row in a round; more is refused.

    Attributes:
        utterances: client -> utterances.
        steps: client, utterances -> steps.
        seconds: since the clients were sampled, by the server's own clock.
    """

    utterances: Callable[[str], int] = lambda client: MOST_UTTERANCES
    steps: Callable[[str, int], int] = lambda client, utterances: _MOST_STEPS
    seconds: float = 1e9


class Report(NamedTuple):
    """A client's report on its work in a round: the numbers of its row.

    `loss` is the mean training loss, `utterances` the size of the client's data, which may be zero.
    With a `reason`, the client sends nothing, for that reason. `empty_labels` is the share of
    utterances whose pseudo-labels were empty.
    """

    client: str
    utterances: int = 0
    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    empty_labels: float = 0.0


@dataclass(frozen=True)
class Message:
    """One client's message that passed all checks; its tensors are row `row` of a job's file.

    `seals` are those of the job's files, `sums` maps names to the SHA-256 of the client's feature
    files, and `frames` is the number of frames of its features.
    """

    client: str
    utterances: int
    steps: int
    loss: float
    seconds: float
    bytes: int
    path: Path
    layout: Layout | None
    row: int
    status: str = OK
    seals: Mapping[Path, Seal] = field(default_factory=dict)
    sums: Mapping[str, str] = field(default_factory=dict)
    frames: int = 0

    def open(self) -> BinaryIO:
        """Open the file of the tensors; raise a `UserError` if it changed since it was checked."""
        return open_received(self.path, seal=self.seals.get(self.path))

    def offset(self, name: str) -> int:
        """Return the byte of the file at which this client's row of a tensor begins."""
        if self.layout is None:
            raise ValueError(f"no tensors of {self.client}")
        return self.layout.offsets[name] + self.row * self.layout.strides[name]


@dataclass(frozen=True)
class Refusal:
    """A client whose message does not count, and the reason.

    `bytes` is the size of the refused message as far as it is known; 0 if the client sent nothing.
    """

    client: str
    reason: str
    bytes: int = 0


def read_messages(
    round_dir: Path,
    jobs: Sequence[Sequence[str]],
    sampled: Sequence[str],
    payload: Payload,
    origin: Origin,
    limits: Limits | None = None,
) -> tuple[list[Message], list[Refusal]]:
    """Validate every message of a round, without reading tensors; features are read.

    If a job's table cannot be read, or names a client of another job, or if the tensor file is
    damaged or does not fit the table, all clients of this job are refused, and only these. A client
    is refused if its row is invalid, has another origin, or is duplicated. The values of tensors
    are left to `fedtools.server.aggregate`. Files of no job are ignored, with a warning.

    Args:
        round_dir: the round's directory.
        jobs: the clients of each job.
        sampled: the clients of the round, in the order in which they are returned.
        payload, origin: as in `MessageWriter`.
        limits: upper limits on a client's numbers.

    Returns:
        The messages that count, and a refusal for each other client.
    """
    expected = set[Path]()
    for job in range(1, len(jobs) + 1):
        answer = answer_path(round_dir, job)
        expected |= {*paths_of(round_dir, job), answer, signature_of(answer)}
    for path in sorted(set(round_dir.glob("update.*")) - expected):
        name = path.name if path.name.isprintable() else ascii(path.name)
        print(f"{round_dir}/{name}: no job was to write this file; ignored", file=sys.stderr)
    came: dict[str, Message | Refusal] = {}
    for job, clients in enumerate(jobs, 1):
        try:
            rows = _Job(round_dir, job, clients, payload, origin, limits or Limits()).rows()
        except UserError as error:
            reason = f"sent nothing that could be read; {_reason_of(error, round_dir)}"
            rows = {client: Refusal(client, reason) for client in clients}
        came |= rows
    messages, refusals = [], []
    for client in sampled:
        item = came.get(client, Refusal(client, "is of no job"))
        if isinstance(item, Message):
            messages.append(item)
            continue
        more = received_bytes(round_dir, client) if payload.features else 0
        refusals.append(replace(item, bytes=item.bytes + more))
    return messages, refusals


def sums_of(messages: Sequence[Message]) -> dict[str, str]:
    """Return name -> SHA-256 of the messages' files, without files that have changed since."""
    sums: dict[str, str] = {}
    for path, seal in {pair for message in messages for pair in message.seals.items()}:
        with suppress(UserError):
            sums[path.name] = sum_of(path, seal)
    for message in messages:
        sums |= message.sums
    return dict(sorted(sums.items()))


def find_messages(round_dir: Path) -> Iterator[Path]:
    """Yield the files that clients sent in a round, the tables of jobs first."""
    patterns = ("update.*.tsv", "update.*", "features.*", "secure.*", ".answered.*", ".left.*")
    for pattern in patterns:
        yield from round_dir.glob(pattern)


def remove_messages(round_dir: Path) -> None:
    """Remove the files that clients sent in a round, the tables of jobs first."""
    for path in find_messages(round_dir):
        remove(path)


def paths_of(round_dir: Path, job: int) -> tuple[Path, Path]:
    """Return the paths of the tensors and the table of a job."""
    return round_dir / f"update.{job}.safetensors", round_dir / f"update.{job}.tsv"


def answer_path(round_dir: Path, job: int) -> Path:
    """Return the path of a site's statement on its job: see `fedtools.exchange.answers`."""
    return round_dir / f"update.{job}.answer"


def stacked(spec: Spec, clients: int) -> Spec:
    """Return the spec of the stacked tensors of a number of clients."""
    return {name: ((clients, *shape), kind) for name, (shape, kind) in spec.items()}


@dataclass(frozen=True)
class _Job:
    """A job's files, and what they should contain; arguments as in `read_messages`."""

    round_dir: Path
    number: int
    clients: Sequence[str]
    payload: Payload
    origin: Origin
    limits: Limits

    def rows(self) -> dict[str, Message | Refusal]:
        """Return each client's message or refusal; raise a `UserError` if the table is invalid.

        The bytes of refusals are those of tensors alone, for clients with a row in a readable file.
        """
        path, table = paths_of(self.round_dir, self.number)
        lines, seal = received_lines(table, len(self.clients))
        rows, seals = read_tsv(table, COLUMNS, lines=lines), {table: seal}
        self._check_names(rows, table)
        layout, problem = None, ""
        if self.payload.tensors:
            try:
                with open_received(path) as file:
                    layout, seals[path] = layout_of(file, path), seal_of(file)
                check_spec(layout.spec, stacked(self.payload.tensors, len(rows)), path)
            except UserError as error:
                problem = _reason_of(error, self.round_dir)
        size = 0 if problem else row_bytes(self.payload.tensors)
        missing = "has no row in its job's table"
        found: dict[str, Message | Refusal] = {
            client: Refusal(client, missing) for client in self.clients
        }
        times = Counter(row["client"] for row in rows)
        for index, row in enumerate(rows):
            client, reason, came = row["client"], problem, size
            if times[client] > 1:
                reason, came = f"came {times[client]} times", times[client] * size
            elif row["status"] not in (OK, COLLAPSED):
                status = "".join(c if c.isprintable() else "?" for c in row["status"][:300])
                reason, came = f"left out by its job: {status}", 0
            try:
                found[client] = (
                    Refusal(client, reason, came)
                    if reason
                    else self._message(row, index, path, layout, seals)
                )
            except UserError as error:
                found[client] = Refusal(client, _reason_of(error, self.round_dir), came)
        return found

    def _check_names(self, rows: Sequence[Mapping[str, str]], table: Path) -> None:
        """Raise a `UserError` if a client of another job has a row."""
        known = set(self.clients)
        for line, row in enumerate(rows, 2):
            check_id(row["client"], "client", table, line)
            if row["client"] not in known:
                problem = f"{row['client'][:80]!r} is no client of this job"
                raise UserError(problem, path=table, line=line)

    def _message(
        self,
        row: Mapping[str, str],
        index: int,
        path: Path,
        layout: Layout | None,
        seals: Mapping[Path, Seal],
    ) -> Message:
        line, client, table = index + 2, row["client"], path.with_suffix(".tsv")
        utterances, steps, announced = (
            count(row, column, table, line) for column in ("utterances", "steps", "bytes")
        )
        loss, seconds = (_real(row, column, table, line) for column in ("loss", "seconds"))
        if problem := self._beyond(client, utterances, steps, loss, seconds):
            raise UserError(problem, path=table, line=line)
        if problem := self.origin.problem(row):
            raise UserError(problem, path=table, line=line)
        size, frames, sums = row_bytes(self.payload.tensors), 0, dict[str, str]()
        if self.payload.features:
            bounds = self.payload.features
            more, frames, sums = check_features(self.round_dir, client, bounds, utterances)
            size += more
        if announced != size:
            raise UserError(f"{announced} bytes announced, {size} sent", path=table, line=line)
        # A client cannot have worked longer than the round has taken.
        seconds = min(seconds, self.limits.seconds)
        numbers = utterances, steps, loss, seconds, size
        return Message(client, *numbers, path, layout, index, row["status"], seals, sums, frames)

    def _beyond(self, client: str, utterances: int, steps: int, loss: float, seconds: float) -> str:
        """Return what is wrong with a row's numbers, if they are beyond the limits; "" if not."""
        if utterances > (most := self.limits.utterances(client)):
            return f"{utterances} utterances cannot be, it has {most} at most"
        if steps > (most := self.limits.steps(client, utterances)):
            return f"{steps} steps of {utterances} utterances cannot be, {most} are most"
        if abs(loss) > MAX_LOSS:
            return f"a loss of {loss:g} cannot be"
        if not 0 <= seconds <= self.limits.seconds + _MORE_SECONDS:
            return f"{seconds:g} seconds cannot be, the round has taken {self.limits.seconds:.0f}"
        return ""


def _real(row: Mapping[str, str], column: str, table: Path, line: int) -> float:
    """Return the finite number in a field; raise a `UserError` if it holds anything else."""
    # float() alone would let whitespace and underscores pass.
    text = row[column][:40]
    known = re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", text, re.A)
    value = float(text) if known else math.nan
    if not math.isfinite(value):
        raise UserError(f"the {column} is {text!r}, not a finite number", path=table, line=line)
    return value


def status_of(reason: str, empty_labels: float) -> str:
    """Return the status of a training: the reason why its result is unusable, COLLAPSED, or OK."""
    good = COLLAPSED if empty_labels >= COLLAPSED_FROM else OK
    return " ".join(reason.split())[:200].strip() or good


def _reason_of(error: UserError, folder: Path) -> str:
    """Return an error's message without the folder, so that it is the same in any experiment."""
    text = str(error).replace(f"{folder}/", "")
    return text if len(text) <= 300 else f"{text[:296]} ..."


# Significant digits of the loss, of which three are shown, and of the time. More would tell the
# server about the data of a client, or its machine, what it has no use for.
_LOSS, _SECONDS = 4, 2
# Of the file's tensors, for those who open it with other programs.
_CONTENT = (
    "Row k of each tensor is from the client in row k of the update.*.tsv beside this file: its "
    "model after training, or its counts, and not the difference from what it received."
)


def rounded(value: float, digits: int) -> str:
    """Return a number with some significant digits, without an exponent unless it is extreme."""
    return f"{float(f'{value:.{digits}g}'):.12g}"


class MessageWriter:
    """Writer of one job's files, which are never held in memory.

    Files of an earlier attempt at the same job are removed first. As a context manager, the writer
    closes the files at the end of the block, or leaves none after an error.

    Args:
        round_dir: the round's directory.
        job: the job's number.
        clients: the job's clients, in the order of their rows.
        payload: what each client sends.
        origin: what the messages are an answer to.
    """

    def __init__(
        self, round_dir: Path, job: int, clients: Sequence[str], payload: Payload, origin: Origin
    ):
        self._tensors, self._table = paths_of(round_dir, job)
        self._row = {check_id(client, "client"): row for row, client in enumerate(clients)}
        if len(self._row) < len(clients):
            raise ValueError(f"a client is duplicated in {clients}")
        self._payload, self._origin = payload, origin
        self._written: dict[str, dict[str, object]] = {}
        # The table first: it marks the job as complete, and without it other files do not count.
        remove(self._table)
        remove(self._tensors)
        if payload.features:
            for client in clients:
                for path in feature_paths(round_dir, client):
                    remove(path)
        self._stack = ExitStack()
        if payload.tensors:
            header, self._layout = make_header(stacked(payload.tensors, len(clients)), _CONTENT)
            with ExitStack() as stack:
                path = stack.enter_context(atomic_path(self._tensors))
                self._file = stack.enter_context(open(path, "r+b"))
                self._file.write(header)
                self._file.truncate(self._layout.size)
                self._file.flush()
                self._stack = stack.pop_all()

    def send(
        self,
        reports: Sequence[Report],
        tensors: Mapping[str, np.ndarray | torch.Tensor] | None = None,
        features: Iterable[tuple[str, np.ndarray]] | None = None,
    ) -> None:
        """Write the messages of some clients of the job; the order of calls does not matter.

        Args:
            reports: the report of each client.
            tensors: name -> (len(reports), ...), exactly the tensors of the payload, with a row for
                each client, even if it sends nothing.
            features: utterance and matrix (T, D) of a single client; the time of computing them
                while they are written counts as the client's.

        Raises:
            ValueError: if clients or tensors are not those that were announced.
        """
        spec, bounds, tensors = self._payload.tensors, self._payload.features, tensors or {}
        if tensors.keys() != spec.keys():
            raise ValueError(f"tensors {sorted(tensors.keys() ^ spec.keys())}")
        wanted = bounds is not None and any(not report.reason for report in reports)
        alone = bounds is not None and len(reports) == 1
        if (wanted and features is None) or (features is not None and not alone):
            raise ValueError("features are not announced, or not of a single client")
        size = row_bytes(spec)
        for report in reports:
            if report.client not in self._row or report.client in self._written:
                raise ValueError(f"client {report.client!r} is not of this job, or is duplicated")
            seconds = report.seconds
            if bounds and features is not None and not report.reason:
                begun = time.monotonic()
                size += write_features(self._table.parent, report.client, features, bounds.bits)
                seconds += time.monotonic() - begun
            line = self._line(report._replace(seconds=seconds), 0 if report.reason else size)
            self._written[report.client] = line
        for name, (shape, kind) in spec.items():
            rows = as_array(name, tensors[name])
            if (rows.shape, rows.dtype.name) != ((len(reports), *shape), kind):
                raise ValueError(f"{name} is {rows.dtype} of {rows.shape}")
            for begin, end in self._runs(reports):
                row = self._row[reports[begin].client]
                offset = self._layout.offsets[name] + row * self._layout.strides[name]
                write_at(self._file.fileno(), rows[begin:end], offset)

    def _runs(self, reports: Sequence[Report]) -> list[tuple[int, int]]:
        """Return runs of reports whose rows are neighbours in the file, as (first, last + 1)."""
        runs: list[tuple[int, int]] = []
        for index, report in enumerate(reports):
            if report.reason:
                continue
            if runs and runs[-1][1] == index:
                first = runs[-1][0]
                if self._row[report.client] == self._row[reports[first].client] + index - first:
                    runs[-1] = first, index + 1
                    continue
            runs.append((index, index + 1))
        return runs

    def _line(self, report: Report, size: int) -> dict[str, object]:
        return {
            **report._asdict(),
            "loss": rounded(report.loss, _LOSS) if not report.reason else "0.0",
            "seconds": rounded(report.seconds, _SECONDS),
            "bytes": size,
            **self._origin.columns(),
            "status": status_of(report.reason, report.empty_labels),
        }

    def __enter__(self) -> MessageWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the files in place, the table last; raise a ValueError if a client is missing."""
        if kind is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if missing := self._row.keys() - self._written.keys():
                raise ValueError(f"no message of {sorted(missing)}")
        write_tsv(self._table, COLUMNS, [self._written[client] for client in self._row])


def job_complete(
    round_dir: Path, job: int, clients: Sequence[str], payload: Payload, origin: Origin
) -> bool:
    """Return whether a job's files are complete, for exactly these clients and this origin.

    A rerun skips complete jobs, but none that another user has written. Arguments as in
    `MessageWriter`.
    """
    tensors, table = paths_of(round_dir, job)
    try:
        if table.stat().st_uid != os.geteuid():
            return False
        rows = read_tsv(table, COLUMNS)
        if payload.tensors:
            spec = stacked(payload.tensors, len(rows))
            check_spec(read_layout(tensors).spec, spec, tensors)
    except (FileNotFoundError, UserError):
        return False
    own = not any(origin.problem(row) for row in rows)
    return own and [row["client"] for row in rows] == list(clients)


# Files open at a time in each thread; all threads together stay below the limit of a process.
_MOST = 128


class Opened:
    """Message files that are kept open, since opening one for every piece of a tensor is slow."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, BinaryIO] = OrderedDict()

    def read(self, message: Message, name: str, skip: int, block: np.ndarray) -> bool:
        """Fill a block with a part of a client's tensor and of the next clients' in the file.

        Args:
            message: the first client's message.
            name: the name of the tensor.
            skip: the number of bytes of the tensor before the part.
            block: the array to fill.

        Returns:
            False if the file is missing, has changed since it was checked, or is too short.
        """
        try:
            file = self._files.get(message.path) or self._open(message)
            return read_at(file.fileno(), block, message.offset(name) + skip)
        except (OSError, UserError):
            return False

    def _open(self, message: Message) -> BinaryIO:
        file = message.open()
        if len(self._files) == _MOST:
            self._files.popitem(last=False)[1].close()
        self._files[message.path] = file
        return file

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            self._files.popitem()[1].close()
