"""Clients whose items are recovered from updates, and items to compare these with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from fedtools.attack.options import Inversion
from fedtools.attack.updates import NotApplicable
from fedtools.core.seeds import generator
from fedtools.tasks.base import Items

# Number of other people's items that scales are computed from.
_SCALES = 50
_LEAST = 1e-3


class People:
    """Clients of a round, and their items, each at its original speed alone.

    Args:
        items: items of the experiment.
        clients: clients who sent a model.
        options: numbers of clients to attack and of candidates to compare with.
        seed: random seed of the draws.

    Attributes:
        attacked: the clients whose items are recovered.
        speaker: client -> its speaker; the client itself if it has several speakers.

    Raises:
        NotApplicable: if no client has an item with labels, or all are of one speaker.
    """

    def __init__(self, items: Items, clients: Sequence[str], options: Inversion, seed: int):
        self._items, self._options, self._seed = items, options, seed
        self._own: dict[str, list[str]] = {}
        for name, owner in items.owners.items():
            if owner and items.recordings[name] == name:
                self._own.setdefault(owner, []).append(name)
        people = {client: {items.speakers[name] for name in own}
                  for client, own in self._own.items()}  # fmt: skip
        self.speaker = {
            client: min(own) if len(own) == 1 else client for client, own in people.items()
        }
        able = [client for client in clients if any(map(items.labels, self._own.get(client, ())))]
        if not able or len(set(self.speaker.values())) < 2:
            raise NotApplicable("fewer than two speakers have labelled items")
        order = generator(seed, "inversion", "clients").permutation(len(able))
        self.attacked = sorted(able[index] for index in order[: options.each])

    def own(self, client: str) -> list[str]:
        """Return a client's items."""
        return self._own.get(client, [])

    def shortest(self, client: str, count: int) -> list[str]:
        """Return up to `count` of a client's shortest labelled items; ties are broken at random."""
        labelled = [name for name in self.own(client) if self._items.labels(name)]
        random = generator(self._seed, "inversion", "items", client)
        order = random.permutation(len(labelled)).tolist()
        return sorted((labelled[at] for at in order), key=self._items.sizes.__getitem__)[:count]

    def others(self, name: str) -> list[str]:
        """Return candidates of other speakers: with an item's labels, or of similar length."""
        items, labels = self._items, self._labels
        own = items.speakers[name], items.owners[name]
        rest = [one for one in labels if own[0] != items.speakers[one] != "" != items.owners[one]
                and items.owners[one] != own[1]]  # fmt: skip
        rest = [one for one in rest if labels[one] == labels[name]] or rest
        if not rest:
            raise NotApplicable("nobody else has an item to compare with")
        random = generator(self._seed, "inversion", "others", name)
        order = [rest[index] for index in random.permutation(len(rest))]
        size = items.sizes[name]
        return sorted(order, key=lambda one: abs(items.sizes[one] - size))[
            : self._options.candidates - 1
        ]

    def scales(self, client: str) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and deviation of frames of other speakers' items, (values,) each."""
        rest = [name for name in self._labels
                if self._items.speakers[name] != self.speaker[client]
                and self._items.owners[name] != client]  # fmt: skip
        random = generator(self._seed, "inversion", "scales", client)
        some = [rest[index] for index in random.permutation(len(rest))[:_SCALES]]
        frames = np.concatenate([self._items.audio(name) for name in some])
        return frames.mean(0), frames.std(0).clip(_LEAST)

    def most_common(self) -> float:
        """Return the share of all items that have the most common labels."""
        counts = Counter(self._labels.values())
        return counts.most_common(1)[0][1] / counts.total()

    @cached_property
    def _labels(self) -> dict[str, tuple[int, ...]]:
        every = [name for own in self._own.values() for name in own]
        return {name: tuple(self._items.labels(name)) for name in every}
