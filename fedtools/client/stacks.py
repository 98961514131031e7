"""Stacks of clients with keyword clips: who trains together, their batches, their loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtools.audio.augment import Plan, plan
from fedtools.client.clips import ClipBatch, ClipFeatures
from fedtools.client.options import ClipTraining
from fedtools.models.keywords.base import Network


class ClipBatches:
    """The batches of a stack of clients in one training of one round.

    Args:
        data: all clips.
        names: the clients, or "server".
        rows: the clips of each.
        steps: gradient steps of each, not growing.
        training: batch size and augmentation.
        key: (seed, round, purpose); with a client's name it decides its batches, so that these do
            not depend on who else is in the stack.
    """

    def __init__(
        self,
        data: ClipFeatures,
        names: Sequence[str],
        rows: Sequence[slice],
        steps: Sequence[int],
        training: ClipTraining,
        key: tuple[int, int, str],
    ):
        if sorted(steps, reverse=True) != list(steps):
            raise ValueError(f"clients are not sorted by their steps: {steps}")
        self.steps = list(steps)
        self._data, self._rows = data, list(rows)
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
        """One batch a step, of the clients that still train."""
        for step in range(first, self.steps[0]):
            active = sum(count > step for count in self.steps)
            yield [self._data.batch(self._rows[:active], self._plans[:active], step)]


def cross_entropy(network: Network, batch: ClipBatch) -> Tensor:
    """Each client's mean cross-entropy, (K,)."""
    log_probs = F.log_softmax(network(batch.mfcc, batch.valid), -1)
    return batch.mean(-log_probs.gather(2, batch.labels[..., None])[..., 0])


def stacks_of(
    clients: Sequence[str], steps: Mapping[str, int], sizes: Mapping[str, int], largest: int
) -> list[list[str]]:
    """Cut the clients of a round into stacks: those with as many steps and clips together.

    A function of the round's clients alone, never of the number of jobs.
    """
    order = sorted(clients, key=lambda name: (-steps[name], -sizes[name], name))
    return [order[begin : begin + largest] for begin in range(0, len(order), largest)]


def step_bytes(network: Network, mfcc: Tensor, batch_size: int) -> int:
    """The memory that one client's step keeps for its gradient, in bytes.

    Args:
        network: for one client.
        mfcc: one clip, (1, frames, coefficients).
        batch_size: clips of a step.
    """
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        network(mfcc[None].expand(1, 2, *mfcc.shape[1:]))
    return sum(kept.values()) * batch_size // 2
