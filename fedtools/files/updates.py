"""What the clients of one job send in a round, and how the server comes to believe it.

    update.<job>.safetensors   each shared tensor, stacked on dimension 0 over the job's clients
    update.<job>.tsv           one row for each of these clients, in the same order; written last,
                               so that it marks the job as complete
    update.<job>.left_out      "client reason" for those whose training failed; usually not there

The writer holds one client at a time; the reader looks at headers and tables only. Nothing that
comes from a client is trusted: no pickle, no length, no name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from fedtools.files.atomic import atomic_path
from fedtools.files.datadir import check_id, read_table, write_table
from fedtools.files.errors import UserError
from fedtools.files.states import (
    Layout,
    Spec,
    as_array,
    check_spec,
    make_header,
    read_at,
    read_layout,
    row_bytes,
    write_at,
)
from fedtools.files.tables import count, read_tsv, write_tsv

if TYPE_CHECKING:
    import torch

COLUMNS = ("client", "utterances", "steps", "loss", "bytes", "sha256")

_MAX_UTTERANCES = 10**9
_MAX_STEPS = 10**12
# What TensorBoard writes, and a sum of any number of clients, has room for. More is no loss.
MAX_LOSS = 1e30
_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Update:
    """One client's update: row number `row` of every tensor in a job's file.

    `loss` is the client's mean training loss, `bytes` its share of the file's tensors.
    """

    client: str
    utterances: int
    steps: int
    loss: float
    bytes: int
    path: Path
    layout: Layout
    row: int

    def offset(self, name: str) -> int:
        """The byte of the file at which this client's row of a tensor begins."""
        return self.layout.offsets[name] + self.row * self.layout.strides[name]


@dataclass(frozen=True)
class Refusal:
    """A client whose update does not count, and why."""

    client: str
    reason: str


class UpdateWriter:
    """Write the files of one job, one client at a time, without holding them in memory.

    What is left of an earlier try that trained one of the same clients is removed first, also
    under another job's name: a rerun may split the clients into another number of jobs. As a
    context manager it closes at the end of the block, or leaves nothing after an error.

    Args:
        round_dir: the round's directory.
        job: the job's number or name.
        clients: the job's clients, in the order of their rows.
        spec: the shared tensors, as one client has them.
        base_sha256: hash of the global.safetensors that the clients started from.
    """

    def __init__(
        self,
        round_dir: str | Path,
        job: int | str,
        clients: Sequence[str],
        spec: Spec,
        base_sha256: str,
    ):
        self._tensors, self._table, self._left_out_table = _paths(Path(round_dir), job)
        self._row = {check_id(client, "client"): row for row, client in enumerate(clients)}
        if len(self._row) < len(clients):
            raise ValueError(f"a client comes twice in {clients}")
        self._spec = spec
        self._base = base_sha256
        self._sent: dict[str, dict[str, object]] = {}
        self._left_out: dict[str, str] = {}
        self._remove_earlier(Path(round_dir))
        header, self._layout = make_header(_stacked(spec, len(clients)))
        with ExitStack() as stack:
            path = stack.enter_context(atomic_path(self._tensors))
            self._file: BinaryIO = stack.enter_context(open(path, "r+b"))
            self._file.write(header)
            self._file.flush()
            self._stack = stack.pop_all()

    def add(
        self,
        client: str,
        tensors: Mapping[str, np.ndarray | torch.Tensor],
        utterances: int,
        steps: int,
        loss: float,
    ) -> None:
        """Write one client's update; clients may come in any order, the files are the same.

        Args:
            client: one of the job's clients that was neither added nor left out yet.
            tensors: exactly the tensors of the spec.
            utterances: how many utterances it trained on, the weight of its data.
            steps: how many optimiser steps it made.
            loss: its mean training loss.

        Raises:
            ValueError: if the client or its tensors are not what was announced.
        """
        row = self._claim(client)
        if tensors.keys() != self._spec.keys():
            differing = sorted(tensors.keys() ^ self._spec.keys())
            raise ValueError(f"client {client}: tensors {differing} are not as announced")
        for name, (shape, kind) in self._spec.items():
            array = as_array(name, tensors[name])
            if (array.shape, array.dtype.name) != (shape, kind):
                raise ValueError(f"client {client}: {name} is {array.dtype} of {array.shape}")
            offset = self._layout.offsets[name] + row * self._layout.strides[name]
            write_at(self._file.fileno(), array, offset)
        self._sent[client] = {
            "client": client,
            "utterances": int(utterances),
            "steps": int(steps),
            "loss": repr(float(loss)),
            "bytes": row_bytes(self._spec),
            "sha256": self._base,
        }

    def leave_out(self, client: str, reason: str) -> None:
        """Send nothing for this client, whose training failed; the server is told the reason."""
        self._claim(client)
        self._left_out[client] = " ".join(reason.split())[:200].strip() or "training failed"

    def close(self) -> None:
        """Put the files in place, the table last.

        Raises:
            ValueError: if a client was neither added nor left out.
        """
        with self._stack:
            missing = [c for c in self._row if c not in self._sent and c not in self._left_out]
            if missing:
                raise ValueError(f"neither added nor left out: {missing}")
            if self._left_out:
                self._close_gaps()
                write_table(self._left_out_table, self._left_out)
        write_tsv(self._table, COLUMNS, [self._sent[c] for c in self._row if c in self._sent])

    def __enter__(self) -> UpdateWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stack.__exit__(kind, error, trace)

    def _claim(self, client: str) -> int:
        if client not in self._row or client in self._sent or client in self._left_out:
            raise ValueError(f"client {client!r} is not of this job, or comes twice")
        return self._row[client]

    def _remove_earlier(self, round_dir: Path) -> None:
        for table in sorted(round_dir.glob("update.*.tsv")):
            paths = _paths(round_dir, table.name[len("update.") : -len(".tsv")])
            if table == self._table or not self._row.keys().isdisjoint(_clients(table)):
                # The table first: without its mark, the others do not count.
                for path in reversed(paths):
                    path.unlink(missing_ok=True)
        self._left_out_table.unlink(missing_ok=True)
        for cut_short in round_dir.glob(f".{self._tensors.name}.*.tmp"):
            cut_short.unlink(missing_ok=True)

    def _close_gaps(self) -> None:
        """Move rows to where they would be, had the clients left out never been of this job."""
        header, layout = make_header(_stacked(self._spec, len(self._sent)))
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        # In the order of the file every row moves towards the start: none is overwritten unread.
        for name in sorted(layout.offsets, key=layout.offsets.__getitem__):
            size = self._layout.strides[name]
            kept = [row for client, row in self._row.items() if client in self._sent]
            for new, old in enumerate(kept):
                source = self._layout.offsets[name] + old * size
                self._move(source, layout.offsets[name] + new * size, size)
        self._file.truncate(layout.size)

    def _move(self, source: int, target: int, size: int) -> None:
        descriptor = self._file.fileno()
        for begin in range(0, size, _COPY_BYTES):
            block = np.empty(min(_COPY_BYTES, size - begin), np.uint8)
            if not read_at(descriptor, block, source + begin):
                raise OSError(f"{self._tensors} was cut short by somebody else")
            write_at(descriptor, block, target + begin)


def job_complete(
    round_dir: str | Path, job: int | str, clients: Sequence[str], spec: Spec, base_sha256: str
) -> bool:
    """Whether this job's files are all there, for just these clients and this base.

    A rerun skips the jobs for which this is true. Arguments as of `UpdateWriter`.
    """
    tensors, table, left_out_table = _paths(Path(round_dir), job)
    try:
        rows = read_tsv(table, COLUMNS)
        left_out = read_table(left_out_table) if left_out_table.exists() else {}
        sent = [row["client"] for row in rows]
        check_spec(read_layout(tensors).spec, _stacked(spec, len(rows)), tensors)
    except UserError:
        return False
    right_base = all(row["sha256"] == base_sha256 for row in rows)
    return right_base and sent == [client for client in clients if client not in left_out]


def read_updates(
    round_dir: str | Path, sampled: Sequence[str], spec: Spec, base_sha256: str
) -> tuple[list[Update], list[Refusal]]:
    """Find every update of a round and check it, without reading any tensor.

    A job whose tensor file is damaged, or does not fit `spec` or its table, loses all of its
    clients, and so does one whose table cannot be read; a row with nonsense or another base loses
    its client. A client that comes twice is refused altogether: nobody can say which of the two
    is its own. NaN and Inf are left to `fedtools.server.aggregate.mean`.

    Args:
        round_dir: the round's directory.
        sampled: the clients of the round.
        spec: the shared tensors, as one client has them.
        base_sha256: hash of the round's global.safetensors.

    Returns:
        The updates to be summed, in the order of `sampled`, and one refusal for each other client
        of `sampled`, in that order, followed by those who were not sampled.
    """
    round_dir = Path(round_dir)
    came: dict[str, list[Update | Refusal]] = {}
    failed: dict[str, str] = {}
    unreadable: list[str] = []
    for table in sorted(round_dir.glob("update.*.tsv")):
        try:
            for item in _read_job(table, len(sampled), spec, base_sha256):
                came.setdefault(item.client, []).append(item)
            failed |= _read_left_out(table.with_suffix(".left_out"), len(sampled))
        except UserError as error:
            unreadable.append(reason_of(error, table.parent))
    updates, refusals = [], []
    for client in sampled:
        items = came.pop(client, [])
        if len(items) > 1:
            refusals.append(Refusal(client, f"came {len(items)} times"))
        elif not items:
            refusals.append(Refusal(client, failed.get(client) or sent_nothing(unreadable)))
        elif isinstance(items[0], Update):
            updates.append(items[0])
        else:
            refusals.append(items[0])
    refusals += [Refusal(client, "was not sampled") for client in sorted(came)]
    return updates, refusals


def _paths(round_dir: Path, job: int | str) -> tuple[Path, Path, Path]:
    check_id(str(job), "job")
    names = (f"update.{job}.{suffix}" for suffix in ("safetensors", "left_out", "tsv"))
    tensors, left_out, table = (round_dir / name for name in names)
    return tensors, table, left_out


def _stacked(spec: Spec, clients: int) -> Spec:
    return {name: ((clients, *shape), kind) for name, (shape, kind) in spec.items()}


def _clients(table: Path) -> list[str]:
    try:
        return [row["client"] for row in read_tsv(table, COLUMNS)]
    except UserError:
        return []


def _read_job(table: Path, sampled: int, spec: Spec, base_sha256: str) -> list[Update | Refusal]:
    """What each row of a job's table amounts to; a `UserError` if the table cannot be read."""
    check_size(table, sampled)
    rows = read_tsv(table, COLUMNS)
    for line, row in enumerate(rows, 2):
        check_id(row["client"], "client", table, line)
    tensors = table.with_suffix(".safetensors")
    layout = problem = None
    try:
        layout = read_layout(tensors)
        check_spec(layout.spec, _stacked(spec, len(rows)), tensors)
    except UserError as error:
        problem = reason_of(error, tensors.parent)
    items: list[Update | Refusal] = []
    for index, row in enumerate(rows):
        if problem is not None:
            items.append(Refusal(row["client"], problem))
            continue
        try:
            items.append(_update(row, index, table, layout, spec, base_sha256))
        except UserError as error:
            items.append(Refusal(row["client"], reason_of(error, table.parent)))
    return items


def _update(
    row: Mapping[str, str], index: int, table: Path, layout: Layout, spec: Spec, base_sha256: str
) -> Update:
    line = index + 2
    utterances, steps, loss = read_counts(row, table, line)
    size = count(row, "bytes", table, line)
    if size != row_bytes(spec):
        problem = f"{size} bytes announced, {row_bytes(spec)} sent"
        raise UserError(problem, path=table, line=line)
    if row["sha256"] != base_sha256:
        raise UserError("started from another global model", path=table, line=line)
    tensors = table.with_suffix(".safetensors")
    return Update(row["client"], utterances, steps, loss, size, tensors, layout, index)


def _read_left_out(path: Path, sampled: int) -> dict[str, str]:
    if not path.exists():
        return {}
    check_size(path, sampled)
    return {client: left_out_by_job(reason) for client, reason in read_table(path).items()}


def read_counts(row: Mapping[str, str], table: Path, line: int) -> tuple[int, int, float]:
    """Utterances, steps and mean loss of a row; a `UserError` names the line if they cannot be."""
    utterances, steps = (count(row, column, table, line) for column in ("utterances", "steps"))
    if not 1 <= utterances <= _MAX_UTTERANCES or steps > _MAX_STEPS:
        problem = f"{utterances} utterances and {steps} steps cannot be"
        raise UserError(problem, path=table, line=line)
    loss = read_float(row, "loss", table, line)
    if abs(loss) > MAX_LOSS:
        raise UserError(f"a loss of {loss:g} cannot be", path=table, line=line)
    return utterances, steps, loss


def read_float(row: Mapping[str, str], column: str, table: Path, line: int) -> float:
    """The finite number in a field; a `UserError` names file and line if it is anything else."""
    # float() alone would let blanks and underscores pass.
    text = row[column][:40]
    known = re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", text, re.A)
    value = float(text) if known else math.nan
    if not math.isfinite(value):
        raise UserError(f"the {column} is {text!r}, no finite number", path=table, line=line)
    return value


def check_size(path: Path, clients: int) -> None:
    """Fail if a table is no plain file, or far longer than ids of 200 characters can make it."""
    if not path.is_file():
        raise UserError("not a plain file", path=path)
    if path.stat().st_size > 1024 * (clients + 64):
        raise UserError("too long for a table of the round's clients", path=path)


def left_out_by_job(reason: str) -> str:
    """The reason for a refusal, from what the job wrote of it, made safe to be shown."""
    return f"left out by its job: {''.join(c if c.isprintable() else '?' for c in reason[:300])}"


def sent_nothing(unreadable: Sequence[str]) -> str:
    """The reason for a refusal of a client without any row, with what is wrong with the tables."""
    return "; ".join(["sent no update that could be read", *unreadable[:3]])


def reason_of(error: UserError, folder: Path) -> str:
    """The message, without the folder, so that it is the same wherever the experiment lies."""
    text = str(error).replace(f"{folder}/", "")
    return text if len(text) <= 300 else f"{text[:296]} ..."
