"""Many rounds in one go: Python, the model and the data are set up once.

Clients train in this process, in processes of its own (`--nj`), or in those that a launcher started
beside it, on other machines perhaps: `fedtools.federation.ranks`.
"""

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

from fedtools.federation.base import Federation
from fedtools.federation.evaluate import evaluate
from fedtools.federation.ranks import Rank, follow, lead
from fedtools.federation.steps import aggregate, remove_unwanted, sample, train_local
from fedtools.federation.tasks import open_federation
from fedtools.files.errors import UserError
from fedtools.files.locks import lock

# Trains the clients of all jobs of a round: (round, number of jobs).
Train = Callable[[int, int], None]

# The worker's federation, opened once in each process.
_worker: Federation | None = None


def run_rounds(
    path: str | Path,
    last: int | None,
    jobs: int,
    device: str = "cpu",
    split: str | None = None,
    rank: Rank | None = None,
) -> None:
    """Run the rounds up to `last` that are not complete yet.

    Args:
        last: the last round; None is the number in the configuration.
        jobs: how many processes train clients at the same time; it does not change any result.
        device: "cpu" or "cuda".
        split: data on which the models are measured, as `Experiment.is_measured` has it.
        rank: which of several processes that a launcher started this is; `jobs` does not count.

    Raises:
        UserError: if another process runs its rounds at the same time.
    """
    if rank is not None and rank.number > 0:
        follow(path, rank, lambda: open_federation(path, device))
        return
    federation = open_federation(path, device)
    experiment = federation.experiment
    with lock(experiment.path, "rounds"):
        remove_unwanted(experiment, experiment.last_round())
        jobs = rank.size if rank else max(1, min(jobs, len(experiment.clients)))
        trainer = lead(federation, rank) if rank else _trainer(federation, jobs, device)
        with trainer as train:
            _run(federation, last, jobs, train, split)


def _run(
    federation: Federation, last: int | None, jobs: int, train: Train, split: str | None
) -> None:
    experiment = federation.experiment
    last = last or experiment.config["rounds"]
    first = experiment.last_round() + 1
    if split:
        evaluate(federation, list(filter(experiment.is_measured, range(first))), split)
    begun = time.monotonic()
    for number in range(first, last + 1):
        sampled = sample(experiment, federation.method, number, jobs)
        if sampled:
            train(number, experiment.jobs(number))
        aggregate(federation, number)
        if split and experiment.is_measured(number):
            evaluate(federation, [number], split)
        seconds = (time.monotonic() - begun) / (number - first + 1)
        left = tqdm.format_interval(seconds * (last - number))
        print(
            f"{experiment.path}: round {number}/{last}, "
            f"{len(sampled)} clients, {seconds:.1f} s a round, {left} left",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def _trainer(federation: Federation, jobs: int, device: str) -> Iterator[Train]:
    """Yield a function that trains in this process, or in `jobs` processes of its own."""
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
