"""Evaluation of models at sites, which send sums: never a figure of one client.

EXP/round_0007/evaluation.<split>.<job>.yaml   an `Evaluation` of the models after round 6, from
                                               one site; signed with a roster: .yaml.sig
EXP/evaluate_sites_<split>.tsv                 their sums by round: `evaluate_sites`
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fedtools.core.config import Natural, Positive
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.core.tables import write_tsv
from fedtools.data.datadir import check_id
from fedtools.exchange.answers import Answer, Sites, evaluation_path
from fedtools.exchange.signed import read_statement
from fedtools.exchange.sites import names_of
from fedtools.federation.federation import Federation

# More than any corpus has, of clients, of words or of errors in them.
_MOST = 10**12
_AGAIN = "remove it, or ask the site again"


@dataclass(frozen=True, kw_only=True)
class Evaluation(Answer):
    """What a site states about the models of its clients.

    Attributes:
        split: the data.
        clients: how many clients were measured.
        counted: their words or clips, together.
        errors: their errors, together.
    """

    split: str
    clients: Positive
    counted: Positive
    errors: Natural


def measure(federation: Federation, number: int, split: str, least: int) -> dict[str, int]:
    """Return the sums of the clients of a site, of their models after a round.

    Args:
        federation: of the capsule.
        number: the round.
        split: the data.
        least: the fewest words or clips of which the site tells the errors.

    Raises:
        UserError: if there are fewer, or the task counts no errors.
    """
    facts, where = federation.facts, federation.experiment.path
    if not facts.counted:
        problem = f"experiments of task {federation.experiment.options.task} count no errors"
        raise UserError(problem, path=where)
    groups = federation.groups(split)
    sums = {"counted": 0, "errors": 0}
    for client in counted(groups, f"evaluate {split}", "models"):
        federation.load_result(federation.states.known(client, number), number)
        found = federation.task.measure(split, client)
        for name, column in (("counted", facts.counted), ("errors", "errors")):
            sums[name] += int(str(found[column]))
    if sums["counted"] < least:
        problem = f"{sums['counted']} {facts.counted} of {split} data, and the site tells nothing"
        raise UserError(f"{problem} of fewer than {least} (least_evaluated)", path=where)
    clients = len(facts.clients(federation.task.data_path(split)))
    return {"clients": clients, **sums}


def evaluate_sites(federation: Federation, split: str) -> list[dict[str, str]]:
    """Add up the evaluations that sites have sent, and write the table of them by round.

    An evaluation that cannot be used is an error, since a rate without it would be another's. One
    from before a reset counts if its models are those of now.

    Returns:
        the rows: round, sites and clients that were measured, counts, errors and rate, %.
    """
    experiment, facts, rows = federation.experiment, federation.facts, []
    names = names_of(experiment.sites)
    check_id(split, "split")
    if not names:
        remedy = "leave --by-site out, or begin the experiment with --sites"
        raise UserError("the experiment has no sites", path=experiment.path, remedy=remedy)
    for number in range(experiment.last_round() + 1):
        folder = experiment.round(number + 1)
        sites = Sites(names, experiment.roster, experiment.attempt, folder.origin())
        found: list[Evaluation] = []
        for job, site in enumerate(names, 1):
            path = evaluation_path(folder.path, split, job)
            if not os.path.lexists(path):
                continue
            one = read_statement(Evaluation, path, site, experiment.roster, 0)
            problem = sites.problem(one, job)
            # Words can be inserted, but no clip has two errors.
            most = _MOST if facts.sign > 0 else one.counted
            if one.split != split or one.errors > most or max(one.counted, one.clients) > _MOST:
                problem = "not an evaluation that can be"
            if problem:
                raise UserError(problem, path=path, remedy=_AGAIN)
            found.append(one)
        if found:
            clients, total, errors = (
                sum(getattr(one, name) for one in found)
                for name in ("clients", "counted", "errors")
            )
            rate = 100 * (errors if facts.sign > 0 else total - errors) / total
            row = {"round": number, "sites": len(found), "clients": clients}
            row |= {facts.counted: total, "errors": errors, facts.rate: f"{rate:.4f}"}
            rows.append({name: str(value) for name, value in row.items()})
    if not rows:
        problem = f"no site has sent an evaluation on {split}"
        remedy = f"ask for some: fedtools site --evaluate {split}"
        raise UserError(problem, path=experiment.path, remedy=remedy)
    write_tsv(experiment.path / f"evaluate_sites_{split}.tsv", [*rows[0]], rows)
    return rows
