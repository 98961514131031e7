"""What releases of several experiments cost together, of whose data they may be the same.

Copies of an experiment are one experiment: a release that both have is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedtools.federation.federation import Federation
from fedtools.files.errors import UserError, some
from fedtools.files.tables import write_tsv
from fedtools.privacy.ledger import COLUMNS, FILE, LEVELS, Spent, together
from fedtools.privacy.record import FIXED_WARNING, Row
from fedtools.tasks.parts import PROTECTION


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
    parts = [one.task.need(PROTECTION) for one in federations]
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
    """The same, with each experiment's ledger written to its dp.tsv."""
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


def _warn(federations: Sequence[Federation]) -> None:
    """Tell what is not counted here."""
    records = [one.task.need(PROTECTION).releases.record for one in federations]
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
