"""A round's attackers: who they are, which job trains them, and what they send.

They know their own honest changes, and no other client's, so that one job trains all of a round.
The server's half knows nothing of them: their messages are like others', and `aggregate` only marks
their rows of the ledger, for the experimenter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from fedtools.client.attackers.adaptive import adaptive
from fedtools.client.attackers.minmax import direction_of, minmax
from fedtools.client.attackers.options import (
    SECTION,
    Attack,
    Attackers,
    draw_attackers,
    read_attackers,
)
from fedtools.client.attackers.updates import boosted, inner_product, sign_flip
from fedtools.core.errors import UserError
from fedtools.exchange.options import Options
from fedtools.exchange.states import as_array
from fedtools.federation.federation import Federation, Sent
from fedtools.methods.base import SHARED, Method
from fedtools.server.simulated_rule import simulated
from fedtools.tasks import facts_of
from fedtools.tasks.base import task_of
from fedtools.tasks.parts import POISON


class Train(Protocol):
    """Trains a unit, on its own data or on poisoned ones."""

    def __call__(
        self, federation: Federation, unit: Sequence[str], number: int, poisoned: bool = False
    ) -> Sent: ...


def attackers_of(
    options: Options,
    method: Method,
    where: str | Path,
    clients: Sequence[str],
    sites: Mapping[str, str],
) -> list[str]:
    """Return the attackers of a new experiment; [] without the section.

    Raises:
        UserError: if the section is wrong, or the experiment's clients cannot be such attackers.
    """
    found = read_attackers(options.attackers, where)
    if found is None:
        return []
    if problem := _problem(found, options, method, where, sites):
        raise UserError(f"{SECTION}: {problem}", path=where)
    return draw_attackers(clients, found.share, options.seed)


def _problem(
    found: Attackers, options: Options, method: Method, where: str | Path, sites: Mapping[str, str]
) -> str:
    """Return why an experiment cannot have these attackers; "" if it can."""
    task, title = facts_of(options.task, where), method.title
    if not method.federated:
        return f"{title} has no clients that could attack"
    if sites:
        return "they are simulated in one place, and cannot be of sites; leave --sites out"
    if method.user_privacy:
        return f"clients of {title} send clipped changes, which cannot be attacked yet"
    phases = [method.phase(number) for number in range(1, options.rounds + 1)]
    if any(phase.client_update and phase.sends != SHARED for phase in phases):
        return f"clients of {title} send more than the shared tensors, which cannot be attacked yet"
    if found.trains_poisoned and not hasattr(task_of(task), POISON.name):
        what = "kind label_flip" if found.kind == "label_flip" else "a backdoor"
        return f"{what} is for task kws, not for {options.task}"
    return ""


def deal_units(
    federation: Federation, sampled: Sequence[str], number: int, jobs: int
) -> list[list[list[str]]]:
    """Return the training units of each job, those of all attackers in the first."""
    attack = federation.attack
    assert attack is not None
    ours, others = attack.split(sampled)
    found: list[list[list[str]]] = [[] for _ in range(jobs)]
    if ours:
        found[0] = federation.task.units(ours, number)
    options = attack.options
    loads = [len(ours) * (options.trains_honestly + options.trains_poisoned), *[0] * (jobs - 1)]
    for unit in federation.task.units(others, number) if others else ():
        job = loads.index(min(loads))
        found[job].append(unit)
        loads[job] += len(unit)
    return found


def attackers_units(
    attack: Attack | None, units: Sequence[Sequence[str]]
) -> tuple[list[Sequence[str]], list[Sequence[str]]]:
    """Return the units of attackers among those of a job, and the others."""
    known = set(attack.clients) if attack else set()
    ours = [unit for unit in units if unit[0] in known]
    return ours, [unit for unit in units if unit[0] not in known]


@dataclass(frozen=True)
class _Trained:
    """A unit of attackers after training.

    Attributes:
        sent: what it would send, if nobody changed it.
        changes: the changes that it has trained, (K, D), on its own data and on poisoned ones;
            None for data on which it does not train.
    """

    sent: Sent
    honest: np.ndarray | None
    poisoned: np.ndarray | None


def attacked(
    federation: Federation, units: Sequence[Sequence[str]], number: int, train: Train
) -> Iterator[Sent]:
    """Train all attackers of a round, and yield what each unit sends.

    Only values that training changes are attacked: of BatchNorm's statistics, a negative variance
    would be refused at once.
    """
    attack, states = federation.attack, federation.states
    if not units or attack is None:
        return
    start = states.start(number)
    names = [name for name in states.shared_spec if name in states.parameters]
    before = flat({name: start[name][None] for name in names})
    trained = [_train(federation, unit, number, train, before, names) for unit in units]
    if not attack.options.crafts or not names:
        yield from (one.sent for one in trained)
        return
    # In C order, whatever units and jobs are.
    usable = sorted(r.client for one in trained for r in one.sent.reports if not r.reason)
    first = states.start(1) if attack.options.kind == "replacement" else start
    first = flat({name: first[name][None] for name in names}) - before
    rows = dict(zip(usable, _crafted(federation, trained, usable, number, first), strict=True))
    for one in trained:
        clients = [report.client for report in one.sent.reports]
        nothing = np.zeros(before.shape[1])
        models = before + np.stack([rows.get(client, nothing) for client in clients])
        with np.errstate(over="ignore"):
            made = _apart(models, {name: states.shared_spec[name] for name in names})
        yield replace(one.sent, tensors={**(one.sent.tensors or {}), **made})


def _train(
    federation: Federation,
    unit: Sequence[str],
    number: int,
    train: Train,
    before: np.ndarray,
    names: Sequence[str],
) -> _Trained:
    """Train a unit of attackers on all data that their attack needs."""
    assert federation.attack is not None
    options, found = federation.attack.options, dict[bool, Sent]()
    wanted = (options.trains_honestly, options.trains_poisoned)
    for poisoned in (one for one, needed in zip((False, True), wanted, strict=True) if needed):
        sent = train(federation, unit, number, poisoned)
        assert sent.tensors is not None
        # The next training is in the same memory.
        own = {name: np.array(as_array(name, one)) for name, one in sent.tensors.items()}
        found[poisoned] = replace(sent, tensors=own)
    changes = {
        poisoned: flat({name: (sent.tensors or {})[name] for name in names}) - before
        for poisoned, sent in found.items()
    }
    first, *more = found.values()
    reports = [
        report._replace(
            reason=report.reason or "".join(other.reports[row].reason for other in more),
            seconds=report.seconds + sum(other.reports[row].seconds for other in more),
        )
        for row, report in enumerate(first.reports)
    ]
    return _Trained(replace(first, reports=reports), changes.get(False), changes.get(True))


def _crafted(
    federation: Federation,
    trained: Sequence[_Trained],
    usable: Sequence[str],
    number: int,
    first: np.ndarray,
) -> np.ndarray:
    """Return the changes that attackers send, (m, D), in the order of their names.

    Args:
        first: the change to the state of the first round, (1, D).
    """
    assert federation.attack is not None
    options = federation.attack.options
    if not usable:
        return np.zeros((0, first.shape[1]))
    clients = [report.client for one in trained for report in one.sent.reports]
    order = [clients.index(client) for client in usable]
    honest, poisoned = (
        np.concatenate(parts)[order] if parts else np.zeros((0, 0))
        for parts in (
            [one.honest for one in trained if one.honest is not None],
            [one.poisoned for one in trained if one.poisoned is not None],
        )
    )
    sampled = len(federation.experiment.round(number).sampled())
    if options.kind == "sign_flip":
        return sign_flip(honest, options.factor)
    if options.kind == "ipm":
        return inner_product(honest, options.epsilon)
    if options.kind == "backdoor":
        return boosted(poisoned, options.boost or 1.0)
    if options.kind == "replacement":
        towards = poisoned if options.has_backdoor else np.tile(first, (len(usable), 1))
        return boosted(towards, options.boost or sampled / len(usable))
    aim = poisoned.mean(0) if options.has_backdoor else None
    direction = direction_of(honest, options.direction) if aim is None else aim - honest.mean(0)
    if options.kind == "minmax":
        return minmax(honest, direction)
    ratio = federation.method.max_norm_ratio
    rule = simulated(federation.method.rule)
    return adaptive(honest, direction, rule, sampled, ratio, aim)


def flat(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the tensors (K, ...) of K clients end to end: float64 (K, D)."""
    rows = [one.reshape(len(one), -1).astype(np.float64) for one in tensors.values()]
    return np.concatenate(rows, axis=1) if rows else np.zeros((1, 0))


def _apart(
    rows: np.ndarray, spec: Mapping[str, tuple[tuple[int, ...], str]]
) -> dict[str, np.ndarray]:
    """Return the tensors (K, ...) of a spec that `flat` has put end to end."""
    found, place = {}, 0
    for name, (shape, kind) in spec.items():
        size = int(np.prod(shape))
        part = rows[:, place : place + size]
        found[name] = part.reshape(len(rows), *shape).astype(kind)
        place += size
    return found
