"""Aggregation: the weighted mean of client updates, streamed from their files into the next model.

FedAvg (McMahan et al., 2017) weights clients' models by their number of samples; equation 2 of
DecoupleFL is the unweighted mean.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fedtools.core.atomic import atomic_path
from fedtools.core.errors import UserError
from fedtools.exchange.messages import Message, Opened, Refusal
from fedtools.exchange.states import Layout, Spec, make_header, read_at, read_layout, write_at
from fedtools.exchange.values import STATISTICS, Values

# Elements summed at a time: few enough for the sum to fit the processor's cache, and enough that
# threads rarely wait for the interpreter lock.
_CHUNK = 1 << 17

# Rows of at least this length are added one by one, shorter ones many per call.
_LONG = 1 << 14

# The median norm of updates counts as at least this share of the norm of what they change: with a
# ratio of 20, no update is refused that is smaller than the model.
_LEAST = 0.05

# Parts of an update, each with a norm of its own, as messages call them.
OF_WEIGHTS, OF_STATISTICS = "an update", "statistics"

# Larger finite values are meaningless and could overflow in the sum.
_LARGEST = 1e300


@dataclass(frozen=True)
class Bound:
    """Bound on the distance of an update from the state that it started from.

    Attributes:
        sent_state: the file of that state.
        ratio: the largest ratio of an update's norm to the median norm of the round's updates
            (the lower median of an even number), see `over_median`; applied separately to the norm
            of its statistics; 0 for no bound.
    """

    sent_state: Path
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
    totals: dict[str, float] | None = None,
    norm: int | None = None,
) -> list[Refusal]:
    """Write sum_k w_k x_k / sum_k w_k over the clients' tensors x_k as a state.

    Each element is summed in float64, over clients in the order of `messages`, so that the result
    has the same bits for any split of the clients into jobs. Files are read once, in pieces, and
    added directly to the sum; memory does not grow with the number of clients or the size of the
    model. Clients whose tensors are not finite or exceed a bound are refused, and the sum is
    computed again without them.

    Args:
        messages: as `read_messages` returns them.
        weights: one per message, finite, not negative, not all zero; of any scale.
        out_path: the safetensors file to write, with the tensors of `spec`.
        spec: the tensors of one client.
        values: tensor name -> bounds on its elements.
        bound: bound on the norms of updates.
        normalise: whether to divide by the sum of weights; False is for counts.
        min_clients: the fewest usable updates; with fewer, nothing is written.
        totals: filled with client -> the sum of magnitudes in the tensors that `values` bounds.
        norm: for tensors of whole numbers, whose exact sum is written as float64: the largest norm
            of all tensors of a client together.

    Returns:
        The clients refused here.

    Raises:
        UserError: if a tensor is not a float and `norm` is None, the weights of the usable updates
            are all zero, or a file changes meanwhile; `out_path` is not touched then.
    """
    if norm is None:
        check_shared(spec)
    if len(weights) != len(messages) or not all(0 <= w < math.inf for w in weights):
        raise ValueError(f"no weights for {len(messages)} messages: {weights}")
    kept = list(zip(messages, weights, strict=True))
    refusals: list[Refusal] = []
    # Each refusal changes the median, which can lead to further refusals.
    while len(kept) >= max(1, min_clients):
        found = _sum(kept, out_path, spec, values or {}, bound, normalise, totals, norm)
        if not found:
            break
        refusals += [Refusal(client, why) for client, why in found.items()]
        kept = [(message, weight) for message, weight in kept if message.client not in found]
    return refusals


def check_min_clients(
    left: int, min_clients: int, refusals: Sequence[Refusal], path: str | Path | None = None
) -> None:
    """Raise a `UserError` that lists the refusals if too few usable updates are left."""
    needed = max(1, min_clients)
    if left >= needed:
        return
    restart = "start a new experiment with a lower"
    remedy = f"run fedtools reset to train the round again, or {restart} min_clients"
    if any("diverged" in refusal.reason for refusal in refusals):
        remedy = f"{restart} learning rate or a lower min_clients"
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
    """Raise a `UserError` that names the first shared tensor that cannot be averaged."""
    for name, (_, kind) in sorted(spec.items()):
        if kind not in ("float32", "float64"):
            raise UserError(
                f"tensor {name!r} is {kind}, which cannot be averaged",
                remedy="make it personal or reset in the method",
            )


def _sum(
    weighted: Sequence[tuple[Message, float]],
    out_path: str | Path,
    spec: Spec,
    values: Mapping[str, Values],
    bound: Bound | None,
    normalise: bool,
    totals: dict[str, float] | None,
    norm: int | None,
) -> dict[str, str]:
    """Write the weighted sum and return {}, or return client -> reason for refusals."""
    messages, weights = [one for one, _ in weighted], [weight for _, weight in weighted]
    largest = max(weights)
    if not largest > 0:
        raise UserError("the weights of all usable updates are zero")
    # Division by the largest makes equal weights exactly 1, whatever their scale.
    scaled = np.array(weights, np.float64) / largest
    total = math.fsum(scaled) if normalise else 1 / largest
    whole: Spec = {name: (shape, "float64") for name, (shape, _) in spec.items()}
    header, layout = make_header(spec if norm is None else whole)
    if bound is not None and not (bound.ratio > 0 and len(messages) > 1):
        bound = None
    try:
        with atomic_path(out_path) as temporary, open(temporary, "r+b") as file:
            file.write(header)
            file.flush()
            sent_state = (bound.sent_state, read_layout(bound.sent_state)) if bound else None
            work = _Work(messages, scaled, total, spec, layout, values, sent_state, norm)
            squares, magnitudes = work.run(file.fileno())
            if bound and (far := outside(messages, squares, bound)):
                raise Refused(far)
            if norm is not None and (far := _longer(messages, squares, norm)):
                raise Refused(far)
    except Refused as refused:
        bad = refused.reasons or unusable(messages, spec, values)
        if not bad:
            raise UserError(
                "an update changed while it was read", remedy="run the command again"
            ) from None
        return bad
    if totals is not None:
        totals.clear()
        totals |= zip((one.client for one in messages), magnitudes.tolist(), strict=True)
    return {}


class Refused(Exception):
    """The sum has to be discarded; `reasons` by client, if known without reading files again."""

    def __init__(self, reasons: dict[str, str] | None = None):
        self.reasons = reasons or {}


def outside(
    messages: Sequence[Message], squares: Mapping[str, np.ndarray], bound: Bound
) -> dict[str, str]:
    """Return client -> reason for updates of which a part has too large a norm.

    Args:
        messages: the messages.
        squares: part -> squared norms, (messages,).
        bound: the bound.
    """
    found: dict[str, str] = {}
    for part, of_part in squares.items():
        norms = np.sqrt(of_part).tolist()
        for index, limit in over_median(norms, bound.ratio, partial(_norm, bound.sent_state, part)):
            reason = f"{part} of norm {norms[index]:.3g}, {limit}"
            found.setdefault(messages[index].client, reason)
    return found


def _longer(
    messages: Sequence[Message], squares: Mapping[str, np.ndarray], norm: int
) -> dict[str, str]:
    """Return client -> reason for changes of which all parts together are longer than `norm`."""
    over = np.flatnonzero(sum(squares.values()) > np.array(norm**2)).tolist()
    return {messages[index].client: f"a change of norm over {norm} steps" for index in over}


def over_median(
    norms: Sequence[float], ratio: float, state: Callable[[], float]
) -> list[tuple[int, str]]:
    """Return the positions of the norms that are over `ratio` times their median, and the limit.

    The median is of all norms, those of clients who did not move among them: attackers who are few
    of all could be most of those who move. If most did not move, or hardly, a client that did may
    be the only one with something to learn, so that the median counts as `_LEAST` of the norm of
    what the updates change.

    Args:
        norms: the norms of updates.
        ratio: over 0.
        state: returns the norm of the state that they change.
    """
    median, what = statistics.median_low(norms), "the median"
    if max(norms) > ratio * median and (least := _LEAST * state()) > median:
        median, what = least, f"the median, counted as {_LEAST:g} of the model's norm:"
    limit = f"over {ratio:g} x {what} {median:.3g}"
    return [(index, limit) for index, norm in enumerate(norms) if norm > ratio * median]


def _norm(path: Path, part: str) -> float:
    """Return the norm of a part of a state."""
    layout, squares = read_layout(path), 0.0
    with open(path, "rb") as file:
        for piece in pieces(layout.spec):
            if part_of(piece.name) == part:
                squares += float(np.square(read_piece(file, path, layout, piece), dtype="f8").sum())
    return math.sqrt(squares)


def read_piece(file: BinaryIO, path: Path, layout: Layout, piece: Piece) -> np.ndarray:
    row = np.empty(piece.size, piece.kind)
    if not read_at(file.fileno(), row, layout.offsets[piece.name] + piece.skip):
        raise UserError("the file is truncated", path=path)
    return row


def part_of(name: str) -> str:
    """Return the part of an update, with a norm of its own, that a tensor belongs to.

    BatchNorm statistics are a separate part: statistics of raw features change hundreds of times
    as much as all weights together, so a common norm would hide a change of the weights.
    """
    return OF_STATISTICS if name.endswith(STATISTICS) else OF_WEIGHTS


def _check_totals(
    messages: Sequence[Message], name: str, totals: np.ndarray, bounds: Values
) -> None:
    """Raise `Refused` for clients whose sum of magnitudes, in `totals`, is too large."""
    over = {
        message.client: f"{problem} in tensor {name!r}"
        for message, total in zip(messages, totals.tolist(), strict=True)
        if (problem := bounds.total_problem(total))
    }
    if over:
        raise Refused(over)


class _Summed(NamedTuple):
    """A summed piece, with each message's squared update norm, (messages,), and, for tensors with
    bounds, each message's sum of magnitudes.
    """

    number: int
    name: str
    squares: np.ndarray
    magnitudes: np.ndarray


class _Work(NamedTuple):
    """Shared inputs of the threads that compute a sum."""

    messages: Sequence[Message]
    weights: np.ndarray
    total: float
    spec: Spec
    layout: Layout
    values: Mapping[str, Values]
    sent_state: tuple[Path, Layout] | None
    norm: int | None

    def run(self, out: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Write the sum to a file.

        Returns:
            part -> squared norms, (messages,), and the sums of magnitudes of all bounded tensors.
        """
        # Pieces are disjoint and do not depend on the number of threads, so the bits do not either.
        threads = min(4, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool:
            work = [pool.submit(self._fill, out, first, threads) for first in range(threads)]
            found = sorted((one for done in work for one in done.result()), key=lambda one: one[0])
        squares: dict[str, np.ndarray] = {}
        for one in found:
            squares[part_of(one.name)] = squares.get(part_of(one.name), 0.0) + one.squares
        every = np.zeros(len(self.messages))
        for name, bounds in self.values.items():
            magnitudes = [one.magnitudes for one in found if one.name == name]
            totals = sum(magnitudes, np.zeros(len(self.messages)))
            _check_totals(self.messages, name, totals, bounds)
            every += totals
        return squares, every

    def _fill(self, out: int, first: int, step: int) -> list[_Summed]:
        """Sum and write the pieces with numbers `first`, `first + step`, ..."""
        runs, found = runs_of(self.messages), []
        # Reused for every block: allocating memory takes as long as the sum.
        buffer, scratch = np.empty(_CHUNK), np.empty(2 * _CHUNK)
        numbered = enumerate(pieces(self.spec))
        with Opened() as files, np.errstate(all="ignore"):
            for number, piece in islice(numbered, first, None, step):
                sums, squares, magnitudes = self._sum(piece, files, runs, buffer, scratch)
                if not np.isfinite(sums).all():
                    raise Refused
                sums /= self.total
                written = sums.astype(self.layout.spec[piece.name][1])
                place = self.layout.offsets[piece.name] + piece.begin * written.itemsize
                write_at(out, written, place)
                found.append(_Summed(number, piece.name, squares, magnitudes))
        return found

    def _sum(
        self,
        piece: Piece,
        files: Opened,
        runs: list[tuple[int, int]],
        buffer: np.ndarray,
        scratch: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute the sum of a piece, and the squared norms and magnitudes of each message."""
        sums = np.zeros(piece.size)
        squares, magnitudes = np.zeros(len(self.messages)), np.zeros(len(self.messages))
        sent_state, bounds = self._sent_state(piece), self.values.get(piece.name)
        for start, stop in blocks(runs, piece):
            block = as_rows(buffer.view(piece.kind), stop - start, piece.size)
            if not files.read(self.messages[start], piece.name, piece.skip, block):
                raise Refused
            if bounds is not None:
                if not bounds.allow(block):
                    raise Refused
                magnitudes[start:stop] = np.abs(block).sum(1, dtype=np.float64)
            add(sums, block, self.weights[start:stop], scratch)
            if self.norm is not None:
                lengths = np.square(block, dtype=np.int64).sum(1)
                # Cut off, so that further sums are exact, and still too large.
                squares[start:stop] = np.minimum(lengths, self.norm**2 + 1)
            if sent_state is not None:
                apart = as_rows(scratch, stop - start, piece.size)
                np.subtract(block, sent_state, out=apart)
                squares[start:stop] = np.square(apart, out=apart).sum(1)
        return sums, squares, magnitudes

    def _sent_state(self, piece: Piece) -> np.ndarray | None:
        """Return this piece of the state that the clients started from."""
        if self.sent_state is None:
            return None
        path, layout = self.sent_state
        with open(path, "rb") as file:
            return read_piece(file, path, layout, piece)


def add(sums: np.ndarray, block: np.ndarray, weights: np.ndarray, scratch: np.ndarray) -> None:
    """Add the rows of a block, multiplied by their weights, to `sums`, strictly in order.

    The order of additions must not depend on the number of rows of a block. A reduction along the
    first axis keeps it, except for rows of one element, which numpy sums in pairs.
    """
    rows, size = block.shape
    # Weights are usually all 1, and multiplying by 1 changes no bit.
    weighted = bool((weights != 1).any())
    if size >= _LONG:
        for row, weight in zip(block, weights, strict=True):
            if weighted:
                row = np.multiply(row, weight, out=scratch[:size], dtype=np.float64)
            np.add(sums, row, out=sums)
        return
    stack = as_rows(scratch, rows + 1, size)
    stack[0] = sums
    stack[1:] = block
    if weighted:
        stack[1:] *= weights[:, None]
    if size > 1:
        np.add.reduce(stack, axis=0, out=sums)
    else:
        sums[0] = functools.reduce(operator.add, stack[:, 0].tolist())


def block_buffer() -> np.ndarray:
    """Return memory for any block of values, of float32 or float64, that `blocks` asks for."""
    return np.empty(_CHUNK)


def as_rows(array: np.ndarray, rows: int, size: int) -> np.ndarray:
    """Return the beginning of a buffer as a matrix, (rows, size)."""
    return array[: rows * size].reshape(rows, size)


class Piece(NamedTuple):
    """A range of elements of one tensor, which one thread processes at a time."""

    name: str
    kind: np.dtype
    begin: int
    size: int
    whole: bool

    @property
    def skip(self) -> int:
        """Return the number of bytes of the tensor before the piece."""
        return self.begin * self.kind.itemsize


def pieces(spec: Spec) -> Iterator[Piece]:
    """Yield all tensors in pieces of up to `_CHUNK` elements."""
    for name, (shape, kind) in spec.items():
        elements, dtype = math.prod(shape), np.dtype(kind)
        for begin in range(0, elements, _CHUNK):
            size = min(_CHUNK, elements - begin)
            yield Piece(name, dtype, begin, size, size == elements)


def runs_of(messages: Sequence[Message]) -> list[tuple[int, int]]:
    """Return the runs of messages in consecutive rows of one file, as (first, last + 1)."""
    ends = [
        index
        for index in range(1, len(messages))
        if messages[index].path != messages[index - 1].path
        or messages[index].row != messages[index - 1].row + 1
    ]
    return list(zip([0, *ends], [*ends, len(messages)], strict=True))


def blocks(runs: list[tuple[int, int]], piece: Piece) -> Iterator[tuple[int, int]]:
    """Cut the runs into blocks for single reads, of several rows only if the piece is a row."""
    rows = _CHUNK // piece.size if piece.whole else 1
    for start, stop in runs:
        for begin in range(start, stop, rows):
            yield begin, min(begin + rows, stop)


def unusable(
    messages: Sequence[Message], spec: Spec, values: Mapping[str, Values]
) -> dict[str, str]:
    """Return client -> reason for messages that cannot be summed."""
    reasons: dict[str, str] = {}
    with Opened() as files, np.errstate(all="ignore"):
        for message in messages:
            for piece in pieces(spec):
                row = np.empty(piece.size, piece.kind)
                if not files.read(message, piece.name, piece.skip, row):
                    reasons[message.client] = f"{message.path.name} is missing or has changed"
                elif reason := _problem(row, values.get(piece.name, Values())):
                    reasons[message.client] = f"{reason} in tensor {piece.name!r}"
                if message.client in reasons:
                    break
    return reasons


def _problem(row: np.ndarray, bounds: Values) -> str:
    """Return what is wrong with elements of a client's tensor, "" if nothing is."""
    if not np.isfinite(row).all():
        return "NaN or Inf"
    if row.size and float(np.abs(row).max()) > _LARGEST:
        return f"a value over {_LARGEST:g}"
    return bounds.problem(row)
