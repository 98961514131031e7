"""Writing the messages of a job's clients, one stack of clients at a time; see `messages`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from fedtools.core.atomic import atomic_path, remove
from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv, write_tsv
from fedtools.data.datadir import check_id
from fedtools.exchange.messages import COLUMNS, Payload, Report, paths_of, stacked, status_of
from fedtools.exchange.sent_features import feature_paths, write_features
from fedtools.exchange.states import (
    as_array,
    check_spec,
    make_header,
    read_layout,
    row_bytes,
    write_at,
)

if TYPE_CHECKING:
    import torch


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
        base: SHA-256 of the global state that the clients started from.
    """

    def __init__(
        self, round_dir: Path, job: int, clients: Sequence[str], payload: Payload, base: str
    ):
        self._tensors, self._table = paths_of(round_dir, job)
        self._row = {check_id(client, "client"): row for row, client in enumerate(clients)}
        if len(self._row) < len(clients):
            raise ValueError(f"a client is duplicated in {clients}")
        self._payload, self._base = payload, base
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
            "base": self._base,
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
    round_dir: Path, job: int, clients: Sequence[str], payload: Payload, base: str
) -> bool:
    """Return whether a job's files are complete, for exactly these clients and this base.

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
    bases = {row["base"] for row in rows}
    return bases <= {base} and [row["client"] for row in rows] == list(clients)
