"""The steps of a round: sample, train at the clients, aggregate; over the files of `Experiment`.

Single commands and `rounds` call the same functions over the same files, so both give the same
bytes. Whatever is complete on disk is not done again.
"""

from __future__ import annotations

import math
import sys
import time

from fedtools.client.train import Diverged
from fedtools.federation.federation import Federation, Trained
from fedtools.files.atomic import sha256, write_text
from fedtools.files.errors import UserError
from fedtools.files.events import write_scalars
from fedtools.files.experiment import Experiment
from fedtools.files.ledger import SERVER_ROW, LedgerRow, append_round
from fedtools.files.means import MeanWriter, means_complete, member_of, read_means, stack_name
from fedtools.files.states import row_bytes
from fedtools.files.tables import number as positive
from fedtools.files.tables import read_tsv, write_tsv
from fedtools.files.updates import UpdateWriter, check_size, job_complete, read_updates
from fedtools.methods import has_clients
from fedtools.server.aggregate import check_min_clients
from fedtools.server.sample import sample_clients
from fedtools.server.server import Server

# With more clients in a round, TensorBoard gets their mean loss only.
_CURVES = 20
# Of a job's log/seconds.<job>.tsv.
_SECONDS = ("client", "seconds")


def sample(federation: Federation, number: int, jobs: int) -> list[str]:
    """Choose the clients of a round, a function of (seed, round) alone, and cut them into jobs."""
    experiment = federation.experiment
    experiment.require_begun(number, "be sampled")
    clients: list[str] = []
    if has_clients(experiment.config["method"]):
        count = experiment.config["clients_per_round"]
        clients = sample_clients(
            experiment.clients, count or len(experiment.clients), experiment.seed, number
        )
    if not experiment.is_done(number):
        experiment.write_sample(number, clients, max(1, min(jobs, len(clients))))
    return clients


def train_local(federation: Federation, number: int, job: int) -> None:
    """Train the clients of one job of a round, and write what they send."""
    experiment = federation.experiment
    experiment.require_begun(number, "train")
    folder, jobs = experiment.round_dir(number), experiment.jobs(number)
    if job > jobs or experiment.is_done(number):
        return
    units = _units(federation, number, job, jobs)
    base, spec = sha256(experiment.global_state(number)), federation.shared_spec
    writer: UpdateWriter | MeanWriter
    if federation.keep_updates:
        clients = [client for unit in units.values() for client in unit]
        if job_complete(folder, job, clients, spec, base):
            return
        writer = UpdateWriter(folder, job, clients, spec, base)
    else:
        if means_complete(folder, job, units, spec, base):
            return
        writer = MeanWriter(folder, job, units, spec, base, federation.method.weight)
    seconds = []
    with writer:
        for unit in units.values():
            begun = time.monotonic()
            for trained in federation.train(unit, number):
                _send(number, trained, writer)
            spent = (time.monotonic() - begun) / len(unit)
            seconds += [{"client": client, "seconds": f"{spent:.3f}"} for client in unit]
        write_tsv(folder / "log" / f"seconds.{job}.tsv", _SECONDS, seconds)
    # Only now: until the job's files are whole, a rerun takes finished clients from there.
    for unit in units.values():
        for client in unit:
            federation.finish(client, number)


def _units(federation: Federation, number: int, job: int, jobs: int) -> dict[str, list[str]]:
    """The job's share of those who train together, by names that no number of jobs changes."""
    units = federation.units(federation.experiment.sampled(number), number)
    named = [(stack_name(index), unit) for index, unit in enumerate(units, 1)]
    # The first have most to do: there and back through the jobs, so that none gets more each time.
    turns = [*range(1, jobs + 1), *range(jobs, 0, -1)]
    return {
        name: unit for index, (name, unit) in enumerate(named) if turns[index % len(turns)] == job
    }


def _send(number: int, trained: Trained, writer: UpdateWriter | MeanWriter) -> None:
    if trained.reason:
        print(f"round {number}, {trained.client}: left out: {trained.reason}", file=sys.stderr)
        writer.leave_out(trained.client, trained.reason)
        return
    fitted = trained.fitted
    counts = fitted.utterances, fitted.steps, fitted.loss
    writer.add(trained.client, trained.shared, *counts)


def aggregate(federation: Federation, number: int) -> None:
    """Check a round's updates, make the next round's shared tensors, and close the round."""
    experiment, method = federation.experiment, federation.method
    experiment.require_begun(number, "be aggregated")
    if experiment.is_done(number):
        return
    begun = time.monotonic()
    sampled = experiment.sampled(number)
    state = experiment.global_state(number)
    updates, weights, groups, refusals = [], [], {}, []
    if sampled:
        for job in range(1, experiment.jobs(number) + 1):
            path = experiment.round_dir(number) / f"update.{job}.tsv"
            if not path.exists():
                raise UserError(
                    "missing", path=path, remedy=f"run fedtools train-local --job {job}"
                )
        folder = experiment.round_dir(number)
        arguments = folder, sampled, federation.shared_spec, sha256(state)
        if federation.keep_updates:
            updates, refusals = read_updates(*arguments)
            groups = {update.client: [member_of(update, method.weight)] for update in updates}
            weights = [member.weight for (member,) in groups.values()]
        else:
            updates, weights, groups, refusals = read_means(*arguments, method.weight)
        left = sum(map(len, groups.values()))
        check_min_clients(left, method.min_clients, refusals, folder)
    server = Server(
        experiment,
        number,
        federation.shared_spec,
        updates,
        weights,
        groups,
        refusals,
        method.min_clients,
        [name for name, _ in federation.model.named_parameters()],
        make_learner=lambda: federation.at_server(number),
    )
    try:
        method.update_server(server)
    except Diverged as reason:
        raise UserError(
            f"training diverged in round {number}: {reason}",
            path=experiment.path,
            remedy="lower the learning rate",
        ) from None
    for refusal in server.refusals:
        print(f"round {number}, {refusal.client}: refused: {refusal.reason}", file=sys.stderr)
    write_scalars(experiment.tensorboard, "train", number, _scalars(server))
    append_round(experiment.ledger, number, _ledger_rows(federation, server, begun))
    write_text(experiment.round_dir(number) / ".done", "")
    federation.closed(number)


def _scalars(server: Server) -> dict[str, float]:
    losses = server.losses
    if len(losses) <= _CURVES:
        return {f"loss/{name}": loss for name, loss in losses.items()}
    return {"loss/mean": math.fsum(losses.values()) / len(losses)}


def _ledger_rows(federation: Federation, server: Server, begun: float) -> list[LedgerRow]:
    experiment, method, number = federation.experiment, federation.method, server.number
    seconds = _seconds(experiment, number)
    # A method that shares nothing sends nothing: the empty file is only there for uniformity.
    down = experiment.global_state(number).stat().st_size if federation.shared_spec else 0
    # What a client sends is a row of the tensors' file, whether its row was kept or only added.
    sent = {member.client: row_bytes(federation.shared_spec) for member in server.members}
    steps = {member.client: member.steps for member in server.members}
    refused = {refusal.client: f"refused: {refusal.reason}" for refusal in server.refusals}
    sampled = dict.fromkeys(experiment.sampled(number))
    rows = [
        LedgerRow(
            round=number,
            client=client,
            bytes_down=down if client in sampled else 0,
            bytes_up=sent.get(client, 0),
            client_epochs=federation.epochs(client, steps[client]) if client in steps else 0,
            server_epochs=0,
            seconds=seconds.get(client, 0.0),
            status=refused.get(client, "ok"),
        )
        for client in [*sampled, *(client for client in refused if client not in sampled)]
    ]
    spent = time.monotonic() - begun
    return [*rows, LedgerRow(number, SERVER_ROW, 0, 0, 0, method.server_epochs, spent, "ok")]


def _seconds(experiment: Experiment, number: int) -> dict[str, float]:
    """How long clients trained, as their jobs say: nothing else depends on it."""
    clients = len(experiment.sampled(number))
    seconds: dict[str, float] = {}
    for path in sorted((experiment.round_dir(number) / "log").glob("seconds.*.tsv")):
        try:
            check_size(path, clients)
            rows = enumerate(read_tsv(path, _SECONDS), 2)
            seconds |= {row["client"]: positive(row, "seconds", path, at) for at, row in rows}
        except UserError as error:
            print(f"round {number}: {error}; its clients have 0 seconds", file=sys.stderr)
    return seconds
