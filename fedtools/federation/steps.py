"""The steps of a round: sample, train at the clients, aggregate; over the files of `Experiment`.

Single commands and `rounds` call the same functions over the same files, so both give the same
bytes. Whatever is complete on disk is not done again.
"""

from __future__ import annotations

import sys
import time

from fedtools.client.learner import Learner
from fedtools.client.train import Diverged, load_model
from fedtools.federation.federation import ALL, Federation
from fedtools.files.atomic import sha256, write_text
from fedtools.files.errors import UserError
from fedtools.files.events import write_scalars
from fedtools.files.ledger import LedgerRow, append_round
from fedtools.files.states import load_state, save_state
from fedtools.files.updates import UpdateWriter, job_complete, read_updates
from fedtools.methods.base import PERSONAL, SHARED
from fedtools.server.aggregate import check_min_clients
from fedtools.server.sample import sample_clients, split_jobs
from fedtools.server.server import Server

# The client column of the ledger's row for the server's own work; no client can have this name.
SERVER_ROW = "-"


def sample(federation: Federation, number: int, jobs: int) -> list[str]:
    """Choose the clients of a round, a function of (seed, round) alone, and cut them into jobs."""
    experiment = federation.experiment
    experiment.require_begun(number, "be sampled")
    clients: list[str] = []
    if federation.method.has_clients:
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
    clients = split_jobs(experiment.sampled(number), jobs)[job - 1]
    base = sha256(experiment.global_state(number))
    if job_complete(folder, job, clients, federation.shared_spec, base):
        return
    seconds = []
    learners = []
    with UpdateWriter(folder, job, clients, federation.shared_spec, base) as writer:
        for client in clients:
            begun = time.monotonic()
            learners.append(_train_client(federation, number, client, writer))
            seconds.append(f"{client}\t{time.monotonic() - begun:.3f}\n")
        write_text(folder / "log" / f"seconds.{job}.tsv", "".join(seconds))
    # Only now: until the job's files are whole, a rerun takes finished clients from there.
    for learner in learners:
        learner.finish()


def _train_client(
    federation: Federation, number: int, client: str, writer: UpdateWriter
) -> Learner:
    federation.load_client(client, number)
    own = federation.experiment.client_dir(client)
    learner = federation.learner(client, own, number, federation.utterances("train", client))
    try:
        fitted = federation.method.train_client(learner)
    except Diverged as reason:
        print(f"round {number}, {client}: left out: {reason}", file=sys.stderr)
        writer.leave_out(client, f"diverged: {reason}")
        return learner
    state = {name: value.cpu().numpy() for name, value in federation.model.state_dict().items()}
    if personal := federation.of_kind(PERSONAL, state):
        folder = federation.experiment.personal_dir(own, number)
        save_state(folder / "personal.safetensors", personal)
    shared = federation.of_kind(SHARED, state)
    writer.add(client, shared, fitted.utterances, fitted.steps, fitted.loss)
    return learner


def aggregate(federation: Federation, number: int) -> None:
    """Check a round's updates, make the next round's shared tensors, and close the round."""
    experiment, method = federation.experiment, federation.method
    experiment.require_begun(number, "be aggregated")
    if experiment.is_done(number):
        return
    begun = time.monotonic()
    sampled = experiment.sampled(number)
    state = experiment.global_state(number)
    updates, refusals = [], []
    if sampled:
        for job in range(1, experiment.jobs(number) + 1):
            path = experiment.round_dir(number) / f"update.{job}.tsv"
            if not path.exists():
                raise UserError(
                    "missing", path=path, remedy=f"run fedtools train-local --job {job}"
                )
        updates, refusals = read_updates(
            experiment.round_dir(number), sampled, federation.shared_spec, sha256(state)
        )
        check_min_clients(len(updates), method.min_clients, refusals, experiment.round_dir(number))

    def at_server() -> Learner:
        load_model(federation.model, federation.initial)
        load_model(federation.model, load_state(state, federation.shared_spec))
        data = federation.utterances("train", ALL)
        return federation.learner("server", experiment.server_dir(), number, data)

    server = Server(
        experiment,
        number,
        federation.shared_spec,
        updates,
        refusals,
        method.min_clients,
        make_learner=at_server,
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
    scalars = {f"loss/{name}": loss for name, loss in server.losses.items()}
    write_scalars(experiment.tensorboard, "train", number, scalars)
    append_round(experiment.ledger, number, _ledger_rows(federation, server, begun))
    write_text(experiment.round_dir(number) / ".done", "")


def _ledger_rows(federation: Federation, server: Server, begun: float) -> list[LedgerRow]:
    experiment, method, number = federation.experiment, federation.method, server.number
    seconds: dict[str, str] = {}
    for path in (experiment.round_dir(number) / "log").glob("seconds.*.tsv"):
        seconds |= dict(line.split("\t") for line in path.read_text().splitlines())
    # A method that shares nothing sends nothing: the empty file is only there for uniformity.
    down = experiment.global_state(number).stat().st_size if federation.shared_spec else 0
    sent = {update.client: update.bytes for update in server.updates}
    refused = {refusal.client: f"refused: {refusal.reason}" for refusal in server.refusals}
    sampled = experiment.sampled(number)
    rows = [
        LedgerRow(
            round=number,
            client=client,
            bytes_down=down if client in sampled else 0,
            bytes_up=sent.get(client, 0),
            client_epochs=method.local_epochs if client in sampled else 0,
            server_epochs=0,
            seconds=float(seconds.get(client, 0)),
            status=refused.get(client, "ok"),
        )
        for client in [*sampled, *(client for client in refused if client not in sampled)]
    ]
    spent = time.monotonic() - begun
    return [*rows, LedgerRow(number, SERVER_ROW, 0, 0, 0, method.server_epochs, spent, "ok")]
