"""The updates of a round in their files: lengths, inner products, weighted sums, medians.

An update is a client's tensors minus the state that the server sent. Files are read in pieces, as
`fedtools.server.aggregate` does, in a fixed number of passes; memory grows neither with the number
of clients times the size of the model, nor with threads. Pieces are dealt to a fixed number of
lanes, whose sums are added in their order, and products are computed by one thread each, so that
the bits depend neither on the number of threads nor on the clients' jobs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedtools.core.atomic import atomic_path
from fedtools.core.errors import UserError
from fedtools.exchange.messages import Message, Opened
from fedtools.exchange.states import Layout, Spec, make_header, read_layout, write_at
from fedtools.exchange.values import Values
from fedtools.server.aggregate import (
    Piece,
    Refused,
    add,
    as_rows,
    block_buffer,
    blocks,
    pieces,
    read_piece,
    runs_of,
)

_LANES = 4
# Values of all clients together that are read at once, so that reads are long.
_TOGETHER = 1 << 20
# Values of all clients together whose inner products are computed at once, within the processor's
# cache, but at least some coordinates.
_MULTIPLIED, _LEAST = 204800, 256
# Coordinates that are sorted at once; their rows are turned into columns within the cache.
_SORTED = 512

Found = TypeVar("Found")


def in_lanes(work: Callable[[int], Found]) -> list[Found]:
    """Return what `work` returns for each lane; threads take the lanes."""
    from threadpoolctl import threadpool_limits

    threads = min(_LANES, len(os.sched_getaffinity(0)))
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(_LANES)))


@dataclass(frozen=True)
class Products:
    """Inner products of the updates of n clients in one part of the model.

    Attributes:
        squares: squared norms, (n,).
        inner: of all pairs, (n, n); None if only norms were asked for.
        along: with the server's own update, (n,); 0 without one.
        root: its squared norm; 0 without one.
    """

    squares: np.ndarray
    inner: np.ndarray | None
    along: np.ndarray
    root: float

    @classmethod
    def none(cls, clients: int, pairs: bool) -> Products:
        """Return those of updates without any tensor."""
        inner = np.zeros((clients, clients)) if pairs else None
        return cls(np.zeros(clients), inner, np.zeros(clients), 0.0)

    def __add__(self, other: Products) -> Products:
        inner = None if self.inner is None or other.inner is None else self.inner + other.inner
        return Products(
            self.squares + other.squares,
            inner,
            self.along + other.along,
            self.root + other.root,
        )


@dataclass(frozen=True)
class Updates:
    """The updates of some clients.

    Attributes:
        messages: of the clients.
        spec: the tensors of one client.
        state: the file of the state that the server sent.
        values: tensor name -> bounds on its elements.
        root: the file of the tensors that the server has trained on data of its own, if it has.
    """

    messages: Sequence[Message]
    spec: Spec
    state: Path
    values: Mapping[str, Values]
    root: Path | None = None

    @cached_property
    def _layouts(self) -> tuple[Layout, Layout | None]:
        return read_layout(self.state), read_layout(self.root) if self.root else None

    def products(self, part_of: Callable[[str], str], pairs: bool) -> dict[str, Products]:
        """Compute inner products of the updates, (clients, clients), or only their norms.

        Args:
            part_of: name of a tensor -> its part.
            pairs: whether those of all pairs are needed.

        Returns:
            part -> its inner products.

        Raises:
            Refused: if a file has changed, or a value is out of bounds. Of values that are not
                finite, squares are not either.
        """

        def lane(first: int) -> dict[str, Products]:
            found: dict[str, Products] = {}
            reader = _Reader(self)
            with Opened() as files, np.errstate(all="ignore"):
                for piece in islice(pieces(self.spec), first, None, _LANES):
                    part = part_of(piece.name)
                    own = reader.pairs(piece, files) if pairs else reader.norms(piece, files)
                    found[part] = found[part] + own if part in found else own
            return found

        total: dict[str, Products] = {}
        for found in in_lanes(lane):
            for part, own in found.items():
                total[part] = total[part] + own if part in total else own
        return total

    def write_sum(self, shares: Mapping[str, np.ndarray], out_path: Path) -> None:
        """Write the sent state plus the sum of the updates, each times its share, as a state.

        Args:
            shares: tensor name -> (clients,). Tensors of a client with share 0 are not read.
            out_path: the file.
        """
        runs = {name: _taken(self.messages, one) for name, one in shares.items()}

        def of(piece: Piece, reader: _Reader, files: Opened) -> np.ndarray:
            taken, messages, own = runs[piece.name]
            sums = reader.sent(piece).astype(np.float64)
            sums *= 1.0 - float(taken.sum())
            for start, stop, block in reader.blocks(piece, files, messages, own):
                add(sums, block, taken[start:stop], reader.scratch)
            return sums

        self._write(of, out_path)

    def write_centre(self, centre: Callable[[np.ndarray], np.ndarray], out_path: Path) -> None:
        """Write what a function makes of all clients' values of each coordinate, as a state.

        Args:
            centre: (coordinates, clients), which it may change -> (coordinates,).
            out_path: the file.
        """

        def of(piece: Piece, reader: _Reader, files: Opened) -> np.ndarray:
            found = np.empty(piece.size)
            for begin, stack in reader.stacks(piece, files, piece.kind):
                for at in range(0, stack.shape[1], _SORTED):
                    part = np.ascontiguousarray(stack[:, at : at + _SORTED].T)
                    found[begin + at : begin + at + len(part)] = centre(part)
            return found

        self._write(of, out_path)

    def _write(self, of: Callable[[Piece, _Reader, Opened], np.ndarray], out_path: Path) -> None:
        """Write a state, of which a function returns the values of each piece, in float64."""
        header, layout = make_header(self.spec)
        with atomic_path(out_path) as temporary, open(temporary, "r+b") as file:
            file.write(header)
            file.flush()

            def lane(first: int) -> None:
                reader = _Reader(self)
                with Opened() as files, np.errstate(all="ignore"):
                    for piece in islice(pieces(self.spec), first, None, _LANES):
                        written = of(piece, reader, files).astype(piece.kind)
                        if not np.isfinite(written).all():
                            raise Refused
                        place = layout.offsets[piece.name] + piece.skip
                        write_at(file.fileno(), written, place)

            try:
                in_lanes(lane)
            except Refused:
                remedy = "run the command again"
                raise UserError("an update changed while it was read", remedy=remedy) from None


def _taken(
    messages: Sequence[Message], shares: np.ndarray
) -> tuple[np.ndarray, list[Message], list[tuple[int, int]]]:
    """Return the shares that are not 0, with their messages, and the runs of these in files."""
    places = np.flatnonzero(shares).tolist()
    own = [messages[place] for place in places]
    return shares[places], own, runs_of(own) if own else []


class _Reader:
    """What one lane reads; its buffers are used again for every piece.

    Args:
        updates: whose files are read.
    """

    def __init__(self, updates: Updates):
        self._updates = updates
        messages = updates.messages
        self._runs = runs_of(messages) if messages else []
        self._buffer, self._clients = block_buffer(), len(messages)
        # Rows of a block and one more, in float64.
        self.scratch = np.empty(2 * len(self._buffer))
        # Values of all clients, read together; and differences, in float64.
        self._stack = self._apart = np.empty(0)

    def sent(self, piece: Piece) -> np.ndarray:
        """Return a piece of the state that the server sent."""
        updates = self._updates
        with open(updates.state, "rb") as file:
            return read_piece(file, updates.state, updates._layouts[0], piece)

    def _root(self, piece: Piece, sent: np.ndarray) -> np.ndarray | None:
        """Return a piece of the server's own update, in float64."""
        path, (_, layout) = self._updates.root, self._updates._layouts
        if path is None or layout is None:
            return None
        with open(path, "rb") as file:
            own = read_piece(file, path, layout, piece)
        found: np.ndarray = np.subtract(own, sent).astype(np.float64)
        return found

    def blocks(
        self,
        piece: Piece,
        files: Opened,
        messages: Sequence[Message],
        runs: Sequence[tuple[int, int]],
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (first, last + 1, rows) of messages, as many as one read may have."""
        for start, stop in blocks([*runs], piece):
            block = as_rows(self._buffer.view(piece.kind), stop - start, piece.size)
            if not files.read(messages[start], piece.name, piece.skip, block):
                raise Refused
            yield start, stop, block

    def norms(self, piece: Piece, files: Opened) -> Products:
        """Compute the squared norms of a piece of the updates, and the products with the root's."""
        updates, found = self._updates, Products.none(self._clients, False)
        sent, bounds = self.sent(piece), updates.values.get(piece.name)
        root = self._root(piece, sent)
        for start, stop, block in self.blocks(piece, files, updates.messages, self._runs):
            if bounds is not None and not bounds.allow(block):
                raise Refused
            apart = as_rows(self.scratch, stop - start, piece.size)
            np.subtract(block, sent, out=apart)
            found.squares[start:stop] = np.einsum("kd,kd->k", apart, apart)
            if root is not None:
                found.along[start:stop] = np.einsum("kd,d->k", apart, root)
        square = 0.0 if root is None else float(np.einsum("d,d->", root, root))
        return Products(found.squares, None, found.along, square)

    def pairs(self, piece: Piece, files: Opened) -> Products:
        """Compute the inner products of a piece of all pairs of updates."""
        inner = np.zeros((self._clients, self._clients))
        bounds, sent = self._updates.values.get(piece.name), self.sent(piece)
        width = max(_LEAST, _MULTIPLIED // max(1, self._clients))
        if not len(self._apart):
            self._apart = np.empty(width * self._clients)
        for begin, stack in self.stacks(piece, files, piece.kind):
            if bounds is not None and not bounds.allow(stack):
                raise Refused
            for at in range(0, stack.shape[1], width):
                own = stack[:, at : at + width]
                apart = as_rows(self._apart, *own.shape)
                np.subtract(own, sent[begin + at : begin + at + own.shape[1]], out=apart)
                inner += apart @ apart.T
        return Products(np.diag(inner).copy(), inner, np.zeros(self._clients), 0.0)

    def stacks(
        self, piece: Piece, files: Opened, kind: np.dtype
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first coordinate, values of all clients), (clients, coordinates), of a piece."""
        clients, columns = self._clients, max(1, _TOGETHER // max(1, self._clients))
        if not len(self._stack):
            self._stack = np.empty(columns * clients)
        for begin in range(0, piece.size, columns):
            size = min(columns, piece.size - begin)
            stack = as_rows(self._stack.view(kind), clients, size)
            own = piece._replace(
                begin=piece.begin + begin, size=size, whole=piece.whole and size == piece.size
            )
            for start, stop in blocks(self._runs, own):
                block = stack[start:stop]
                if not files.read(self._updates.messages[start], own.name, own.skip, block):
                    raise Refused
            yield begin, stack
