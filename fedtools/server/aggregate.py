"""The server's sum: a weighted mean of updates, streamed from their files into the next model.

FedAvg (McMahan et al., 2017) averages the clients' models by the number of their samples;
DecoupleFL's equation 2 is the plain mean, all weights equal.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.files.atomic import atomic_path
from fedtools.files.errors import UserError
from fedtools.files.states import Layout, Spec, make_header, read_at, write_at
from fedtools.files.updates import Refusal, Update

# Elements summed at a time: few enough for the processor's cache to hold the sum, enough for
# threads to seldom wait for each other's turn in the interpreter.
_CHUNK = 1 << 17

# Rows from this length on are added one by one, shorter ones many by one call.
_LONG = 1 << 14

# Larger finite values than this could add up to Inf, and mean nothing.
_LARGEST = 1e300


def mean(
    updates: Sequence[Update],
    weights: Sequence[float],
    out_path: str | Path,
    spec: Spec,
    *,
    min_clients: int = 1,
    refused: Sequence[Refusal] = (),
    behind: Mapping[str, Sequence[str]] | None = None,
) -> list[Refusal]:
    """Write sum_k w_k x_k / sum_k w_k over the clients' updates x_k as a state.

    Each element is summed in float64, client after client in the order of `updates`, so that the
    result is the same bit for bit however the clients were split into jobs. Files are read once,
    in pieces, straight into the sum; memory does not grow with the number of clients or the size
    of the model. If the sum is not finite, all updates are looked through, those that hold a NaN
    or Inf are refused, and the sum starts again without them.

    Args:
        updates: as `read_updates` returns them.
        weights: one for each update, finite, not negative, not all zero; any scale.
        out_path: the safetensors file to be written, with the tensors of `spec`.
        spec: the shared tensors, as one client has them.
        min_clients: how many clients must be left.
        refused: who was refused before, for the message if too few are left.
        behind: name of an update -> the clients in it; by default it is a client's own.

    Returns:
        The clients refused here; the file is the mean over the others.

    Raises:
        UserError: if too few updates are left, a shared tensor is not a float, the weights of
            those left are all zero, or a file changes meanwhile; `out_path` is not touched then.
    """
    check_shared(spec)
    if len(weights) != len(updates) or not all(0 <= w < math.inf for w in weights):
        raise ValueError(f"no weights for {len(updates)} updates: {weights}")
    behind = behind or {update.client: [update.client] for update in updates}
    where = updates[0].path.parent if updates else None
    check_min_clients(sum(len(behind[u.client]) for u in updates), min_clients, refused, where)
    if _sum(updates, weights, out_path, spec):
        return []
    bad = _unusable(updates, spec)
    if not bad:
        raise UserError("an update changed while it was read", remedy="run the command again")
    kept = [(u, w) for u, w in zip(updates, weights, strict=True) if u.client not in bad]
    refusals = [Refusal(client, why) for name, why in bad.items() for client in behind[name]]
    left = sum(len(behind[u.client]) for u, _ in kept)
    check_min_clients(left, min_clients, [*refused, *refusals], where)
    if not _sum([u for u, _ in kept], [w for _, w in kept], out_path, spec):
        raise UserError("an update changed while it was read", remedy="run the command again")
    return refusals


def check_min_clients(
    left: int, min_clients: int, refusals: Sequence[Refusal], path: str | Path | None = None
) -> None:
    """Fail with a `UserError` that lists the refusals, if too few updates are left for a round."""
    needed = max(1, min_clients)
    if left >= needed:
        return
    remedy = "remove their update.* and train again, or begin anew with a lower min_clients"
    if any("diverged" in refusal.reason for refusal in refusals):
        remedy = "begin anew with a lower learning rate or a lower min_clients"
    listed = [f"{refusal.client}: {refusal.reason}" for refusal in refusals[:10]]
    if len(refusals) > len(listed):
        listed.append(f"and {len(refusals) - len(listed)} more")
    raise UserError(
        f"{left} of {left + len(refusals)} updates can be used, min_clients is {needed}"
        + (f" ({'; '.join(listed)})" if listed else ""),
        path=path,
        remedy=remedy,
    )


def check_shared(spec: Spec) -> None:
    """Fail with a `UserError` naming the first shared tensor that has no mean."""
    for name, (_, kind) in sorted(spec.items()):
        if kind not in ("float32", "float64"):
            raise UserError(
                f"tensor {name!r} is {kind}, which has no mean",
                remedy="let the method declare it personal or reset",
            )


def _sum(
    updates: Sequence[Update], weights: Sequence[float], out_path: str | Path, spec: Spec
) -> bool:
    """Write the weighted mean; False, and nothing written, if it is not finite."""
    largest = max(weights)
    if not largest > 0:
        raise UserError("the weights of all clients left are zero")
    # Dividing by the largest makes equal weights exactly one, and any scale of them the same.
    scaled = np.array(weights, np.float64) / largest
    header, layout = make_header(spec)
    try:
        with atomic_path(out_path) as temporary, open(temporary, "r+b") as file:
            file.write(header)
            file.flush()
            _fill(updates, scaled, file.fileno(), layout)
    except _NotFinite:
        return False
    return True


class _NotFinite(Exception):
    """A piece of the sum is not finite, or a file ended before it should."""


def _fill(updates: Sequence[Update], weights: np.ndarray, out: int, layout: Layout) -> None:
    # Pieces are disjoint and the same for any number of threads, and so are the bits.
    threads = min(4, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        work = [
            pool.submit(_fill_pieces, updates, weights, out, layout, first, threads)
            for first in range(threads)
        ]
        for done in work:
            done.result()


def _fill_pieces(
    updates: Sequence[Update],
    weights: np.ndarray,
    out: int,
    layout: Layout,
    first: int,
    step: int,
) -> None:
    """Sum and write the pieces number `first`, `first + step`, ..."""
    total = math.fsum(weights)
    runs = _runs(updates)
    # Reused for every block: fresh memory would cost as much as the sum.
    buffer, scratch = np.empty(_CHUNK), np.empty(2 * _CHUNK)
    for piece in islice(_pieces(layout.spec), first, None, step):
        sums = np.zeros(piece.size)
        with _Files() as files, np.errstate(all="ignore"):
            for start, stop in _blocks(runs, piece):
                block = _as_rows(buffer.view(piece.kind), stop - start, piece.size)
                if not files.read(updates[start], piece, block):
                    raise _NotFinite
                _add(sums, block, weights[start:stop], scratch)
        if not np.isfinite(sums).all():
            raise _NotFinite
        sums /= total
        write_at(out, sums.astype(piece.kind), layout.offsets[piece.name] + piece.skip)


def _add(sums: np.ndarray, block: np.ndarray, weights: np.ndarray, scratch: np.ndarray) -> None:
    """Add the rows of a block to `sums`, each times its weight, strictly one after the other.

    The order of additions must not depend on how many rows a block has. A reduction along the
    first axis keeps it, except for rows of one element, which numpy sums in pairs.
    """
    rows, size = block.shape
    # Weights are mostly equal, and then one: multiplying by it would change no bit.
    weighted = bool((weights != 1).any())
    if size >= _LONG:
        for row, weight in zip(block, weights, strict=True):
            if weighted:
                row = np.multiply(row, weight, out=scratch[:size], dtype=np.float64)
            np.add(sums, row, out=sums)
        return
    stack = _as_rows(scratch, rows + 1, size)
    stack[0] = sums
    stack[1:] = block
    if weighted:
        stack[1:] *= weights[:, None]
    if size > 1:
        np.add.reduce(stack, axis=0, out=sums)
    else:
        sums[0] = functools.reduce(operator.add, stack[:, 0].tolist())


def _as_rows(array: np.ndarray, rows: int, size: int) -> np.ndarray:
    return array[: rows * size].reshape(rows, size)


class _Piece(NamedTuple):
    """Some elements of one tensor: the work of one thread at a time."""

    name: str
    kind: np.dtype
    skip: int
    size: int
    whole: bool


def _pieces(spec: Spec) -> Iterator[_Piece]:
    """All tensors in pieces of at most `_CHUNK` elements; `skip` counts bytes, `size` elements."""
    for name, (shape, kind) in spec.items():
        elements, dtype = math.prod(shape), np.dtype(kind)
        for begin in range(0, elements, _CHUNK):
            size = min(_CHUNK, elements - begin)
            yield _Piece(name, dtype, begin * dtype.itemsize, size, size == elements)


def _runs(updates: Sequence[Update]) -> list[tuple[int, int]]:
    """Stretches of updates that are neighbours in one file, as (first, last + 1)."""
    ends = [
        index
        for index in range(1, len(updates))
        if updates[index].path != updates[index - 1].path
        or updates[index].row != updates[index - 1].row + 1
    ]
    return list(zip([0, *ends], [*ends, len(updates)], strict=True))


def _blocks(runs: list[tuple[int, int]], piece: _Piece) -> Iterator[tuple[int, int]]:
    """Cut the runs into blocks that one read can take: many rows only where a row is small."""
    rows = _CHUNK // piece.size if piece.whole else 1
    for start, stop in runs:
        for begin in range(start, stop, rows):
            yield begin, min(begin + rows, stop)


def _unusable(updates: Sequence[Update], spec: Spec) -> dict[str, str]:
    """The clients whose updates hold what cannot be summed, and why."""
    reasons: dict[str, str] = {}
    with _Files() as files:
        for update in updates:
            for piece in _pieces(spec):
                row = np.empty(piece.size, piece.kind)
                if not files.read(update, piece, row):
                    reasons[update.client] = f"{update.path.name} is cut off or gone"
                elif not np.isfinite(row).all():
                    reasons[update.client] = f"NaN or Inf in tensor {piece.name!r}"
                elif float(np.abs(row).max()) > _LARGEST:
                    reasons[update.client] = f"a value over {_LARGEST:g} in tensor {piece.name!r}"
                if update.client in reasons:
                    break
    return reasons


class _Files:
    """The file read last, kept open: clients that follow each other mostly share theirs."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1

    def read(self, update: Update, piece: _Piece, block: np.ndarray) -> bool:
        """Fill a block with a piece of a client's tensor, and of the next clients' in the file.

        Returns:
            False if the file is gone, or ends before the block does.
        """
        try:
            if update.path != self._path:
                self._close()
                self._descriptor, self._path = os.open(update.path, os.O_RDONLY), update.path
            return read_at(self._descriptor, block, update.offset(piece.name) + piece.skip)
        except OSError:
            return False

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._path is not None:
            os.close(self._descriptor)
            self._path = None
