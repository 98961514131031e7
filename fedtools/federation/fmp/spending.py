"""Total privacy loss of several experiments, which may share data.

Copies of an experiment count as one experiment, and a release in several copies as one release.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedtools.core.errors import UserError, some
from fedtools.core.tables import write_tsv
from fedtools.federation.federation import Federation
from fedtools.privacy.ledger import COLUMNS, FILE, LEVELS, Spent, together
from fedtools.privacy.record import FIXED_WARNING, Row
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


def _warn(federations: Sequence[Federation]) -> None:
    """Warn of releases that are not counted here."""
    records = [one.task.need(PROTECTION).releases.record for one in federations]
    if any(one.nonce.fixed for one in records):
        print(f"warning: {FIXED_WARNING}", file=sys.stderr)
    for one, record in zip(federations, records, strict=True):
        if record.complete:
            record.check()
        else:
            path = one.experiment.path
            problem = f"copies are not counted: {record.registry} is missing"
            print(f"warning: {path}: {problem}", file=sys.stderr)
    others = {nonce: path for record in records for nonce, path in record.others().items()}
    others = {nonce: others[nonce] for nonce in others.keys() - {one.nonce.text for one in records}}
    if others:
        listed = some(sorted(others.values()))
        print(f"warning: experiments on the same clients not counted: {listed}", file=sys.stderr)
