"""Stacks of clients with keyword clips: which clients train together, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedtools.audio.augment import Plan, plan
from fedtools.client.options import ClipTraining
from fedtools.client.unit import Source
from fedtools.data.clips import Clips
from fedtools.models.keywords.base import Network
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.models.stacked import held_once


class Data(Protocol):
    """The clips that batches are taken from."""

    clips: Clips

    def batch(
        self, rows: Sequence[slice], plans: Sequence[Plan], step: int, width: int = 0
    ) -> ClipBatch:
        """Return one step's batch, see `fedtools.tasks.kws.clips.ClipFeatures`."""


class ClipBatches:
    """The batches of a stack of clients in one training of one round.

    Args:
        data: all clips.
        names: the clients, or "server".
        rows: the clips of each.
        steps: gradient steps of each, not growing.
        training: batch size and augmentation.
        key: (seed, round, purpose); with a client's name it determines the client's batches, so
            that these do not depend on the other clients in the stack.
        full: whether every batch is padded to the batch size, so that the shape of a computation,
            on which its rounding depends, does not depend on what clips clients have.
    """

    def __init__(
        self,
        data: Data,
        names: Sequence[str],
        rows: Sequence[slice],
        steps: Sequence[int],
        training: ClipTraining,
        key: tuple[int, int, str],
        full: bool = False,
    ):
        if sorted(steps, reverse=True) != list(steps):
            raise ValueError(f"clients are not sorted by their steps: {steps}")
        self.steps = list(steps)
        self._data, self._rows = data, list(rows)
        self._width = training.batch_size if full else 0
        seed, number, purpose = key
        noise = len(data.clips.noise)
        self._plans: list[Plan] = [
            plan(
                seed,
                number,
                f"{purpose}/{name}",
                place.stop - place.start,
                count,
                training.batch_size,
                noise,
                training.augmentation,
                data.clips.samples,
            )
            for name, place, count in zip(names, rows, steps, strict=True)
        ]

    def stream(self, first: int) -> Iterator[list[ClipBatch]]:
        """Yield one batch per step, of the clients that still train."""
        for step in range(first, self.steps[0]):
            active = sum(count > step for count in self.steps)
            rows, plans = self._rows[:active], self._plans[:active]
            yield [self._data.batch(rows, plans, step, self._width)]


class ClipSource(Source):
    """The clips of a stack of clients, or of the server, in one round.

    Args:
        data: all clips.
        names: the clients, those with the most steps first; or "server".
        rows: the clips of each.
        key: (seed, round) for all random numbers.
        training: batch size and augmentation.
        facts: name -> the method's values for each client, "steps" among them.
        full: see `ClipBatches`.
    """

    def __init__(
        self,
        data: Data,
        names: Sequence[str],
        rows: Sequence[slice],
        key: tuple[int, int],
        training: ClipTraining,
        facts: Mapping[str, np.ndarray],
        full: bool = False,
    ):
        self.sizes, self.facts = [one.stop - one.start for one in rows], facts
        self._data, self._names, self._rows = data, list(names), list(rows)
        self._key, self._training, self._full = key, training, full

    def on(self, other: Callable[[Data, Sequence[str]], Data]) -> ClipSource:
        """Return the same source on other data, which are made of these for its clients."""
        found = copy(self)
        found._data = other(self._data, self._names)
        return found

    def batches(
        self, epochs: int | None, steps: int | Sequence[int] | None, purpose: str
    ) -> ClipBatches:
        """Return batches for the given epochs or steps, by default for the method's steps.

        Args:
            steps: of all clients, or of each.
        """
        if epochs is not None:
            steps = [-(-size // self._training.batch_size) * epochs for size in self.sizes]
        elif steps is None:
            steps = self.facts["steps"].tolist()
        counts = [steps] * len(self._names) if isinstance(steps, int) else steps
        key = (*self._key, purpose)
        rows, options = self._rows, self._training
        return ClipBatches(self._data, self._names, rows, counts, options, key, self._full)


def stacks_of(
    clients: Sequence[str], steps: Mapping[str, int], sizes: Mapping[str, int], largest: int
) -> list[list[str]]:
    """Split the clients of a round into stacks, so that similar steps and clips are together.

    The result depends on the round's clients alone, not on the number of jobs.
    """
    order = sorted(clients, key=lambda name: (-steps[name], -sizes[name], name))
    return [order[begin : begin + largest] for begin in range(0, len(order), largest)]


def step_bytes(network: Network, mfcc: Tensor, batch_size: int) -> int:
    """Return the memory that one client's step keeps for its gradient, in bytes.

    Args:
        network: for one client.
        mfcc: one clip, (1, frames, coefficients).
        batch_size: clips per step.
    """
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        network(mfcc[None].expand(1, 2, *mfcc.shape[1:]))
    # Frozen tensors take memory once, however many clips a step has.
    state, once = network.state_dict(), held_once(network)
    own = (value for name, value in state.items() if name not in once)
    trained = {value.untyped_storage().data_ptr() for value in own}
    frozen = {value.untyped_storage().data_ptr() for value in network.buffers()} - trained
    return sum(size for place, size in kept.items() if place not in frozen) * batch_size // 2
