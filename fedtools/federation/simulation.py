"""Algorithm 1 of FMP, in memory: all clients, round after round; see `fedtools.methods.fmp`."""

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
    """What an experiment has other than algorithm 1; none of it with privacy.

    Attributes:
        evidence: what clients count in place of equation 3.
        stand_ins: client -> the client whose counts it is rescored with, as they are when the
            round begins, in place of its own.
        everybody: (V,), in place of q_bar, in all rounds.
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
    """Algorithm 1, in memory.

    Args:
        groups: the utterances of each client, T + 1 groups, the last of which is not sent; clients
            are in C order.
        releases: bounds and noise, with the plan of `method` and T rounds.
        sampled: the clients of a round, counted from 1; by default all take part in each.
        control: what is other than algorithm 1.

    Returns:
        (utterances,) the best hypothesis of each, by its number among all hypotheses; and (T + 1,
        V) the counts that the server has sent in each round and after the last.
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
    """Algorithm 1 under several draws of noise: clients count once, whatever the noise is.

    Args:
        method, lists, groups, sampled, control: as of `simulate`.
        draws: bounds and noise, of one plan.

    Returns:
        (draws, utterances) and (draws, T + 1, V), as of `simulate`.
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
