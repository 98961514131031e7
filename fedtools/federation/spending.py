"""What releases of several experiments cost together, of whose data they may be the same.

Copies of an experiment are one experiment: a release that both have is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedtools.federation.federation import Federation, open_federation
from fedtools.files.errors import UserError, some
from fedtools.files.tables import write_tsv
from fedtools.privacy.ledger import COLUMNS, FILE, LEVELS, Spent, together
from fedtools.privacy.record import FIXED_WARNING


class Spending(NamedTuple):
    """The ledgers of some experiments.

    Attributes:
        rows: of each experiment, rows of `fedtools.privacy.ledger`.
        total: what all cost together, for a word, an utterance and a user.
    """

    rows: list[list[dict[str, str]]]
    total: tuple[float, float, float]


def spending(paths: Sequence[str | Path]) -> Spending:
    """Count what experiments have released; warn of what cannot be counted.

    Raises:
        UserError: if one of them has no differential privacy.
    """
    federations = [_open(Path(path)) for path in paths]
    _warn(federations)
    released: dict[str, set] = {}
    for one in federations:
        released.setdefault(one.task.releases.experiment, set()).update(one.task.released())
    ledgers = {
        one.task.releases.experiment: one.task.ledger(released[one.task.releases.experiment])
        for one in federations
    }
    of = {one.task.releases.experiment: one.task.owners for one in federations}
    spent = [
        Spent(tuple(float(rows[-1][name]) for name in LEVELS), of[label])
        for label, rows in ledgers.items()
    ]
    return Spending([ledgers[one.task.releases.experiment] for one in federations], together(spent))


def write_spending(paths: Sequence[str | Path]) -> Spending:
    """The same, with each experiment's ledger written to its dp.tsv."""
    found = spending(paths)
    for path, rows in zip(paths, found.rows, strict=True):
        write_tsv(Path(path) / FILE, COLUMNS, rows)
    return found


def _open(path: Path) -> Federation:
    federation = open_federation(path)
    if getattr(federation.task, "releases", None) is None:
        remedy = "begin an experiment with method_conf.privacy"
        raise UserError("no differential privacy", path=federation.where, remedy=remedy)
    return federation


def _warn(federations: Sequence[Federation]) -> None:
    """Tell what is not counted here."""
    records = [one.task.releases.record for one in federations]
    if any(one.nonce.fixed for one in records):
        print(f"warning: {FIXED_WARNING}", file=sys.stderr)
    for one, record in zip(federations, records, strict=True):
        if not record.complete:
            path = one.experiment.path
            print(f"warning: {path}: copies are not counted: no {record.beside}", file=sys.stderr)
    others = {nonce: path for record in records for nonce, path in record.others().items()}
    others = {nonce: others[nonce] for nonce in others.keys() - {one.nonce.text for one in records}}
    if others:
        told = some(sorted(others.values()))
        print(f"warning: not counted, though of the same clients: {told}", file=sys.stderr)
