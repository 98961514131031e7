"""The trials of a membership attack: whose utterances, whose models, and what the attacker has.

Clients are cut in two. Some of them, at most half, are the cohort, whose models are references of
all others; what is said by clients outside of it serves as trials and as population, so that no
reference was trained on what it is a reference for. What a client is tried with, and by which
models, does not depend on what is a member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedtools.files.seeds import generator
from fedtools.tasks.base import Items

SAME, ANYBODY = "same speaker", "anybody"
# Utterances of the population, and candidates for an utterance's counterpart, at most.
_POPULATION, _CANDIDATES = 64, 50


@dataclass(frozen=True)
class Trials:
    """Of one client.

    Attributes:
        client: whose model is attacked.
        speakers: of its training data.
        pairs: by whose the other is, `SAME` or `ANYBODY`: members, each with an utterance of like
            length that is none.
        population: utterances of other people, which are no trials.
        cohort: other people's models.
        kin: models of the same speaker's other clients, whose speech is in no trial.
        own: the same speaker's speech that is not the client's.
    """

    client: str
    speakers: frozenset[str]
    pairs: Mapping[str, Sequence[tuple[str, str]]]
    population: Sequence[str]
    cohort: Sequence[str]
    kin: Sequence[str]
    own: Sequence[str]

    @property
    def items(self) -> list[str]:
        """Everything that is scored, once."""
        tried = [one for pairs in self.pairs.values() for pair in pairs for one in pair]
        return list(dict.fromkeys([*tried, *self.population]))

    @property
    def nearest(self) -> Sequence[tuple[str, str]]:
        """The pairs of the same speaker where there are some, and otherwise those of anybody."""
        return self.pairs.get(SAME) or self.pairs[ANYBODY]


class Draw:
    """How trials are drawn.

    Args:
        items: all utterances.
        clients: those whose models can be looked at.
        each: members of a client, at most.
        references: clients of the cohort, at most; never more than half of all.
        seed: of everything random.
    """

    def __init__(self, items: Items, clients: Sequence[str], each: int, references: int, seed: int):
        self._items, self._each, self._seed = items, each, seed
        self._clients = sorted(clients)
        self._names = list(items.owners)
        self._of_client, self._of_speaker = defaultdict(list), defaultdict(list)
        self._speakers = defaultdict(set)
        for item, owner in items.owners.items():
            speaker = items.speakers[item]
            self._of_client[owner].append(item)
            self._of_speaker[speaker].append(item)
            self._speakers[owner].add(speaker)
        order = generator(seed, "membership", "cohort").permutation(len(self._clients))
        chosen = order[: min(references, len(order) // 2)]
        self._cohort = [self._clients[index] for index in np.sort(chosen)]
        outside = [
            item for item, owner in items.owners.items() if owner and owner not in self._cohort
        ]
        shuffled = generator(seed, "membership", "population").permutation(len(outside))
        cut = min(_POPULATION, len(outside) // 2)
        self._population, self._others = (
            [outside[index] for index in part] for part in (shuffled[:cut], shuffled[cut:])
        )

    def trials(self, client: str) -> Trials | None:
        """Those of one client; None if it has no members, or there are no others."""
        random = generator(self._seed, "membership", client)
        mine = self._of_client[client]
        speakers = self._speakers[client]
        kin, lent = self._kin(client, speakers, random)
        members = self._once(mine, random)[: self._each]
        of_speakers = [item for one in sorted(speakers) for item in self._of_speaker[one]]
        known = {client, *kin}
        said = {self._items.recordings[item] for item in mine}
        same = [
            item
            for item in of_speakers
            if self._items.owners[item] not in known and self._items.recordings[item] not in said
        ]
        # Of many others a part is looked at, twice as many as are wanted.
        few = random.permutation(len(self._others))[: 2 * _CANDIDATES * self._each]
        drawn = [self._others[index] for index in few]
        others = [item for item in drawn if self._strange(item, known, speakers)]
        found = {
            SAME: self._matched(members, self._once(same, random), people=True),
            ANYBODY: self._matched(members, self._once(others, random), people=False),
        }
        pairs = {kind: some for kind, some in found.items() if some}
        if not pairs:
            return None
        return Trials(
            client,
            frozenset(speakers),
            pairs,
            [item for item in self._population if self._strange(item, known, speakers)],
            [one for one in self._cohort if not self._speakers[one] & speakers],
            kin,
            [item for item in (*same, *lent) if self._items.recordings[item] not in said],
        )

    def fill(self, trials: Trials, count: int, random: np.random.Generator) -> list[str]:
        """Utterances that the attacker has for a client: of its speaker, then of other people.

        None of them is the client's, in a trial, or in the population; at no speed.
        """
        recordings = self._items.recordings
        taken = {recordings[item] for item in trials.items}
        own = [trials.own[index] for index in random.permutation(len(trials.own))]
        found = [item for item in own if recordings[item] not in taken][:count]
        for index in random.permutation(len(self._names)) if len(found) < count else ():
            item = self._names[index]
            strange = self._strange(item, {trials.client}, trials.speakers)
            if strange and recordings[item] not in taken:
                found.append(item)
            if len(found) == count:
                break
        return found

    def size(self, client: str) -> int:
        """How many utterances a client trains on."""
        return len(self._of_client[client])

    def _kin(
        self, client: str, speakers: set[str], random: np.random.Generator
    ) -> tuple[list[str], list[str]]:
        """Of the speaker's other clients the half whose models are references; what they said."""
        owners = {
            self._items.owners[item] for one in speakers for item in self._of_speaker[one]
        } - {client, ""}
        found = sorted(owners & set(self._clients))
        chosen = random.permutation(len(found))[: len(found) // 2]
        kin = [found[index] for index in np.sort(chosen)]
        said = [item for one in kin for item in self._of_client[one]]
        return kin, [item for item in said if self._items.speakers[item] in speakers]

    def _strange(self, item: str, clients: Set[str], speakers: Set[str]) -> bool:
        """Whether it is neither some clients' nor some speakers'."""
        items = self._items
        return items.owners[item] not in clients and items.speakers[item] not in speakers

    def _once(self, items: Sequence[str], random: np.random.Generator) -> list[str]:
        """In any order; of a recording that is there at several speeds, one."""
        shuffled = (items[index] for index in random.permutation(len(items)))
        return list({self._items.recordings[item]: item for item in shuffled}.values())

    def _matched(
        self, members: Sequence[str], others: Sequence[str], people: bool
    ) -> list[tuple[str, str]]:
        """Members, each with an utterance of like length, of the same of several `people`."""
        drawn = others[: _CANDIDATES * len(members)]
        if not drawn:
            return []
        sizes, people_of = self._items.sizes, self._items.speakers
        one, other = (np.log([sizes[item] for item in some]) for some in (members, drawn))
        who, whom = (np.array([people_of[item] for item in some]) for some in (members, drawn))
        cost = abs(one[:, None] - other)
        apart = who[:, None] != whom if people else np.zeros(cost.shape, bool)
        at, to = linear_sum_assignment(np.where(apart, 1e6, cost))
        return [(members[i], drawn[k]) for i, k in zip(at, to, strict=True) if not apart[i, k]]
