"""Simulation of FMP's algorithm 1 in memory, for all clients; see `fedtools.methods.fmp`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedtools.lm.reweighting import Lists
from fedtools.methods.fmp import FMP, ClientState, Evidence

if TYPE_CHECKING:
    from fedtools.privacy.releases import Releases


@dataclass(frozen=True)
class Control:
    """Changes to algorithm 1 for control experiments; not available with privacy.

    Attributes:
        evidence: what clients count instead of equation 3.
        stand_ins: client -> the client whose counts, as of the start of the round, are used to
            rescore it instead of its own.
        everybody: (V,), used instead of q_bar in all rounds.
    """

    evidence: Evidence | None = None
    stand_ins: Mapping[str, str] | None = None
    everybody: np.ndarray | None = None


PLAIN = Control()


def simulate(
    method: FMP,
    lists: Lists,
    groups: Mapping[str, Sequence[slice]],
    releases: Releases | None = None,
    sampled: Callable[[int], Collection[str]] | None = None,
    control: Control = PLAIN,
) -> tuple[np.ndarray, np.ndarray]:
    """Run algorithm 1 in memory.

    Args:
        method: the method and its options.
        lists: the N-best lists of all clients.
        groups: the utterances of each client, in T + 1 groups, the last of which is not sent;
            clients are in C order.
        releases: bounds and noise, with the plan of `method` and T rounds.
        sampled: function from a round, counted from 1, to its clients; by default all take part.
        control: changes to algorithm 1.

    Returns:
        The best hypothesis of each utterance, (utterances,), by its index among all hypotheses; and
        the counts that the server has sent in each round and after the last, (T + 1, V).
    """
    best, counts = simulate_draws(method, lists, groups, [releases], sampled, control)
    return best[0], counts[0]


def simulate_draws(
    method: FMP,
    lists: Lists,
    groups: Mapping[str, Sequence[slice]],
    draws: Sequence[Releases | None],
    sampled: Callable[[int], Collection[str]] | None = None,
    control: Control = PLAIN,
) -> tuple[np.ndarray, np.ndarray]:
    """Run algorithm 1 for several draws of noise; clients count once for all draws.

    Args:
        method, lists, groups, sampled, control: see `simulate`.
        draws: bounds and noise, all of one plan.

    Returns:
        (draws, utterances) and (draws, T + 1, V), see `simulate`.
    """
    u, shape = lists.background, (len(draws), len(lists.rescored.utterances))
    best = np.zeros(shape, int)
    clients = [
        ClientState(name, lists, own, method, draws[0], control.evidence)
        for name, own in groups.items()
    ]
    counts = [np.zeros((len(draws), len(u)))]
    rounds, drawn = len(next(iter(groups.values()))) - 1, sampled or (lambda number: groups)
    plan = draws[0].plan if draws[0] else None
    for number in range(1, rounds + 2):
        senders = drawn(number) if number <= rounds else ()
        deviation = plan.deviation(number - 1, len(clients)) if plan else 0.0
        q_bars = [method.global_distribution(one, u, deviation) for one in counts[-1]]
        if control.everybody is not None:
            q_bars = [control.everybody] * len(q_bars)
        totals, before = np.zeros_like(counts[-1]), {}
        if control.stand_ins is not None:
            own = {client.name: client.counts.copy() for client in clients}
            before = {name: own[other] for name, other in control.stand_ins.items()}
        for client in clients:
            for heard, q_bar in zip(best, q_bars, strict=True):
                heard[client.group] = client.rescore(q_bar, before.get(client.name))
            client.count()
            if client.name in senders:
                taken = client.take()
                for total, releases in zip(totals, draws, strict=True):
                    total += method.sent(taken, client, releases)
        if senders:
            released = [
                method.release(total, number, u, releases)
                for total, releases in zip(totals, draws, strict=True)
            ]
            counts.append(
                np.array([method.aggregate(*one) for one in zip(counts[-1], released, strict=True)])
            )
        elif number <= rounds:
            counts.append(counts[-1])
    return best, np.stack(counts, axis=1)
