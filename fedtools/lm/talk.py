"""Clients who talk: what each says in which round, counts of it, and all of them in memory.

Z. Liu, F. Peng, "Federated marginal personalization for ASR rescoring", ICASSP 2022, algorithm 1
and section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from fedtools.lm.reweighting import Adaptation, Lists, rescore_group
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.options import INCREMENTS, PAPER
from fedtools.privacy.releases import Releases


def groups_of(
    utterances: slice, rounds: int, begins: np.ndarray | None = None, span: float | None = None
) -> list[slice]:
    """A client's utterances, in the order in which they were said, in rounds + 1 groups.

    Args:
        utterances: a run of them.
        rounds: T.
        begins: (utterances of all,) when each begins, seconds; of use with `span` alone.
        span: seconds, of which groups are equal parts; what begins later is in the last group. It
            must be known without the data, so that no utterance decides another one's group.
            None makes groups of equal numbers, section 3.2.
    """
    if span is not None:
        edges = span * np.arange(1, rounds + 1) / (rounds + 1)
        found = np.searchsorted(begins[utterances], edges, "left")
        edges = utterances.start + np.array([0, *found, utterances.stop - utterances.start])
    else:
        count = utterances.stop - utterances.start
        sizes = [len(part) for part in np.array_split(np.empty(count), rounds + 1)]
        edges = utterances.start + np.concatenate([[0], np.cumsum(sizes)])
    return [slice(int(at), int(to)) for at, to in pairwise(edges)]


class Talk:
    """A client in one round: what it has said so far, and what it is about to rescore.

    Args:
        client: its name.
        lists: those of all clients.
        groups: the client's utterances, a group for each round and one more.
        number: the round, from 1.
        sent: the rounds before this one whose counts the client has sent.
        options: of the adaptation.
        releases: bounds and noise, or None.
    """

    def __init__(
        self,
        client: str,
        lists: Lists,
        groups: Sequence[slice],
        number: int,
        sent: Sequence[int],
        options: Adaptation,
        releases: Releases | None,
    ):
        self.client, self._lists, self._groups, self._number = client, lists, groups, number
        self._sent, self._options, self._releases = sent, options, releases

    @property
    def group(self) -> slice:
        """The utterances of the round."""
        return self._groups[self._number - 1]

    def counts(self, since_sent: bool = False) -> np.ndarray:
        """(V,) of all that was said by the end of the round, or since counts were sent last.

        With differential privacy each part is bounded when it is first sent, and noise is added if
        the server is not trusted.
        """
        if self._releases is None:
            first = max(self._sent, default=0) if since_sent else 0
            return self._count(first, self._number)
        total, spent = np.zeros_like(self._lists.background), 0
        for part in self.parts():
            new, spent = self._releases.plan.bound(self._said(part), spent)
            total = new if since_sent else total + new
        return self._releases.by_client(total, self._number, self.client)

    @property
    def new(self) -> Utterances:
        """By utterance, what no round before has had."""
        return self._said(self.parts()[-1])

    def parts(self) -> list[slice]:
        """What was new each time that the client sent something, and what is in this round."""
        edges = [0, *self._sent, self._number]
        return [
            slice(self._groups[first].start, self._groups[last - 1].stop)
            for first, last in pairwise(edges)
        ]

    @property
    def before(self) -> np.ndarray:
        """(V,) counts of all that was said before the round, which stay at the client."""
        return self._count(0, self._number - 1)

    def rescore(self, everybody: np.ndarray) -> np.ndarray:
        """The best hypotheses of the round's utterances; `everybody` is what the server sent."""
        own = self.before
        marginal = self._releases is not None and self._releases.plan.options.mechanism == PAPER
        shared = self._lists.shared(everybody, self._options.smoothing, marginal)
        return rescore_group(self._lists, self.group, shared, own, self._options)[0]

    def _said(self, part: slice) -> Utterances:
        return self._lists.said(part, self._options.sigma)

    def _count(self, first: int, last: int) -> np.ndarray:
        if first == last:
            return np.zeros_like(self._lists.background)
        said = slice(self._groups[first].start, self._groups[last - 1].stop)
        return self._lists.counts(said, self._options.sigma)


def simulate(
    lists: Lists,
    groups: Mapping[str, Sequence[slice]],
    options: Adaptation,
    releases: Releases | None = None,
) -> np.ndarray:
    """Algorithm 1 in memory, all clients taking part in every round.

    Args:
        groups: the utterances of each client, T + 1 groups, the last of which is not sent.
        releases: bounds and noise.

    Returns:
        (utterances,) the best hypothesis of each, by its number among all hypotheses.
    """
    zero = np.zeros_like(lists.background)
    own, spent = dict.fromkeys(groups, zero), dict.fromkeys(groups, 0)
    bounded = dict.fromkeys(groups, zero)
    everybody = zero
    best = np.zeros(len(lists.rescored.utterances), int)
    plan = releases.plan if releases else None
    increments = plan is not None and plan.options.release == INCREMENTS
    marginal = plan is not None and plan.options.mechanism == PAPER
    last = len(next(iter(groups.values()))) - 1
    for number in range(last + 1):
        shared = lists.shared(everybody, options.smoothing, marginal)
        total = zero
        for client, parts in groups.items():
            part = parts[number]
            best[part], counts = rescore_group(lists, part, shared, own[client], options)
            own[client] = own[client] + counts
            if number == last:
                continue
            if plan is None:
                total = total + own[client]
                continue
            new, spent[client] = plan.bound(lists.said(part, options.sigma), spent[client])
            bounded[client] = new if increments else bounded[client] + new
            total = total + releases.by_client(bounded[client], number + 1, client)
        if releases is not None and number < last:
            total = releases.by_server(total, number + 1, lists.background, options.smoothing)
        everybody = everybody + total if increments else total
    return best
