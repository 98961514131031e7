"""Updates of clients, and the inner products of all pairs of updates.

An update is what a client sent minus what it began with. Attacks on updates need only the products
of all pairs, which are summed over pieces of tensors as they are read from the files of messages:
each byte is read once. Memory holds two pieces of all models, whose length is chosen so that their
size does not depend on the number of models, and the products of one part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from threadpoolctl import threadpool_limits

from fedtools.attack.defences import defended
from fedtools.attack.victims import Victims, received, summed
from fedtools.core.atomic import atomic_path
from fedtools.core.errors import UserError
from fedtools.exchange.messages import Message, Refusal, stacked
from fedtools.exchange.states import Spec, make_header, read_at, write_at
from fedtools.exchange.values import STATISTICS
from fedtools.federation.federation import Federation
from fedtools.methods.base import SHARED, Changes
from fedtools.tasks.parts import SPEAKERS

# Suffix of parts of statistics, whose units differ from those of weights.
OF_STATISTICS = ".statistics"
# Bytes of a piece of all models; two pieces are in memory.
PIECE_BYTES = 64 << 20
# Values of each model multiplied at a time, as many as fit a processor's caches.
_AT_ONCE = 4096
# A squared length above this multiple of the median's makes a model an outlier.
_FAR = 100.0


class NotApplicable(Exception):
    """Raised when an attack does not apply to an experiment; the text says why."""


@dataclass(frozen=True)
class Update:
    """Update of one client.

    Attributes:
        message: what the client sent.
        start: tensors that it began with, by name; missing ones were zeros.
        client: name of the client, without the round.
        number: number of the round.
        step: length of a step, of a clipped change in whole steps.
    """

    message: Message
    start: Mapping[str, np.ndarray]
    client: str
    number: int
    step: float = 1.0


@dataclass
class Updates:
    """Updates of clients in some rounds of some experiments.

    Attributes:
        models: name of the model -> update, in C order.
        speakers: name of the model -> speaker; models of clients with several speakers are missing.
        refused: name of the model -> why it was refused.
        spec: shapes and types of the tensors that each client has sent.
        groups: for each model that is a mean, the models in the mean, see `Defended.group`; also
            those of a secure sum.
    """

    models: dict[str, Update] = field(default_factory=dict)
    speakers: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    spec: Spec = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)


def find_updates(federation: Federation, rounds: Sequence[int], defended: bool = False) -> Updates:
    """Find the updates of some rounds; only headers are read.

    Unlike in other attacks, files that changed since their round was closed are not reported: all
    would have to be read twice.

    Args:
        defended: whether the updates are to be compared behind a defence.

    Raises:
        NotApplicable: if clients send no tensors, or there is to be a defence, which is for models.
        UserError: if a round is not complete, or its messages are missing.
    """
    known = SPEAKERS.of(federation.task)
    # If a task does not know speakers, each client counts as one.
    owners = known() if known else {one: one for one in federation.experiment.clients}
    found = Updates()
    for number in rounds:
        phase, secure = federation.method.phase(number), federation.method.secure_sums
        payload = federation.payload(phase) if phase.client_update else None
        if payload is None or not payload.tensors:
            raise NotApplicable(f"in round {number} clients send no tensors")
        if secure and defended:
            raise NotApplicable(f"in round {number} only a secure sum is visible")
        if isinstance(phase.sends, Changes) and defended:
            raise NotApplicable(f"in round {number} clients send clipped changes, and no models")
        step = phase.sends.grid.step if isinstance(phase.sends, Changes) and not secure else 1.0
        found.spec = federation.states.shared_spec if secure else payload.tensors
        start: Mapping[str, np.ndarray] = {}
        if phase.sends == SHARED or secure:
            start = federation.states.of_kind(SHARED, federation.states.start(number))
        if secure:
            came = summed(federation, number)
        else:
            came = [one for some in received(federation, number) for one in some]
        for item in sorted(came, key=lambda one: one.client):
            name = f"{item.client}-r{number:04d}" if len(rounds) > 1 else item.client
            if isinstance(item, Refusal):
                found.refused[name] = item.reason
                continue
            found.models[name] = Update(item, start, item.client, number, step)
            if item.client in owners:
                found.speakers[name] = owners[item.client]
        if secure:
            own = [name for name, one in found.models.items() if one.number == number]
            found.groups |= dict.fromkeys(own, own)
    return found


def behind_defence(
    federation: Federation,
    updates: Updates,
    rounds: Sequence[int],
    defence: str,
    seed: int,
    path: Path,
) -> Updates:
    """Return updates as an attacker sees them behind a defence, and write them to a file.

    Args:
        defence: see `fedtools.attack.defences`.
        seed: random seed of noise and groups.
        path: file of all models, as large as the messages; the caller removes it.
    """
    messages = {name: one.message for name, one in updates.models.items()}
    victims = Victims(messages, updates.refused, updates.speakers)
    found = replace(updates, models={}, groups={})
    row, layout = 0, None
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        for number in rounds:
            folder = federation.experiment.round(number).path
            own = [name for name, one in messages.items() if one.path.parent == folder]
            seen = defended(federation, victims, number, defence, seed)
            for name, state in seen.states(own):
                if layout is None:
                    found.spec = {key: updates.spec[key] for key in sorted(state)}
                    header, layout = make_header(stacked(found.spec, len(messages)))
                    file.write(header)
                    file.truncate(layout.size)
                for key, value in state.items():
                    place = layout.offsets[key] + row * layout.strides[key]
                    write_at(file.fileno(), np.ascontiguousarray(value), place)
                sent = replace(messages[name], path=path, layout=layout, row=row, seals={})
                found.models[name] = replace(updates.models[name], message=sent)
                if len(members := seen.group(name)) > 1:
                    found.groups[name] = members
                row += 1
    return found


def join(parts: Sequence[Updates], where: Sequence[Path]) -> Updates:
    """Join the updates of several experiments.

    Raises:
        UserError: if their tensors differ, or a model is in two of them.
    """
    found = Updates(spec=parts[0].spec)
    for part, folder in zip(parts, where, strict=True):
        if part.spec != found.spec:
            raise UserError(f"the tensors sent differ from those of {where[0]}", path=folder)
        if duplicates := found.models.keys() & part.models.keys():
            raise UserError(f"{min(duplicates)!r} is also in another experiment", path=folder)
        found.models |= part.models
        found.speakers |= part.speakers
        found.refused |= part.refused
        found.groups |= part.groups
    found.models = dict(sorted(found.models.items()))
    return found


def parts_of(spec: Spec) -> dict[str, list[str]]:
    """Return the parts of a model, from the bottom, and the tensors of each.

    A part is a block or a layer: tensors with the same name up to its last number, or up to its
    last dot if there is no number. BatchNorm's statistics are separate parts.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(spec, key=_natural):
        # BatchNorm's counters are int64; clipped changes are int32.
        if not spec[name][1].startswith(("float", "int32")):
            continue
        module = name.rpartition(".")[0] or name
        numbered = re.match(r"(.*\.)?\d+(?=\.)", name)
        part = numbered[0] if numbered else module
        found.setdefault(part + OF_STATISTICS * name.endswith(STATISTICS), []).append(name)
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sorting key of a name by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


class Reader:
    """Reader of pieces of updates from the files of their messages.

    Args:
        updates: in the order of the rows that are read.
    """

    def __init__(self, updates: Sequence[Update]):
        self._updates, self._files = list(updates), dict[Path, BinaryIO]()
        self._stack = ExitStack()

    def __enter__(self) -> Reader:
        for update in self._updates:
            path = update.message.path
            if path not in self._files:
                self._files[path] = self._stack.enter_context(update.message.open())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def expect(self, name: str, begin: int, length: int) -> None:
        """Let the system read ahead `length` values of a tensor, which are far apart in files."""
        for update in self._updates:
            message = update.message
            size = np.dtype(message.layout.spec[name][1]).itemsize
            file = self._files[message.path].fileno()
            place = message.offset(name) + begin * size
            os.posix_fadvise(file, place, length * size, os.POSIX_FADV_WILLNEED)

    def read(self, name: str, begin: int, out: np.ndarray) -> np.ndarray:
        """Fill `out`, (models, values), with a piece of a tensor, from a value on.

        Args:
            out: of float32 or float64.
        """
        for row, update in zip(out, self._updates, strict=True):
            message = update.message
            kind = np.dtype(message.layout.spec[name][1])
            piece = row if kind == row.dtype else np.empty(len(row), kind)
            place = message.offset(name) + begin * kind.itemsize
            if not read_at(self._files[message.path].fileno(), piece, place):
                raise UserError("changed while it was read", path=message.path)
            with np.errstate(over="ignore", invalid="ignore"):
                if name in update.start:
                    piece -= update.start[name].reshape(-1)[begin : begin + len(row)]
                if piece is not row:
                    row[:] = piece
                if update.step != 1:
                    row *= update.step
        return out


@dataclass
class Products:
    """Products of all pairs of models, for one part.

    Attributes:
        part: name of the part.
        products: (models, models), of updates less a vector common to all.
        squares: (models,), squared lengths of the updates; 0 for a model that did not change.
    """

    part: str
    products: np.ndarray
    squares: np.ndarray


def multiply(
    updates: Sequence[Update],
    parts: Mapping[str, Sequence[str]],
    piece_bytes: int = PIECE_BYTES,
    versions: int = 1,
) -> Iterator[Products]:
    """Yield the products of all pairs of updates by part; each byte of the files is read once.

    A mean over models is subtracted from each piece, so that the part that all have in common,
    which may be most of an update, costs no precision; products that are later centred on another
    mean are not affected. Models in two versions may have different parts in common: each version
    is centred separately, and products with the difference of the two means are added at the end.
    Pieces are in single precision, sums in double. Products of an update that is not finite are not
    finite either.

    Args:
        updates: in the order of the products' rows.
        parts: part -> its tensors.
        piece_bytes: bytes of a piece of all models, in single precision.
        versions: number of versions of each model, one or two; all models are in the first, then
            all in the second.
    """
    spec = updates[0].message.layout.spec
    width = max(1, piece_bytes // (4 * len(updates)))
    plan = [
        (part, name, begin, min(width, size - begin))
        for part, names in parts.items()
        for name in names
        for size in [int(np.prod(spec[name][0][1:], dtype=np.int64))]
        for begin in range(0, size, width)
    ]
    widest = max((length for *_, length in plan), default=0)
    buffers = [np.empty(len(updates) * widest, np.float32) for _ in range(2)]
    count = len(updates)
    left = dict.fromkeys(parts, 0)
    for part, *_ in plan:
        left[part] += 1
    sums = _Sums("", count, versions)
    # One thread reads, the others multiply; more threads than processors would wait for each other.
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    limited = threadpool_limits(threads, "blas")
    with Reader(updates) as reader, ThreadPoolExecutor(1) as ahead, limited:

        def read(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            _, name, begin, length = plan[number]
            if number + 1 < len(plan):
                reader.expect(*plan[number + 1][1:])
            out = buffers[number % 2][: count * length].reshape(count, length)
            parts = np.split(reader.read(name, begin, out), versions)
            squares, means = zip(*map(_centre, parts), strict=True)
            return out, np.concatenate(squares), means[-1] - means[0]

        coming = ahead.submit(read, 0) if plan else None
        for number, (part, *_) in enumerate(plan):
            found = coming.result()
            # The other buffer is free: its values have been added.
            coming = ahead.submit(read, number + 1) if number + 1 < len(plan) else None
            if sums.part != part:
                sums = _Sums(part, count, versions)
            sums.add(*found)
            left[part] -= 1
            if not left[part]:
                yield sums.result()


class _Sums:
    """Sums of products of one part over pieces.

    Args:
        part: name of the part.
        count: number of updates.
        versions: see `multiply`.
    """

    def __init__(self, part: str, count: int, versions: int):
        self.part, self._versions = part, versions
        self._products, self._squares = np.zeros((count, count)), np.zeros(count)
        # Products with the step between the versions' means, and its squared length.
        self._along, self._length = np.zeros(count), 0.0

    def add(self, piece: np.ndarray, squares: np.ndarray, step: np.ndarray) -> None:
        """Add a piece, (updates, values), with versions centred separately, and the means' step."""
        self._squares += squares
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, piece.shape[1], _AT_ONCE):
                some = piece[:, begin : begin + _AT_ONCE]
                self._products += some @ some.T
                if self._versions > 1:
                    own = step[begin : begin + _AT_ONCE]
                    self._along += some @ own
                    self._length += float(own @ own)

    def result(self) -> Products:
        """Return all products, with both versions relative to the first one's mean."""
        if self._versions > 1:
            second = np.arange(len(self._products)) >= len(self._products) // 2
            self._products[:, second] += self._along[:, None]
            self._products[second] += self._along
            self._products[np.ix_(second, second)] += self._length
        return Products(self.part, self._products, self._squares)


def _centre(piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Subtract the mean of models, outliers excluded, from a piece, (models, values), in place.

    Rows that are not finite become zeros, so that they do not affect other models' products.

    Returns:
        (models,), squared lengths before, which show what is not finite; and the mean, (values,).
    """
    total, mean = np.zeros(len(piece)), np.zeros(piece.shape[1], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, piece.shape[1], _AT_ONCE):
            some = piece[:, begin : begin + _AT_ONCE]
            squares = np.einsum("ij,ij->i", some, some)
            total += squares
            whole = np.isfinite(squares)
            if not whole.all():
                some[~whole] = 0
            near = whole & (squares <= _FAR * np.median(squares[whole])) if whole.any() else whole
            if near.any():
                middle = mean[begin : begin + _AT_ONCE]
                middle[:] = (near / near.sum()).astype(np.float32) @ some
                some -= middle
    return total, mean
