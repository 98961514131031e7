"""Training of the units of one job in several processes, with the bytes of one process."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from fedtools.exchange.states import as_array
from fedtools.federation.federation import Federation, Sent
from fedtools.federation.rounds import reporting_deaths, worker
from fedtools.federation.steps import TrainUnits, train_unit
from fedtools.tasks.base import as_configured

# Results that wait for those of units before them, for each process.
_AHEAD = 2


@contextlib.contextmanager
def unit_trainer(path: Path, jobs: int, device: str) -> Iterator[TrainUnits | None]:
    """Yield a function that trains units in `jobs` processes of its own; None for this process.

    Args:
        path: the experiment's folder.
        jobs: the number of processes; a unit is never split.
        device: "cpu" or "cuda".
    """
    if jobs == 1:
        yield None
        return
    # "spawn", since a forked child inherits locks held by the parent's threads and could hang.
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:

        def train(
            federation: Federation, units: Sequence[Sequence[str]], number: int
        ) -> Iterator[Sent]:
            pipes = [
                stack.enter_context(worker(context, _train, str(path), device))
                for _ in range(min(jobs, len(units)))
            ]
            with reporting_deaths(path, number):
                yield from _in_order(pipes, units, number)

        yield train


@as_configured
def _train(federation: Federation, unit: Sequence[str], number: int) -> Sent:
    """Train a unit, and return what it sends in a form that a pipe takes."""
    sent = train_unit(federation, unit, number)
    tensors = sent.tensors and {name: as_array(name, one) for name, one in sent.tensors.items()}
    begun = time.monotonic()
    features = None if sent.features is None else [*sent.features]
    # Features are of a single client, and their time counts as its own.
    spent = time.monotonic() - begun if features else 0.0
    reports = [one._replace(seconds=one.seconds + spent) for one in sent.reports]
    return Sent(reports, tensors, features)


def _in_order(
    pipes: Sequence[Connection], units: Sequence[Sequence[str]], number: int
) -> Iterator[Sent]:
    """Yield the results of units in their order; raise the first error."""
    idle, busy = [*pipes], dict[Connection, int]()
    results: dict[int, Sent] = {}
    following = 0
    for wanted in range(len(units)):
        while wanted not in results:
            while idle and following < min(len(units), wanted + (1 + _AHEAD) * len(pipes)):
                pipe = idle.pop()
                pipe.send((units[following], number))
                busy[pipe] = following
                following += 1
            ready = multiprocessing.connection.wait([*busy])
            for pipe in [one for one in busy if one in ready]:
                found = pipe.recv()
                if isinstance(found, Exception):
                    raise found
                results[busy.pop(pipe)] = found
                idle.append(pipe)
        yield results.pop(wanted)
