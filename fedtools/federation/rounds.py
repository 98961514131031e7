"""Many rounds in one go: Python, the model and the data are set up once."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from fedtools.federation.evaluate import evaluate
from fedtools.federation.federation import Federation
from fedtools.federation.steps import aggregate, sample, train_local
from fedtools.federation.tasks import open_federation
from fedtools.files.errors import UserError

# The worker's federation, opened once in each process.
_worker: Federation | None = None


def run_rounds(
    path: str | Path, last: int | None, jobs: int, device: str = "cpu", role: str | None = None
) -> None:
    """Run the rounds up to `last` that are not complete yet.

    Args:
        last: the last round; None is the number in the configuration.
        jobs: how many processes train clients at the same time; it does not change any result.
        device: "cpu" or "cuda".
        role: data on which the models are measured, as `Experiment.is_measured` has it.

    Raises:
        UserError: if another process runs its rounds at the same time.
    """
    federation = open_federation(path, device)
    with federation.experiment.alone():
        _run(federation, last, jobs, device, role)


def _run(
    federation: Federation, last: int | None, jobs: int, device: str, role: str | None
) -> None:
    experiment = federation.experiment
    last = last or experiment.config["rounds"]
    first = experiment.last_round() + 1
    if role:
        evaluate(federation, list(filter(experiment.is_measured, range(first))), role)
    begun = time.monotonic()
    jobs = max(1, min(jobs, len(experiment.clients)))
    with _trainer(federation, jobs, device) as train:
        for number in range(first, last + 1):
            sampled = sample(federation, number, jobs)
            if sampled:
                train(number, experiment.jobs(number))
            aggregate(federation, number)
            if role and experiment.is_measured(number):
                evaluate(federation, [number], role)
            seconds = (time.monotonic() - begun) / (number - first + 1)
            left = tqdm.format_interval(seconds * (last - number))
            print(
                f"{experiment.path}: round {number}/{last}, "
                f"{len(sampled)} clients, {seconds:.1f} s a round, {left} left",
                file=sys.stderr,
                flush=True,
            )


@contextlib.contextmanager
def _trainer(federation: Federation, jobs: int, device: str) -> Iterator[Callable]:
    """Yield a function (round, number of jobs) that trains the clients of a round."""
    if jobs == 1:
        yield lambda number, parts: [
            train_local(federation, number, job + 1) for job in range(parts)
        ]
        return
    # "spawn": a forked child would share the parent's threads' locks and could hang.
    context = multiprocessing.get_context("spawn")
    path = federation.experiment.path
    with ProcessPoolExecutor(jobs, context, _open, (str(path), device)) as pool:

        def train(number: int, parts: int) -> None:
            try:
                list(pool.map(_train, [number] * parts, range(1, parts + 1)))
            except BrokenProcessPool:
                raise UserError(
                    f"a training process died in round {number} (out of memory?)",
                    path=path,
                    remedy="the same command goes on from here; a smaller --nj needs less memory",
                ) from None

        yield train


def _open(path: str, device: str) -> None:
    global _worker
    # A worker that outlives its killed parent would write into a rerun's files.
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = open_federation(path, device)


def _die_with_parent() -> None:
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _train(number: int, job: int) -> None:
    train_local(_worker, number, job)
