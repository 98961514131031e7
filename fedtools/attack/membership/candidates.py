"""Trials of a membership attack: utterances, models, and what the attacker has.

Clients are split in two. Some of them, at most half, are the cohort, whose models are references
for all others; utterances of clients outside the cohort serve as trials and as population, so that
no reference was trained on an utterance that it is a reference for. The utterances and models of a
trial do not depend on membership.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedtools.core.seeds import generator
from fedtools.tasks.base import Items

SAME, ANYBODY = "same speaker", "anybody"
# Upper bounds: utterances of the population, and candidates for an utterance's counterpart.
_POPULATION, _CANDIDATES = 64, 50


@dataclass(frozen=True)
class Candidates:
    """Trials of one client.

    Attributes:
        client: client whose model is attacked.
        speakers: speakers of its training data.
        pairs: `SAME` or `ANYBODY`, by the speaker of the non-member -> members, each with a
            non-member of similar length.
        population: utterances of other people that are not in trials.
        cohort: clients of other people, whose models are references.
        kin: other clients of the same speaker, whose models are references and whose speech is not
            in trials.
        own: the same speaker's utterances that are not the client's.
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
        """Return all utterances to score, each once."""
        tried = [one for pairs in self.pairs.values() for pair in pairs for one in pair]
        return list(dict.fromkeys([*tried, *self.population]))

    @property
    def nearest(self) -> Sequence[tuple[str, str]]:
        """Return the pairs of the same speaker, or if there are none, those of anybody."""
        return self.pairs.get(SAME) or self.pairs[ANYBODY]


class Draw:
    """Random choice of trials.

    Args:
        items: all utterances.
        clients: clients with valid models.
        each: the largest number of members of a client.
        references: the largest number of clients in the cohort; never more than half of all.
        seed: random seed.
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

    def candidates(self, client: str) -> Candidates | None:
        """Return the trials of one client; None if there are no members or no non-members."""
        random = generator(self._seed, "membership", client)
        mine = self._of_client[client]
        speakers = self._speakers[client]
        kin, lent = self._kin(client, speakers, random)
        members = self._once(mine, random)[: self._each]
        of_speakers = [item for one in sorted(speakers) for item in self._of_speaker[one]]
        known = {client, *kin}
        recorded = {self._items.recordings[item] for item in mine}
        same = [
            item
            for item in of_speakers
            if self._items.owners[item] not in known
            and self._items.recordings[item] not in recorded
        ]
        # Only a part of many others is considered, twice as many as needed.
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
        return Candidates(
            client,
            frozenset(speakers),
            pairs,
            [item for item in self._population if self._strange(item, known, speakers)],
            [one for one in self._cohort if not self._speakers[one] & speakers],
            kin,
            [item for item in (*same, *lent) if self._items.recordings[item] not in recorded],
        )

    def fill(self, candidates: Candidates, count: int, random: np.random.Generator) -> list[str]:
        """Return utterances that the attacker has for a client: of its speaker, then of others.

        None of them is the client's, in a trial, or in the population, at any speed.
        """
        recordings = self._items.recordings
        taken = {recordings[item] for item in candidates.items}
        own = [candidates.own[index] for index in random.permutation(len(candidates.own))]
        found = [item for item in own if recordings[item] not in taken][:count]
        for index in random.permutation(len(self._names)) if len(found) < count else ():
            item = self._names[index]
            strange = self._strange(item, {candidates.client}, candidates.speakers)
            if strange and recordings[item] not in taken:
                found.append(item)
            if len(found) == count:
                break
        return found

    def size(self, client: str) -> int:
        """Return the number of utterances that a client trains on."""
        return len(self._of_client[client])

    def _kin(
        self, client: str, speakers: set[str], random: np.random.Generator
    ) -> tuple[list[str], list[str]]:
        """Return half of the speaker's other clients, as references, and the speech they have."""
        owners = {
            self._items.owners[item] for one in speakers for item in self._of_speaker[one]
        } - {client, ""}
        found = sorted(owners & set(self._clients))
        chosen = random.permutation(len(found))[: len(found) // 2]
        kin = [found[index] for index in np.sort(chosen)]
        spoken = [item for one in kin for item in self._of_client[one]]
        return kin, [item for item in spoken if self._items.speakers[item] in speakers]

    def _strange(self, item: str, clients: Set[str], speakers: Set[str]) -> bool:
        """Return whether an item belongs to none of some clients and speakers."""
        items = self._items
        return items.owners[item] not in clients and items.speakers[item] not in speakers

    def _once(self, items: Sequence[str], random: np.random.Generator) -> list[str]:
        """Shuffle items, and keep one of each recording that occurs at several speeds."""
        shuffled = (items[index] for index in random.permutation(len(items)))
        return list({self._items.recordings[item]: item for item in shuffled}.values())

    def _matched(
        self, members: Sequence[str], others: Sequence[str], people: bool
    ) -> list[tuple[str, str]]:
        """Pair members with others of similar length; with `people`, only of the same speaker."""
        drawn = others[: _CANDIDATES * len(members)]
        if not drawn:
            return []
        sizes, people_of = self._items.sizes, self._items.speakers
        one, other = (np.log([sizes[item] for item in some]) for some in (members, drawn))
        mine, theirs = (np.array([people_of[item] for item in some]) for some in (members, drawn))
        cost = abs(one[:, None] - other)
        apart = mine[:, None] != theirs if people else np.zeros(cost.shape, bool)
        at, to = linear_sum_assignment(np.where(apart, 1e6, cost))
        return [(members[i], drawn[k]) for i, k in zip(at, to, strict=True) if not apart[i, k]]
