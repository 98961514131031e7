"""The ledger of user-level privacy: the releases of an experiment, and what a client has lost.

    dp.tsv    release  unit  adjacency  clients  taking_part  clip  noise  delta  epsilon  spent
              spent_inside  spent_by_two  accountant

It has a row for each release and a row `total`; a release repeated after a reset is named `2.2`,
the second draw of round 2. `epsilon` is that of the release alone, and `spent` of all so far, both
for who sees only what is released. `spent_inside` is for who also sees, in the experiment's folder,
which clients took part: a secret sample protects nobody from them. The last row also has what a
person loses who is two of the clients.

Experiments on the same clients add up, such as three seeds or the trials of a tuning, and so do the
draws of a release: all of them are releases of one mechanism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from fedtools.privacy.accountant import Gaussian, epsilon_of
from fedtools.privacy.record import Row
from fedtools.privacy.user_plan import UserPlan

COLUMNS = (
    *(
        "release",
        "unit",
        "adjacency",
        "clients",
        "taking_part",
        "clip",
        "noise",
        "delta",
        "epsilon",
    ),
    *("spent", "spent_inside", "spent_by_two", "accountant"),
)
TOTAL = "total"
ADJACENCY = "one client's data are empty"


class Spent(NamedTuple):
    """An experiment's releases, and whose data they are of.

    Attributes:
        plan: of its noise.
        releases: its releases so far.
        clients: the names of its clients.
    """

    plan: UserPlan
    releases: frozenset[Row]
    clients: frozenset[str]


def ledger_rows(plan: UserPlan, released: Iterable[Row], unit: str) -> list[dict[str, str]]:
    """Compute the rows of the ledger; see the module docstring.

    Args:
        plan: the plan of the experiment.
        released: its releases.
        unit: what a client is, such as "client" or "speaker".
    """
    common = {
        "unit": unit,
        "adjacency": ADJACENCY,
        "clients": str(plan.clients),
        "taking_part": plan.taking_part,
        "clip": f"{plan.clip:.6g}",
        "noise": f"{plan.noise / plan.simulated_users:.6g}",
        "delta": f"{plan.delta:.6g}",
        "spent_by_two": "-",
        "accountant": plan.accountant,
    }
    rows = []
    order = sorted(released, key=lambda row: (row.draw, row.number))
    for at, row in enumerate(order, 1):
        name = f"{row.number}.{row.draw}" if row.draw > 1 else str(row.number)
        alone = _epsilon([plan.spent([Row(1, 1, "")])], plan.delta)
        rows.append({"release": name, **common, "epsilon": alone, **_spent(plan, order[:at])})
    total = {"release": TOTAL, **common, "epsilon": "-", **_spent(plan, order)}
    both = plan.spent(order)
    person = replace(both, clients=2) if both else None
    total["spent_by_two"] = _epsilon([person] if order else [], plan.delta)
    return [{name: row[name] for name in COLUMNS} for row in (*rows, total)]


def _spent(plan: UserPlan, released: Sequence[Row]) -> dict[str, str]:
    """Return what some releases have spent together, 0 if they are none."""
    found = {"spent": plan.spent(released), "spent_inside": plan.spent(released, sampled=False)}
    return {name: _epsilon([one] if released else [], plan.delta) for name, one in found.items()}


def _epsilon(mechanisms: Sequence[Gaussian | None], delta: float) -> str:
    return f"{together(mechanisms, delta):.6g}"


def together(mechanisms: Sequence[Gaussian | None], delta: float) -> float:
    """Return the epsilon of mechanisms together; inf if one has no noise, and so is None."""
    known = [one for one in mechanisms if one is not None]
    if len(known) < len(mechanisms):
        return inf
    return epsilon_of(known, delta) if known else 0.0


def worst(experiments: Sequence[Spent], delta: float, sampled: bool = True) -> float:
    """Return the epsilon, over all experiments, of the client that loses most.

    Args:
        experiments: experiments; each client loses by those that it is in.
        delta: probability with which the loss may exceed epsilon.
        sampled: see `UserPlan.spent`.
    """
    held: dict[str, list[int]] = {}
    for at, one in enumerate(experiments):
        for client in one.clients if one.releases else ():
            held.setdefault(client, []).append(at)
    found = 0.0
    for places in {tuple(one) for one in held.values()}:
        parts = [experiments[at] for at in places]
        spent = [one.plan.spent(one.releases, sampled) for one in parts]
        found = max(found, together(spent, delta))
    return found
