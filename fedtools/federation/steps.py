"""The steps of a round: sampling, client training and aggregation, on the files of `Experiment`.

Single commands and `rounds` call the same functions on the same files, so both give the same bytes.
Complete results on disk are not computed again, and nothing in an open round is removed.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

from fedtools.core.atomic import remove
from fedtools.core.errors import UserError, some
from fedtools.core.events import step_of, write_scalars
from fedtools.core.locks import lock
from fedtools.core.tables import write_tsv
from fedtools.exchange.answers import Sites, find_evaluations
from fedtools.exchange.experiment import Experiment, RoundFolder
from fedtools.exchange.ledger import SERVER_ROW, LedgerRow, write_ledger
from fedtools.exchange.messages import (
    COLLAPSED,
    OK,
    Message,
    MessageWriter,
    Payload,
    Refusal,
    Report,
    job_complete,
    paths_of,
    read_messages,
    remove_messages,
    status_of,
    sums_of,
)
from fedtools.exchange.origin import Origin
from fedtools.exchange.private import Private
from fedtools.exchange.sites import by_site, names_of
from fedtools.federation import secure_clients, secure_server
from fedtools.federation.attackers import attacked, attackers_units, deal_units
from fedtools.federation.evaluations import read_evaluation
from fedtools.federation.federation import Federation, Sent
from fedtools.federation.secure_round import SecureRound, check_unsigned
from fedtools.federation.secure_server import Secured, summed
from fedtools.methods.base import Method
from fedtools.server.sample import draw
from fedtools.server.server import Round, Server
from fedtools.tasks.base import as_configured
from fedtools.tasks.facts import check_at_hand

# Function that trains units: (federation, units, round) -> what each unit sends, in their order.
TrainUnits = Callable[[Federation, Sequence[Sequence[str]], int], Iterator[Sent]]

# The most clients in a round whose losses are all written to TensorBoard; else only the mean is.
_CURVES = 20


def sample(experiment: Experiment, method: Method, number: int, jobs: int) -> list[str]:
    """Sample the clients of a round and cut them into jobs, unless this was done before.

    Args:
        jobs: the number of jobs; with sites, each of these is a job instead.
    """
    folder = experiment.round(number)
    folder.require_begun("be sampled")
    folder.start_sum()
    clients = draw(experiment, number, method.phase(number))
    wanted = len(names_of(experiment.sites)) or max(1, min(jobs, len(clients)))
    if not folder.is_sampled():
        folder.write_sample(clients, wanted)
    elif (cut := folder.jobs()) != wanted and not folder.is_done():
        print(f"round {number} is already cut into {cut} jobs, which are kept", file=sys.stderr)
    return clients


def train_job(federation: Federation, number: int, job: int) -> None:
    """Run `train_local` with locks, while other commands may run other jobs of the round."""
    path = federation.experiment.path
    check_at_hand(federation.experiment)
    with lock(path, "rounds", shared=True), lock(path, f"round-{number}-job-{job}"):
        train_local(federation, number, job)


@as_configured
def train_local(
    federation: Federation, number: int, job: int, train: TrainUnits | None = None
) -> None:
    """Run the client updates of one job of a round, and write the client messages.

    Args:
        train: trains the units; by default here, one after the other.
    """
    folder = federation.experiment.round(number)
    folder.require_begun("train")
    sampled, jobs = folder.sampled(), folder.jobs()
    if folder.is_done() and federation.holder:
        federation.holder.forget_all(federation.experiment.label)
    if job > jobs or folder.is_done():
        return
    phase = federation.method.phase(number)
    units = units_of(federation, sampled, number, jobs)[job - 1]
    clients = [client for unit in units for client in unit]
    payload, origin = federation.payload(phase), folder.origin()
    if federation.method.secure_sums:
        _secure_step(federation, units, number, job, train or _one_by_one)
        return
    if job_complete(folder.path, job, clients, payload, origin):
        return
    ours, others = attackers_units(federation.attack, units)
    with MessageWriter(folder.path, job, clients, payload, origin) as writer:
        sends = attacked(federation, ours, number, train_unit)
        for sent in chain(sends, (train or _one_by_one)(federation, others, number)):
            _report(number, sent.reports)
            writer.send(sent.reports, sent.tensors, sent.features)
    # Only now: until the job's files are complete, a rerun resumes from the clients' checkpoints.
    federation.finish(clients, number)


def _secure_step(
    federation: Federation,
    units: Sequence[Sequence[str]],
    number: int,
    job: int,
    train: TrainUnits,
) -> None:
    """Do the step of a secure sum that is due for a job."""
    clients = [client for unit in units for client in unit]

    def trained() -> Iterator[Sent]:
        return train(federation, units, number)

    if secure_clients.do_step(federation, number, job, clients, trained):
        federation.finish(clients, number)


def train_unit(
    federation: Federation, unit: Sequence[str], number: int, poisoned: bool = False
) -> Sent:
    """Run the client updates of one unit of a round; the reports have its time.

    The caller has the federation's settings. `poisoned` is that of `Federation.work`.
    """
    phase, begun = federation.method.phase(number), time.monotonic()
    sent = federation.work(unit, number, phase, poisoned)
    spent = 0.0 if phase.untimed else time.monotonic() - begun
    seconds = spent / len(sent.reports)
    return replace(sent, reports=[one._replace(seconds=seconds) for one in sent.reports])


def _one_by_one(
    federation: Federation, units: Sequence[Sequence[str]], number: int
) -> Iterator[Sent]:
    return (train_unit(federation, unit, number) for unit in units)


def _report(number: int, reports: Sequence[Report]) -> None:
    for report in reports:
        if report.reason:
            print(f"round {number}, {report.client}: left out: {report.reason}", file=sys.stderr)
        elif status_of(report.reason, report.empty_labels) == COLLAPSED:
            empty = f"{100 * report.empty_labels:.0f} % of its labels are empty"
            print(f"round {number}, {report.client}: {empty}", file=sys.stderr)


def units_of(
    federation: Federation, sampled: Sequence[str], number: int, jobs: int
) -> list[list[list[str]]]:
    """Return the training units of each job; with sites, a site's units are its clients' alone."""
    if sites := federation.experiment.sites:
        names, own = names_of(sites), by_site(sites, sampled)
        if jobs != len(names):
            problem = f"round {number} is cut into {jobs} jobs, and there are {len(names)} sites"
            path = federation.experiment.path
            raise UserError(problem, path=path, remedy=f"run fedtools reset --round {number}")
        return [federation.task.units(own[site], number) if site in own else [] for site in names]
    if federation.attack:
        return deal_units(federation, sampled, number, jobs)
    units = federation.task.units(sampled, number) if sampled else []
    # The first units take longest. Deal units in serpentine order to balance jobs.
    turns = [*range(jobs), *reversed(range(jobs))]
    dealt: list[list[list[str]]] = [[] for _ in range(jobs)]
    for index, unit in enumerate(units):
        dealt[turns[index % len(turns)]].append(unit)
    return dealt


def jobs_of(federation: Federation, number: int) -> list[list[str]]:
    """Return the clients of each job of a sampled round, in the order of its table's rows."""
    folder = federation.experiment.round(number)
    shares = units_of(federation, folder.sampled(), number, folder.jobs())
    return [[client for unit in units for client in unit] for units in shares]


def marks_of(federation: Federation, number: int) -> list[Path]:
    """Return the files, one of each job, that mark that all clients have done what is due."""
    if federation.method.secure_sums:
        return SecureRound(federation, number).marks(jobs_of(federation, number))
    folder = federation.experiment.round(number)
    return [paths_of(folder.path, job)[1] for job in range(1, folder.jobs() + 1)]


def due_step(federation: Federation, number: int) -> str:
    """Return the step of a secure sum that clients have to do, for a message; "" for none."""
    folder = federation.experiment.round(number)
    if not federation.method.secure_sums or folder.is_done() or not folder.is_sampled():
        return ""
    marks = marks_of(federation, number)
    missing = [path for path in marks if not path.exists()]
    if not marks:
        return ""
    done, step = len(marks) - len(missing), marks[0].name.split(".")[1]
    following = "train-local of the others" if missing else "aggregate"
    said = f"round {number}, step '{step}': done by {done} of {len(marks)} jobs"
    return f"{said}; next: fedtools {following}"


def _seconds_since_sampled(folder: RoundFolder) -> float:
    return max(0.0, time.time() - folder.sampled_at())


@as_configured
def aggregate(federation: Federation, number: int, without: Sequence[str] = ()) -> float:
    """Check a round's messages, compute the next round's shared tensors, and close the round.

    Args:
        without: sites whose messages do not count, whether or not they came.

    Returns:
        the mean training loss over the clients that trained, or the server; NaN if the round was
        already complete.
    """
    experiment, method = federation.experiment, federation.method
    folder = experiment.round(number)
    folder.require_begun("be aggregated")
    # Messages that a killed run did not remove.
    remove_unwanted(experiment, method, number - 1)
    if folder.is_done():
        tidy(federation, number)
        return math.nan
    begun = time.monotonic()
    phase = method.phase(number)
    sampled, origin = draw(experiment, number, phase), folder.origin()
    parameters = frozenset(federation.states.parameters)
    round = Round(experiment, number, sampled, origin.base, federation.payload(phase), parameters)
    messages: list[Message] = []
    refusals: list[Refusal] = []
    secured: Secured | None = None
    if sampled and method.secure_sums:
        secured = _secure_sum(federation, folder, sampled, without)
        if secured is None:
            # The round is still open.
            return math.nan
        round = replace(round, total=secured.total)
        messages, refusals = summed(secured)
    elif sampled:
        _check_sampled(experiment, folder, sampled, without)
        messages, refusals = _read_round(federation, folder, round.payload, origin, without)
    learner = federation.learner(number) if phase.server_trains else None
    protection = federation.protection
    release = protection.release(number) if protection else None
    server = Server(round, method, messages, refusals, learner, release)
    phase.server_update(server)
    if round.payload.features:
        server.lower_shares()
    if server.collapsed:
        shares = server.collapsed.items()
        named = some([f"{client or 'all'} ({100 * share:.0f} %)" for client, share in shares])
        print(f"round {number}, server: empty labels for {named}", file=sys.stderr)
    for refusal in server.refusals:
        print(f"round {number}, {refusal.client}: refused: {refusal.reason}", file=sys.stderr)
    if scalars := _scalars(server):
        write_scalars(experiment.tensorboard, "train", number, scalars)
    down = secured.sent if secured else None
    write_ledger(folder.ledger, _ledger_rows(federation, server, begun, down))
    folder.close(sums_of(messages) if _kept(experiment, method, number) else {})
    federation.closed(number, sampled)
    remove_unwanted(experiment, method, number)
    if secured:
        secure_server.forget(federation)
    return server.mean_loss()


def _secure_sum(
    federation: Federation, folder: RoundFolder, sampled: Sequence[str], without: Sequence[str]
) -> Secured | None:
    """Do the server's next step of a secure sum, and return the sum after the last."""
    _check_clients(folder, sampled)
    jobs = jobs_of(federation, folder.number)
    # Without sites, jobs are left out by their numbers.
    names = names_of(federation.experiment.sites) or [str(job + 1) for job in range(len(jobs))]
    if unknown := [name for name in without if name not in names]:
        problem = f"no site or job {unknown[0]!r} to leave out"
        raise UserError(problem, path=federation.experiment.path)
    left_out = [names.index(name) + 1 for name in without]
    return secure_server.advance(federation, folder.number, jobs, left_out)


def _read_round(
    federation: Federation,
    folder: RoundFolder,
    payload: Payload,
    origin: Origin,
    without: Sequence[str],
) -> tuple[list[Message], list[Refusal]]:
    """Return the messages that count, and a refusal for each other sampled client."""
    limits = federation.task.limits(
        federation.method.phase(folder.number), _seconds_since_sampled(folder)
    )
    sampled, jobs = folder.sampled(), jobs_of(federation, folder.number)
    messages, refusals = read_messages(folder.path, jobs, sampled, payload, origin, limits)
    experiment = federation.experiment
    if names := names_of(experiment.sites):
        sites = Sites(names, experiment.roster, experiment.attempt, origin)
        messages, wrong = sites.check(folder.path, messages, [*map(len, jobs)])
        places = {client: place for place, client in enumerate(sampled)}
        refusals = sorted([*refusals, *wrong], key=lambda one: places[one.client])
        messages.sort(key=lambda one: places[one.client])
    left = {client for client, site in experiment.sites.items() if site in without}
    return (
        [one for one in messages if one.client not in left],
        [one for one in refusals if one.client not in left]
        + [Refusal(client, "its site was left out") for client in sampled if client in left],
    )


def tidy(federation: Federation, number: int) -> None:
    """Remove unneeded files of a complete round, which a killed run may have left."""
    if number > 0:
        experiment = federation.experiment
        federation.closed(number, draw(experiment, number, federation.method.phase(number)))
        remove_unwanted(experiment, federation.method, number)
        if federation.method.secure_sums:
            secure_server.forget(federation)


def remove_unwanted(experiment: Experiment, method: Method, number: int) -> None:
    """Remove the messages of a complete round unless they are to be kept."""
    if number > 0 and not _kept(experiment, method, number):
        remove_messages(experiment.round(number).path)


def _kept(experiment: Experiment, method: Method, number: int) -> bool:
    """Return whether the messages of a complete round are kept; of secure sums never."""
    if method.secure_sums:
        return False
    return experiment.options.keep_updates or method.phase(number).keep


def _check_sampled(
    experiment: Experiment, folder: RoundFolder, sampled: Sequence[str], without: Sequence[str]
) -> None:
    """Raise a `UserError` if the sampled clients are wrong or the table of a job is missing.

    Tables of sites that are left out, or of which no client was sampled, may be missing.
    """
    _check_clients(folder, sampled)
    sites = _sites_left(experiment, without)
    needed = set(by_site(experiment.sites, sampled)) - {*without}
    for job in range(1, (len(sites) or folder.jobs()) + 1):
        table, site = folder.path / f"update.{job}.tsv", sites[job - 1] if sites else ""
        # A dangling link counts as present; its clients are refused when it is read.
        if (site and site not in needed) or os.path.lexists(table):
            continue
        problem = f"missing, of site {site}" if site else "missing"
        remedy = f"run fedtools train-local --job {job}"
        more = f", or leave it out: --without {site}" if site else ""
        raise UserError(problem, path=table, remedy=remedy + more)


def _check_clients(folder: RoundFolder, sampled: Sequence[str]) -> None:
    """Raise a `UserError` if the sampled clients are wrong."""
    if folder.sampled() != list(sampled):
        path = folder.path / "clients"
        problem = "not the clients drawn for this seed and round"
        raise UserError(problem, path=path, remedy="run fedtools reset, then fedtools sample")


def _sites_left(experiment: Experiment, without: Sequence[str]) -> list[str]:
    """Return the names of all sites; raise a `UserError` if one to leave out is unknown."""
    sites = names_of(experiment.sites)
    if unknown := [name for name in without if name not in sites]:
        raise UserError(f"no site {unknown[0]!r} to leave out", path=experiment.path)
    return sites


def _scalars(server: Server) -> dict[str, float]:
    losses = server.losses
    if len(losses) > _CURVES:
        return {"loss/mean": server.mean_loss()}
    return {f"loss/{name}": loss for name, loss in losses.items()}


def _ledger_rows(
    federation: Federation,
    server: Server,
    begun: float,
    replies: Mapping[str, int] | None = None,
) -> list[LedgerRow]:
    """Return the rows of a round.

    Args:
        replies: client -> bytes that the server has sent to it beside the state, if any.
    """
    number, sampled = server.round.number, server.round.sampled
    sizes = _sizes_down(federation, server.round)
    sent = {message.client: message for message in server.messages}
    refused = {refusal.client: refusal for refusal in server.refusals}
    attackers, rows = set(federation.experiment.attackers), []
    for client in [*sampled, *(client for client in refused if client not in sizes)]:
        message, refusal = sent.get(client), refused.get(client)
        came = message or refusal
        status = f"refused: {refusal.reason}" if refusal else message.status if message else OK
        rows.append(
            LedgerRow(
                round=number,
                client=client,
                bytes_down=sizes.get(client, 0) + (replies or {}).get(client, 0),
                bytes_up=came.bytes if came else 0,
                steps=message.steps if message else 0,
                client_epochs=federation.task.epochs(client, message.steps) if message else 0,
                seconds=message.seconds if message else 0.0,
                status=status,
                attacker=client in attackers,
            )
        )
    # No clients are sampled when the server trains; these rows report clients with empty labels.
    failed = [client for client in server.collapsed if client]
    rows += [LedgerRow(number, client, status=COLLAPSED) for client in failed]
    spent = time.monotonic() - begun
    # For data without clients the server's row reports empty labels.
    status = COLLAPSED if "" in server.collapsed else OK
    own = LedgerRow(
        number,
        SERVER_ROW,
        steps=server.steps,
        server_epochs=server.epochs,
        seconds=spent,
        status=status,
    )
    return [*rows, own]


def _sizes_down(federation: Federation, round: Round) -> Mapping[str, int]:
    """Return the bytes that the server sends to each client: 0 if it already has that state."""
    experiment = round.experiment
    path = experiment.round(round.number).global_state
    # A method without shared tensors sends nothing; its state file is empty.
    size = path.stat().st_size if federation.states.shared_spec else 0
    held: set[str] = set()
    before = round.number - 1
    while size and before > 0 and experiment.round(before).recorded_start_sum() == round.start_sum:
        held.update(experiment.round(before).sampled())
        before -= 1
    return {client: 0 if client in held else size for client in round.sampled}


def reset(federation: Federation, number: int) -> None:
    """Reopen round `number`: remove all results of it and later rounds, also at the clients.

    Evaluations of these rounds, and all averaged models, which may contain them, are removed too.
    """
    experiment = federation.experiment
    path, last = experiment.path, experiment.last_round()
    if not 1 <= number <= last + 1:
        raise UserError(f"round {number} cannot be reset: {last} rounds are complete", path=path)
    with ExitStack() as locks:
        for name in ("rounds", "average", *(f"evaluate-{s}" for s in experiment.options.data)):
            locks.enter_context(lock(path, name))
        _check_kept(federation, number)
        if federation.method.secure_sums:
            check_unsigned(experiment, number, last)
        experiment.round(number).begin_reset()
        _forget_measured(federation, number)
        clients = (one for one in (path / "clients").glob("*") if one.is_dir())
        owners = [path / "server", *clients]
        for owner in (path, *owners):
            remove(owner / "model.safetensors")
        remove(experiment.averaged)
        # Last round first, and its mark before its files, so that a killed reset can be resumed.
        for later in range(last + 1, number - 1, -1):
            folder, made = experiment.round(later), experiment.round(later + 1).global_state
            remove(folder.done)
            for owner in owners:
                Private(owner, later).remove()
            remove_messages(folder.path)
            secure_server.forget(federation)
            for file in (folder.path / "jobs", folder.path / "clients", folder.ledger, made):
                remove(file)
            for file in find_evaluations(made.parent):
                remove(file)
            _remove_empty(made.parent)
        experiment.round(number).end_reset()


def _check_kept(federation: Federation, number: int) -> None:
    """Raise a `UserError` if state kept before round `number` was replaced by newer state."""
    experiment, phase = federation.experiment, federation.method.phase
    owners: list[tuple[Private, str]] = []
    for at in range(1, number):
        clients = draw(experiment, at, phase(at))
        owners += [(experiment.own(client, number), "client_update") for client in clients]
    for owner, part in [(experiment.at_server(number), "server_update"), *owners]:
        # State was kept before `number` if an earlier round ran the same update.
        done = [getattr(phase(at), part) for at in range(1, number)]
        if any(getattr(phase(later), part) in done for later in owner.only_later()):
            problem = f"the state kept before round {number} is missing"
            raise UserError(problem, path=owner.folder, remedy="reset round 1, or a later round")


def _forget_measured(federation: Federation, number: int) -> None:
    """Remove the evaluations of round `number` and later ones."""
    experiment, facts = federation.experiment, federation.facts
    for split in experiment.options.data:
        table = experiment.evaluation(split)
        if table.exists():
            rows = read_evaluation(table, facts)
            write_tsv(table, facts.header, [row for (at, _), row in rows.items() if at < number])
    for path in experiment.tensorboard.glob("*/*"):
        at = step_of(path)
        if at is not None and at >= number:
            remove(path)


def _remove_empty(folder: Path) -> None:
    for inner in (folder / "log", folder):
        if inner.is_dir() and not any(inner.iterdir()):
            inner.rmdir()
