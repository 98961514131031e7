"""Total privacy loss of several experiments, which may share data.

Copies of an experiment count as one experiment, and a release in several copies as one release.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedtools.core.errors import UserError
from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation
from fedtools.privacy.ledger import COLUMNS, FILE, LEVELS, Spent, together
from fedtools.privacy.record import Row, warn_of_uncounted
from fedtools.tasks.parts import PROTECTION


class Spending(NamedTuple):
    """The ledgers of some experiments.

    Attributes:
        rows: for each experiment, its rows of `fedtools.privacy.ledger`.
        total: the total epsilons, for a word, an utterance and a user.
    """

    rows: list[list[dict[str, str]]]
    total: tuple[float, float, float]


def spending(paths: Sequence[str | Path]) -> Spending:
    """Compute the privacy loss of experiments; warn of releases that cannot be counted.

    Raises:
        UserError: if an experiment has no differential privacy.
    """
    federations = [_open(Path(path)) for path in paths]
    parts = [one.task.need(PROTECTION) for one in federations]
    records = zip(federations, parts, strict=True)
    warn_of_uncounted({one.experiment.path: part.releases.record for one, part in records})
    labels = [part.releases.experiment for part in parts]
    known = dict(zip(labels, parts, strict=True))
    released: dict[str, set[tuple[str, Row]]] = {label: set() for label in known}
    for label, part in zip(labels, parts, strict=True):
        released[label] |= part.released()
    ledgers = {label: part.ledger(released[label]) for label, part in known.items()}
    spent = []
    for label, part in known.items():
        word, utterance, user = (float(ledgers[label][-1][name]) for name in LEVELS)
        spent.append(Spent((word, utterance, user), part.owners))
    return Spending([ledgers[label] for label in labels], together(spent))


def write_spending(paths: Sequence[str | Path]) -> Spending:
    """Compute `spending`, and write each experiment's ledger to its dp.tsv."""
    found = spending(paths)
    for path, rows in zip(paths, found.rows, strict=True):
        write_tsv(Path(path) / FILE, COLUMNS, rows)
    return found


def _open(path: Path) -> Federation:
    federation = Federation(path)
    if federation.task.protection is None:
        remedy = "begin an experiment with method_conf.privacy"
        raise UserError("no differential privacy", path=federation.where, remedy=remedy)
    return federation
