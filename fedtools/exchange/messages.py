"""The messages that clients send in a round, and their validation by the server.

    update.<job>.tsv           a row for each client of the job; written last, so that it marks the
                               job as complete
    update.<job>.safetensors   the clients' tensors, stacked on dimension 0 in the order of the
                               rows; a client that sends nothing has zeros there
    features.<client>.ark .scp a client's features, if the method asks for them

`fedtools.exchange.message_writer` writes these files. The reader here looks only at the headers of
tensors; `fedtools.server.aggregate` checks the values while it reads them. Nothing that comes from
a client is trusted: no pickle, no size, no name, no path, no value, no file of another client.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from fedtools.core.atomic import remove
from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv
from fedtools.core.untrusted import Seal, open_received, received_lines, seal_of, sum_of
from fedtools.data.datadir import check_id
from fedtools.exchange.sent_features import Features, check_features, received_bytes
from fedtools.exchange.states import Layout, Spec, check_spec, layout_of, row_bytes
from fedtools.exchange.values import Values

COLUMNS = ("client", "utterances", "steps", "loss", "seconds", "bytes", "base", "status")

# Statuses of messages that count. With COLLAPSED, nearly all pseudo-labels were empty, so that the
# model is learning to output nothing. With CAPPED, the server has lowered the weight, by
# `Method.max_weight_ratio`. With LARGE, a few clients have most of what the server uses.
OK, COLLAPSED, CAPPED, LARGE = "ok", "collapsed", "weight lowered", "large share"
COUNTED = OK, COLLAPSED, CAPPED, LARGE
COLLAPSED_FROM = 0.95  # share of empty labels in a round

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
    """

    tensors: Spec = field(default_factory=dict)
    features: Features | None = None
    values: Mapping[str, Values] = field(default_factory=dict)


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
    base: str,
    limits: Limits | None = None,
) -> tuple[list[Message], list[Refusal]]:
    """Validate every message of a round, without reading tensors; features are read.

    If a job's table cannot be read, or names a client of another job, or if the tensor file is
    damaged or does not fit the table, all clients of this job are refused, and only these. A client
    is refused if its row is invalid, has another base, or is duplicated. The values of tensors are
    left to `fedtools.server.aggregate`. Files of no job are ignored, with a warning.

    Args:
        round_dir: the round's directory.
        jobs: the clients of each job.
        sampled: the clients of the round, in the order in which they are returned.
        payload, base: as in `MessageWriter`.
        limits: upper limits on a client's numbers.

    Returns:
        The messages that count, and a refusal for each other client.
    """
    expected = {path for job in range(1, len(jobs) + 1) for path in paths_of(round_dir, job)}
    for path in sorted(set(round_dir.glob("update.*")) - expected):
        name = path.name if path.name.isprintable() else ascii(path.name)
        print(f"{round_dir}/{name}: no job was to write this file; ignored", file=sys.stderr)
    came: dict[str, Message | Refusal] = {}
    for job, clients in enumerate(jobs, 1):
        try:
            rows = _Job(round_dir, job, clients, payload, base, limits or Limits()).rows()
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
    for pattern in ("update.*.tsv", "update.*", "features.*"):
        yield from round_dir.glob(pattern)


def remove_messages(round_dir: Path) -> None:
    """Remove the files that clients sent in a round, the tables of jobs first."""
    for path in find_messages(round_dir):
        remove(path)


def paths_of(round_dir: Path, job: int) -> tuple[Path, Path]:
    """Return the paths of the tensors and the table of a job."""
    return round_dir / f"update.{job}.safetensors", round_dir / f"update.{job}.tsv"


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
    base: str
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
        if row["base"] != self.base:
            raise UserError("started from another global state", path=table, line=line)
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
