"""What clients send in a round, and how the server validates it.

    update.<job>.tsv           a row for each client of the job; written last, so that it marks the
                               job as complete
    update.<job>.safetensors   the tensors that the clients send, stacked on dimension 0 in the
                               order of the rows; a client that sends nothing has zeros there
    features.<client>.ark .scp features that a client sends, where a method asks for them

`fedtools.files.message_writer` writes them; of tensors the reader looks at headers only. Nothing
that comes from a client is trusted: no pickle, no size, no name, no path, no value.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fedtools.files.ark import FeatureReader
from fedtools.files.atomic import remove
from fedtools.files.datadir import check_id
from fedtools.files.errors import UserError
from fedtools.files.sent_features import (
    Features,
    check_features,
    open_features,
    received_bytes,
)
from fedtools.files.states import (
    Layout,
    Spec,
    check_spec,
    read_layout,
    row_bytes,
)
from fedtools.files.tables import check_table_size, count, read_tsv

COLUMNS = ("client", "utterances", "steps", "loss", "seconds", "bytes", "base", "status")

# The status of a message that counts, and of one whose pseudo-labels were nearly all empty: it
# counts too, but its model is learning to say nothing.
OK, COLLAPSED = "ok", "collapsed"
COUNTED = OK, COLLAPSED
COLLAPSED_FROM = 0.95  # of the labels of a round

_MAX_UTTERANCES, _MAX_STEPS, _MAX_SECONDS = 10**9, 10**12, 1e9
# What TensorBoard writes, and a sum of any number of clients, has room for. More is no loss.
MAX_LOSS = 1e30


@dataclass(frozen=True)
class Payload:
    """What each client sends beside its row; by default nothing.

    Attributes:
        tensors: as one client has them, of a model or of none (counts).
        features: bounds on features, or None.
    """

    tensors: Spec = field(default_factory=dict)
    features: Features | None = None


class Report(NamedTuple):
    """What a client says of its work in a round: the numbers of its row.

    `loss` is its mean training loss, `utterances` the size of its data, which may be zero.
    A `reason` means that it sends nothing, and why. `empty_labels` is the share of its utterances
    whose pseudo-labels were empty.
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
    """One client's message that passed all checks; its tensors are row `row` of a job's file."""

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

    def offset(self, name: str) -> int:
        """The byte of the file at which this client's row of a tensor begins."""
        return self.layout.offsets[name] + self.row * self.layout.strides[name]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of its tensors alone."""
        return sum(self.layout.strides.values()) if self.layout else 0

    @property
    def features(self) -> FeatureReader:
        """The features that the client sent."""
        return open_features(self.path.parent, self.client)


@dataclass(frozen=True)
class Refusal:
    """A client whose message does not count, and why.

    `bytes` came of it all the same, as far as that can be told; 0 of one that sent nothing.
    """

    client: str
    reason: str
    bytes: int = 0


def read_messages(
    round_dir: Path, jobs: int, sampled: Sequence[str], payload: Payload, base: str
) -> tuple[list[Message], list[Refusal]]:
    """Validate every message of a round, without reading any tensor; features are read.

    A job whose tensor file is damaged, or does not fit its table, loses all of its clients, and so
    does one whose table cannot be read; a row with nonsense or another base loses its client. A
    client that comes twice is refused altogether: nobody can say which of the two is its own. NaN
    and Inf are left to `fedtools.server.aggregate`. Files that no job was to write are ignored,
    with a warning.

    Args:
        round_dir: the round's directory.
        jobs: how many jobs the clients were cut into.
        sampled: the clients of the round.
        payload, base: as of `MessageWriter`.

    Returns:
        The messages that count, in the order of `sampled`, and one refusal for each other client
        of `sampled`, in that order, followed by those who were not sampled.
    """

    def refuse(client: str, reason: str, items: Sequence[Message | Refusal]) -> None:
        size = sum(item.tensor_bytes if isinstance(item, Message) else item.bytes for item in items)
        if payload.features:
            size += received_bytes(round_dir, client, payload.features)
        refusals.append(Refusal(client, reason, size))

    expected = {path for job in range(1, jobs + 1) for path in paths_of(round_dir, job)}
    for path in sorted(set(round_dir.glob("update.*")) - expected):
        print(f"{path}: no job was to write this file; ignored", file=sys.stderr)
    came: dict[str, list[Message | Refusal]] = {}
    unreadable: list[str] = []
    for job in range(1, jobs + 1):
        try:
            for item in _read_job(round_dir, job, len(sampled), payload, base):
                came.setdefault(item.client, []).append(item)
        except UserError as error:
            unreadable.append(_reason_of(error, round_dir))
    nothing = Refusal("", "; ".join(["sent nothing that could be read", *unreadable[:3]]))
    messages, refusals = [], []
    for client in sampled:
        items = came.pop(client, [nothing])
        if len(items) > 1:
            refuse(client, f"came {len(items)} times", items)
        elif isinstance(items[0], Message):
            messages.append(items[0])
        else:
            refuse(client, items[0].reason, items)
    for client in sorted(came):
        refuse(client, "was not sampled", came[client])
    return messages, refusals


def find_messages(round_dir: Path) -> Iterator[Path]:
    """The files of everything that clients sent in a round, the tables of jobs first."""
    for pattern in ("update.*.tsv", "update.*", "features.*"):
        yield from round_dir.glob(pattern)


def remove_messages(round_dir: Path) -> None:
    """Remove everything that clients sent in a round, the tables of jobs first."""
    for path in find_messages(round_dir):
        remove(path)


def paths_of(round_dir: Path, job: int) -> tuple[Path, Path]:
    """The tensors and the table of a job."""
    return round_dir / f"update.{job}.safetensors", round_dir / f"update.{job}.tsv"


def stacked(spec: Spec, clients: int) -> Spec:
    """The tensors of so many clients, one after the other."""
    return {name: ((clients, *shape), kind) for name, (shape, kind) in spec.items()}


def _read_job(
    round_dir: Path, job: int, sampled: int, payload: Payload, base: str
) -> list[Message | Refusal]:
    """What each row of a job's table amounts to; a `UserError` if the table cannot be read.

    The bytes of refusals are of tensors alone: of who has a row in a file that can be read.
    """
    tensors, table = paths_of(round_dir, job)
    check_table_size(table, sampled)
    rows = read_tsv(table, COLUMNS)
    for line, row in enumerate(rows, 2):
        check_id(row["client"], "client", table, line)
    layout, problem = None, ""
    if payload.tensors:
        try:
            layout = read_layout(tensors)
            check_spec(layout.spec, stacked(payload.tensors, len(rows)), tensors)
        except UserError as error:
            problem = _reason_of(error, round_dir)
    items: list[Message | Refusal] = []
    for index, row in enumerate(rows):
        reason, came = problem, row_bytes(payload.tensors) if not problem else 0
        if row["status"] not in COUNTED:
            said = "".join(c if c.isprintable() else "?" for c in row["status"][:300])
            reason, came = f"left out by its job: {said}", 0
        try:
            items.append(
                Refusal(row["client"], reason, came)
                if reason
                else _message(row, index, table, layout, payload, base)
            )
        except UserError as error:
            items.append(Refusal(row["client"], _reason_of(error, round_dir), came))
    return items


def _message(
    row: Mapping[str, str],
    index: int,
    table: Path,
    layout: Layout | None,
    payload: Payload,
    base: str,
) -> Message:
    line, client = index + 2, row["client"]
    utterances, steps, announced = (
        count(row, column, table, line) for column in ("utterances", "steps", "bytes")
    )
    loss, seconds = (_real(row, column, table, line) for column in ("loss", "seconds"))
    if utterances > _MAX_UTTERANCES or steps > _MAX_STEPS:
        problem = f"{utterances} utterances and {steps} steps cannot be"
        raise UserError(problem, path=table, line=line)
    if abs(loss) > MAX_LOSS or not 0 <= seconds <= _MAX_SECONDS:
        problem = f"a loss of {loss:g} in {seconds:g} seconds cannot be"
        raise UserError(problem, path=table, line=line)
    if row["base"] != base:
        raise UserError("started from another global state", path=table, line=line)
    size = row_bytes(payload.tensors)
    if payload.features:
        size += check_features(table.parent, client, payload.features, utterances)
    if announced != size:
        raise UserError(f"{announced} bytes announced, {size} sent", path=table, line=line)
    path = table.with_suffix(".safetensors")
    return Message(
        client, utterances, steps, loss, seconds, size, path, layout, index, row["status"]
    )


def _real(row: Mapping[str, str], column: str, table: Path, line: int) -> float:
    """The finite number in a field; a `UserError` names file and line if it is anything else."""
    # float() alone would let whitespace and underscores pass.
    text = row[column][:40]
    known = re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", text, re.A)
    value = float(text) if known else math.nan
    if not math.isfinite(value):
        raise UserError(f"the {column} is {text!r}, not a finite number", path=table, line=line)
    return value


def status_of(reason: str, empty_labels: float) -> str:
    """The status of a training: why its result cannot be used, COLLAPSED or OK."""
    good = COLLAPSED if empty_labels >= COLLAPSED_FROM else OK
    return " ".join(reason.split())[:200].strip() or good


def _reason_of(error: UserError, folder: Path) -> str:
    """The message, without the folder, so that it is the same wherever the experiment lies."""
    text = str(error).replace(f"{folder}/", "")
    return text if len(text) <= 300 else f"{text[:296]} ..."
