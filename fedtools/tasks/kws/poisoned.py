"""What attackers of keyword spotting train on: clips with other labels, or with a trigger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedtools.audio.augment import Plan
from fedtools.client.attackers.options import Attackers
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.tasks.kws.clips import ClipFeatures
from fedtools.tasks.kws.stacks import ClipSource, Data


class FlippedClips:
    """Clips whose labels are another class: each class becomes the next one, the last the first.

    V. Tolpegin, S. Truex, M. Gursoy, L. Liu: Data poisoning attacks against federated learning
    systems, ESORICS 2020, with a derangement of all classes.
    """

    def __init__(self, data: Data):
        self.clips, self._data = data.clips, data

    def batch(
        self, rows: Sequence[slice], plans: Sequence[Plan], step: int, width: int = 0
    ) -> ClipBatch:
        """Return a batch with flipped labels; arguments as in `ClipFeatures.batch`."""
        found = self._data.batch(rows, plans, step, width)
        return replace(found, labels=(found.labels + 1) % len(self.clips.classes))


class BackdoorClips:
    """Clips of which a share of each batch has the trigger, and the target as label.

    T. Gu, B. Dolan-Gavitt, S. Garg: BadNets, IEEE Access 2019; the mix in every batch is that of E.
    Bagdasaryan et al.: How to backdoor federated learning, AISTATS 2020. As batches are drawn at
    random, their first clips are no others than the rest.

    Args:
        data: the clips without the trigger.
        names: the clients whose batches are asked for, in this order.
        options: target, trigger and share.
        attackers: all attackers, in C order; what is cached of them is common to all units.
    """

    def __init__(
        self, data: ClipFeatures, names: Sequence[str], options: Attackers, attackers: Sequence[str]
    ):
        self.clips, self._data, self._share = data.clips, data, options.poisoned
        target = data.clips.classes.index(options.target)
        self._triggered = data.triggered(attackers, options.tone, target)
        self._rows = [self._triggered.clips.rows(name) for name in names]

    def batch(
        self, rows: Sequence[slice], plans: Sequence[Plan], step: int, width: int = 0
    ) -> ClipBatch:
        """Return a batch with some triggers; arguments as in `ClipFeatures.batch`."""
        clean = self._data.batch(rows, plans, step, width)
        other = self._triggered.batch(self._rows[: len(rows)], plans, step, width)
        sizes = torch.tensor([one.clips.shape[1] for one in plans], dtype=torch.float64)
        counts = torch.floor(self._share * sizes + 0.5)
        chosen = (torch.arange(clean.labels.shape[1]) < counts[:, None]).to(clean.labels.device)
        return replace(
            clean,
            mfcc=torch.where(chosen[..., None, None], other.mfcc, clean.mfcc),
            labels=torch.where(chosen, other.labels, clean.labels),
        )


def poisoned(source: ClipSource, options: Attackers, attackers: Sequence[str]) -> ClipSource:
    """Return the clips that attackers train on in place of those of a source of them."""

    def made(data: Data, names: Sequence[str]) -> Data:
        if not options.has_backdoor:
            return FlippedClips(data)
        assert isinstance(data, ClipFeatures)
        return BackdoorClips(data, names, options, attackers)

    return source.on(made)


def check_poison(options: Attackers, classes: Sequence[str], samples: int) -> None:
    """Raise a ValueError if clips of these classes and this length cannot have the backdoor."""
    if options.has_backdoor:
        if options.target not in classes:
            raise ValueError(f"target: {options.target} is no class of the clips")
        options.tone.wave(samples)
