"""Consecutive rounds in one command, which sets up Python, model and data once.

Clients train in this process, in its worker processes (`--nj`), or in processes that a launcher
started along with it, possibly on other machines: `fedtools.federation.ranks`.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path

from tqdm import tqdm

from fedtools.core.errors import UserError
from fedtools.core.locks import lock
from fedtools.core.progress import Lines
from fedtools.core.signals import uninterrupted
from fedtools.data.text_units import read_text_unit
from fedtools.exchange.commands import add_command
from fedtools.federation.evaluate import evaluate
from fedtools.federation.federation import Federation
from fedtools.federation.ranks import Rank, follow, lead
from fedtools.federation.steps import aggregate, sample, tidy, train_local
from fedtools.tasks.facts import check_at_hand

# Function that trains the clients of all jobs of a round: (round, number of jobs).
Train = Callable[[int, int], None]


def run_rounds(
    path: str | Path,
    last: int | None,
    jobs: int,
    device: str = "cpu",
    split: str | None = None,
    rank: Rank | None = None,
    keys: Path | None = None,
) -> None:
    """Run the rounds up to `last` that are not complete yet.

    Args:
        path: the folder of the experiment.
        last: the last round; None means the number in the configuration.
        jobs: the number of processes that train clients in parallel; it does not change results.
        device: "cpu" or "cuda".
        split: data for evaluation, in the rounds of `Experiment.is_measured`.
        rank: the rank of this process among those of a launcher, which then replace `jobs`.
        keys: the folder with the clients' keys, for secure sums.

    Raises:
        UserError: if another process is running rounds of this experiment.
    """
    if rank is not None and rank.number > 0:
        follow(path, rank, device, keys)
        return
    federation = Federation(path, device, keys)
    experiment = federation.experiment
    if experiment.last_round() < (last or experiment.options.rounds):
        check_at_hand(experiment)
    with lock(experiment.path, "rounds"):
        tidy(federation, experiment.last_round())
        if split:
            # A split that the experiment does not have fails before the command is listed.
            federation.groups(split)
        add_command(experiment.path)
        jobs = rank.size if rank else max(1, min(jobs, len(experiment.clients)))
        workers = lead(federation, rank) if rank else trainer(federation, jobs, device, keys)
        with workers as train:
            _run(federation, last, jobs, train, split)


def _run(
    federation: Federation, last: int | None, jobs: int, train: Train, split: str | None
) -> None:
    experiment = federation.experiment
    last = last or experiment.options.rounds
    first = experiment.last_round() + 1
    if split:
        evaluate(federation, list(filter(experiment.is_measured, range(first))), split)
    lines = Lines(experiment.title, "round", last, first)
    for number in range(first, last + 1):
        sampled, loss = sample(experiment, federation.method, number, jobs), math.nan
        # A secure sum has five steps of clients and server, all else one.
        while not experiment.round(number).is_done():
            if sampled:
                train(number, experiment.round(number).jobs())
            loss = aggregate(federation, number)
        facts = [f"{len(sampled)} clients"] if sampled else []
        if not math.isnan(loss):
            facts.append(f"loss {loss:.3g}")
        if split and experiment.is_measured(number):
            facts.append(_measured(federation, number, split))
        lines.done(number, *facts)


def _measured(federation: Federation, number: int, split: str) -> str:
    """Evaluate a round's models, and return a message with their mean rate."""
    rate = federation.facts.rate
    rows = evaluate(federation, [number], split)
    values = [float(row[rate]) for row in rows if int(row["round"]) == number]
    name = read_text_unit(federation.task.data_path(split)).title if rate == "wer" else rate
    return f"{split} {name} {math.fsum(values) / len(values):.1f} %"


@contextlib.contextmanager
def trainer(
    federation: Federation, jobs: int, device: str, keys: Path | None = None
) -> Iterator[Train]:
    """Yield a function that trains in this process, or in `jobs` processes of its own."""
    if jobs == 1:

        def train_here(number: int, parts: int) -> None:
            for job in range(parts):
                train_local(federation, number, job + 1)

        yield train_here
        return
    # "spawn", since a forked child inherits locks held by the parent's threads and could hang.
    context = multiprocessing.get_context("spawn")
    path, pipes = federation.experiment.path, list[Connection]()
    with contextlib.ExitStack() as stack:

        def train(number: int, parts: int) -> None:
            while len(pipes) < min(jobs, parts):
                one = worker(context, _train, str(path), device, str(keys or ""))
                pipes.append(stack.enter_context(one))
            with reporting_deaths(path, number):
                _share_out(pipes, number, parts)

        yield train


@contextlib.contextmanager
def reporting_deaths(path: Path, number: int) -> Iterator[None]:
    """Raise a `UserError` if a process of `worker` dies while it trains in a round."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise UserError(
            f"a training process died in round {number} (out of memory?)",
            path=path,
            remedy="the same command goes on from here; a smaller --nj needs less memory",
        ) from None


@contextlib.contextmanager
def worker(
    context: SpawnContext, work: Callable[..., object], path: str, device: str, keys: str = ""
) -> Iterator[Connection]:
    """Yield a pipe to a process that opens an experiment.

    It calls `work` with the opened federation and what is sent, and answers with the result or the
    error. An executor's queues would have semaphores, which a killed run leaves behind and of which
    Python warns.
    """
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, path, device, keys), daemon=True)
    with uninterrupted():
        process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


def _share_out(pipes: Sequence[Connection], number: int, parts: int) -> None:
    """Distribute the jobs of a round to idle processes, and raise the first of their errors."""
    jobs, idle = list(range(parts, 0, -1)), list(pipes)
    busy, errors = list[Connection](), list[Exception]()
    while busy or (jobs and not errors):
        while jobs and idle and not errors:
            busy.append(idle.pop())
            busy[-1].send((number, jobs.pop()))
        ready = multiprocessing.connection.wait(busy)
        for pipe in [one for one in busy if one in ready]:
            if error := pipe.recv():
                errors.append(error)
            busy.remove(pipe)
            idle.append(pipe)
    if errors:
        raise errors[0]


def _train(federation: Federation, number: int, job: int) -> None:
    train_local(federation, number, job)


def _serve(
    pipe: Connection, work: Callable[..., object], path: str, device: str, keys: str
) -> None:
    """Do the work that comes from the pipe; after an error the parent sends no more."""
    # tqdm's default lock has a semaphore.
    tqdm.set_lock(threading.RLock())
    # A worker that outlives its killed parent would write into a rerun's files.
    threading.Thread(target=_die_with_parent, daemon=True).start()
    federation: Federation | None = None
    found: object = None
    # Stops when the parent has ended or died.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            asked = pipe.recv()
            try:
                federation = federation or Federation(path, device, keys)
                found = work(federation, *asked)
            except (UserError, OSError) as error:
                found = error
            pipe.send(found)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
