"""Total privacy loss of experiments with user-level privacy, which may share clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedtools.core.errors import UserError
from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation
from fedtools.federation.user_privacy import UserProtection
from fedtools.privacy.ledger import FILE
from fedtools.privacy.record import Row, warn_of_uncounted
from fedtools.privacy.user_ledger import COLUMNS, Spent, ledger_rows, worst
from fedtools.tasks.parts import SPEAKERS

CLIENT, SPEAKER = "client", "speaker"


class UserSpending(NamedTuple):
    """The ledgers of some experiments, and what the client that loses most has lost in all of them.

    Attributes:
        rows: for each experiment, its rows of `fedtools.privacy.user_ledger`.
        spent, inside: epsilon for who sees what is released, and for who also sees who took part.
        delta: the probability with which a loss may exceed epsilon.
    """

    rows: list[list[dict[str, str]]]
    spent: float
    inside: float
    delta: float


def write_user_spending(paths: Sequence[Path]) -> UserSpending:
    """Compute the privacy loss of experiments, and write each one's ledger to its dp.tsv.

    Copies of an experiment count as one experiment, and a release in several copies as one release.

    Raises:
        UserError: if an experiment has no user-level privacy.
    """
    federations = [Federation(path) for path in paths]
    found = [_protection(one) for one in federations]
    warn_of_uncounted({path: one.releases.record for path, one in zip(paths, found, strict=True)})
    released: dict[str, set[Row]] = {}
    for one in found:
        released.setdefault(one.releases.label, set()).update(one.releases.released())
    spent: dict[str, Spent] = {}
    rows = []
    for path, federation, one in zip(paths, federations, found, strict=True):
        plan, label = one.releases.plan, one.releases.label
        rows.append(ledger_rows(plan, released[label], unit_of(federation)))
        write_tsv(path / FILE, COLUMNS, rows[-1])
        clients = frozenset(federation.experiment.clients)
        spent[label] = Spent(plan, frozenset(released[label]), clients)
    each, delta = list(spent.values()), max(one.plan.delta for one in spent.values())
    return UserSpending(rows, worst(each, delta), worst(each, delta, sampled=False), delta)


def unit_of(federation: Federation) -> str:
    """Return what a client is: a speaker, if each is one speaker and no two are the same one."""
    known = SPEAKERS.of(federation.task)
    # Packed clips have no table of speakers that could show it, and sites tell of none.
    if known is None or "train" not in federation.experiment.options.data:
        return CLIENT
    if not (federation.task.data_path("train") / "utt2spk").exists():
        return CLIENT
    speakers, clients = known(), federation.experiment.clients
    alone = len(speakers) == len(clients) == len(set(speakers.values()))
    return SPEAKER if alone else CLIENT


def _protection(federation: Federation) -> UserProtection:
    found = federation.protection
    if not isinstance(found, UserProtection):
        problem = "no user-level privacy, as other experiments of this command have"
        remedy = "give experiments of one kind of privacy at a time"
        raise UserError(problem, path=federation.where, remedy=remedy)
    return found
