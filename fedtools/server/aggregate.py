"""The server's sum: a weighted mean of messages, streamed from their files into the next model.

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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.files.atomic import atomic_path
from fedtools.files.errors import UserError
from fedtools.files.messages import Message, Refusal
from fedtools.files.states import Layout, Spec, make_header, read_at, read_layout, write_at
from fedtools.files.values import STATISTICS, Values
from fedtools.server.opened import Opened
from fedtools.server.shares import most_of

# Elements summed at a time: few enough for the processor's cache to hold the sum, enough for
# threads to seldom wait for each other's turn in the interpreter.
_CHUNK = 1 << 17

# Rows from this length on are added one by one, shorter ones many by one call.
_LONG = 1 << 14

# Larger finite values than this could add up to Inf, and mean nothing.
_LARGEST = 1e300


@dataclass(frozen=True)
class Bound:
    """How far an update may lie from the state that it started from.

    Attributes:
        base: the file of that state.
        ratio: the largest ratio of an update's norm to the median norm of the round's updates
            (of an even number the lower one), and of its statistics' to theirs; 0 for no bound.
    """

    base: Path
    ratio: float


def combine(
    messages: Sequence[Message],
    weights: Sequence[float],
    out_path: str | Path,
    spec: Spec,
    *,
    values: Mapping[str, Values] | None = None,
    bound: Bound | None = None,
    normalise: bool = True,
    min_clients: int = 1,
) -> list[Refusal]:
    """Write sum_k w_k x_k / sum_k w_k over the clients' tensors x_k as a state.

    Each element is summed in float64, client after client in the order of `messages`, so that the
    result is the same bit for bit however the clients were split into jobs. Files are read once,
    in pieces, straight into the sum; memory does not grow with the number of clients or the size
    of the model. Clients whose tensors are not finite, or lie outside of a bound, are refused, and
    the sum starts again without them.

    Args:
        messages: as `read_messages` returns them.
        weights: one for each message, finite, not negative, not all zero; any scale.
        out_path: the safetensors file to be written, with the tensors of `spec`.
        spec: the tensors, as one client has them.
        values: bounds on the elements of tensors by name.
        bound: on the norms of updates.
        normalise: False writes sum_k w_k x_k, which is for counts.
        min_clients: with fewer clients left nothing is written.

    Returns:
        The clients refused here.

    Raises:
        UserError: if a tensor is not a float, the weights of those left are all zero, or a file
            changes meanwhile; `out_path` is not touched then.
    """
    check_shared(spec)
    if len(weights) != len(messages) or not all(0 <= w < math.inf for w in weights):
        raise ValueError(f"no weights for {len(messages)} messages: {weights}")
    kept = list(zip(messages, weights, strict=True))
    refusals: list[Refusal] = []
    # Without who is refused the median is another one, and may refuse more.
    while len(kept) >= max(1, min_clients):
        found = _sum(kept, out_path, spec, values or {}, bound, normalise)
        if not found:
            break
        refusals += [Refusal(client, why) for client, why in found.items()]
        kept = [(message, weight) for message, weight in kept if message.client not in found]
    return refusals


def check_min_clients(
    left: int, min_clients: int, refusals: Sequence[Refusal], path: str | Path | None = None
) -> None:
    """Fail with a `UserError` that lists the refusals, if too few updates are left for a round."""
    needed = max(1, min_clients)
    if left >= needed:
        return
    remedy = "run fedtools reset to train the round again, or begin anew with a lower min_clients"
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
    weighted: Sequence[tuple[Message, float]],
    out_path: str | Path,
    spec: Spec,
    values: Mapping[str, Values],
    bound: Bound | None,
    normalise: bool,
) -> dict[str, str]:
    """Write the weighted sum; or the clients to be refused and why, and nothing is written."""
    messages, weights = [one for one, _ in weighted], [weight for _, weight in weighted]
    largest = max(weights)
    if not largest > 0:
        raise UserError("the weights of all clients left are zero")
    # Dividing by the largest makes equal weights exactly one, and any scale of them the same.
    scaled = np.array(weights, np.float64) / largest
    total = math.fsum(scaled) if normalise else 1 / largest
    header, layout = make_header(spec)
    if bound is not None and not (bound.ratio > 0 and len(messages) > 1):
        bound = None
    try:
        with atomic_path(out_path) as temporary, open(temporary, "r+b") as file:
            file.write(header)
            file.flush()
            base = (bound.base, read_layout(bound.base)) if bound else None
            work = _Work(messages, scaled, total, layout, values, base)
            squares = work.run(file.fileno())
            if bound and (far := _outside(messages, squares, bound.ratio)):
                raise _Refused(far)
    except _Refused as refused:
        bad = refused.reasons or _unusable(messages, spec, values)
        if not bad:
            raise UserError(
                "an update changed while it was read", remedy="run the command again"
            ) from None
        return bad
    return {}


class _Refused(Exception):
    """The sum cannot stand; `reasons` by client, if they are known without another look."""

    def __init__(self, reasons: dict[str, str] | None = None):
        self.reasons = reasons or {}


def _outside(
    messages: Sequence[Message], squares: Mapping[str, np.ndarray], ratio: float
) -> dict[str, str]:
    """The clients of whose updates a part is too long, and why.

    Args:
        squares: part -> squared norms, (messages,).
    """
    found: dict[str, str] = {}
    for part, of_part in squares.items():
        norms = np.sqrt(of_part).tolist()
        # The median of those who moved: with many who did not, any other one would be unbounded.
        most = most_of(norms, ratio)
        for message, norm in zip(messages, norms, strict=True):
            if norm > most:
                median = f"{ratio:g} x the median {most / ratio:.3g}"
                found.setdefault(message.client, f"{part} of norm {norm:.3g}, over {median}")
    return found


def _part_of(name: str) -> str:
    """Which tensors' norm a tensor is part of.

    Statistics of BatchNorm have a norm of their own: those of raw features change by hundreds of
    times as much as all weights together, which nobody would see in a common one.
    """
    return "statistics" if name.endswith(STATISTICS) else "an update"


def _check_totals(
    messages: Sequence[Message], name: str, totals: np.ndarray, bounds: Values
) -> None:
    """Refuse the clients whose tensor has too large a sum of magnitudes; `totals` (messages,)."""
    over = {
        message.client: f"{problem} in tensor {name!r}"
        for message, total in zip(messages, totals.tolist(), strict=True)
        if (problem := bounds.total_problem(total))
    }
    if over:
        raise _Refused(over)


class _Summed(NamedTuple):
    """A piece that was summed: of each message the squared norm of its update there, (messages,),
    and the sum of magnitudes, where the tensor has bounds.
    """

    number: int
    name: str
    squares: np.ndarray
    magnitudes: np.ndarray


class _Work(NamedTuple):
    """A sum to be written: what all threads share."""

    messages: Sequence[Message]
    weights: np.ndarray
    total: float
    layout: Layout
    values: Mapping[str, Values]
    base: tuple[Path, Layout] | None

    def run(self, out: int) -> dict[str, np.ndarray]:
        """Write the sum to a file; the squared norms of the updates' parts, (messages,)."""
        # Pieces are disjoint and the same for any number of threads, and so are the bits.
        threads = min(4, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool:
            work = [pool.submit(self._fill, out, first, threads) for first in range(threads)]
            found = sorted((one for done in work for one in done.result()), key=lambda one: one[0])
        squares: dict[str, np.ndarray] = {}
        for one in found:
            squares[_part_of(one.name)] = squares.get(_part_of(one.name), 0.0) + one.squares
        for name, bounds in self.values.items():
            magnitudes = [one.magnitudes for one in found if one.name == name]
            totals = sum(magnitudes, np.zeros(len(self.messages)))
            _check_totals(self.messages, name, totals, bounds)
        return squares

    def _fill(self, out: int, first: int, step: int) -> list[_Summed]:
        """Sum and write the pieces number `first`, `first + step`, ..."""
        runs, found = _runs(self.messages), []
        # Reused for every block: fresh memory would cost as much as the sum.
        buffer, scratch = np.empty(_CHUNK), np.empty(2 * _CHUNK)
        numbered = enumerate(_pieces(self.layout.spec))
        with Opened() as files, np.errstate(all="ignore"):
            for number, piece in islice(numbered, first, None, step):
                sums, squares, magnitudes = self._sum(piece, files, runs, buffer, scratch)
                if not np.isfinite(sums).all():
                    raise _Refused
                sums /= self.total
                write_at(out, sums.astype(piece.kind), self.layout.offsets[piece.name] + piece.skip)
                found.append(_Summed(number, piece.name, squares, magnitudes))
        return found

    def _sum(
        self,
        piece: _Piece,
        files: Opened,
        runs: list[tuple[int, int]],
        buffer: np.ndarray,
        scratch: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sum of a piece, and of each message what `_Summed` has."""
        sums = np.zeros(piece.size)
        squares, magnitudes = np.zeros(len(self.messages)), np.zeros(len(self.messages))
        base, bounds = self._base(piece), self.values.get(piece.name)
        for start, stop in _blocks(runs, piece):
            block = _as_rows(buffer.view(piece.kind), stop - start, piece.size)
            if not files.read(self.messages[start], piece.name, piece.skip, block):
                raise _Refused
            if bounds is not None:
                if not bounds.allow(block):
                    raise _Refused
                magnitudes[start:stop] = np.abs(block).sum(1, dtype=np.float64)
            _add(sums, block, self.weights[start:stop], scratch)
            if base is not None:
                apart = _as_rows(scratch, stop - start, piece.size)
                np.subtract(block, base, out=apart)
                squares[start:stop] = np.square(apart, out=apart).sum(1)
        return sums, squares, magnitudes

    def _base(self, piece: _Piece) -> np.ndarray | None:
        """This piece of the state that the clients started from."""
        if self.base is None:
            return None
        path, layout = self.base
        row = np.empty(piece.size, piece.kind)
        with open(path, "rb") as file:
            if not read_at(file.fileno(), row, layout.offsets[piece.name] + piece.skip):
                raise UserError("cut off", path=path)
        return row


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


def _runs(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Stretches of messages that are neighbours in one file, as (first, last + 1)."""
    ends = [
        index
        for index in range(1, len(messages))
        if messages[index].path != messages[index - 1].path
        or messages[index].row != messages[index - 1].row + 1
    ]
    return list(zip([0, *ends], [*ends, len(messages)], strict=True))


def _blocks(runs: list[tuple[int, int]], piece: _Piece) -> Iterator[tuple[int, int]]:
    """Cut the runs into blocks that one read can take: many rows only where a row is small."""
    rows = _CHUNK // piece.size if piece.whole else 1
    for start, stop in runs:
        for begin in range(start, stop, rows):
            yield begin, min(begin + rows, stop)


def _unusable(
    messages: Sequence[Message], spec: Spec, values: Mapping[str, Values]
) -> dict[str, str]:
    """The clients whose messages hold what cannot be summed, and why."""
    reasons: dict[str, str] = {}
    with Opened() as files, np.errstate(all="ignore"):
        for message in messages:
            for piece in _pieces(spec):
                row = np.empty(piece.size, piece.kind)
                if not files.read(message, piece.name, piece.skip, row):
                    reasons[message.client] = f"{message.path.name} is gone, or has changed"
                elif reason := _problem(row, values.get(piece.name, Values())):
                    reasons[message.client] = f"{reason} in tensor {piece.name!r}"
                if message.client in reasons:
                    break
    return reasons


def _problem(row: np.ndarray, bounds: Values) -> str:
    """What is wrong with some elements of a client's tensor; "" if nothing is."""
    if not np.isfinite(row).all():
        return "NaN or Inf"
    if row.size and float(np.abs(row).max()) > _LARGEST:
        return f"a value over {_LARGEST:g}"
    return bounds.problem(row)
