"""One federation over processes that a launcher started, on any number of machines.

`srun -n 8 fedtools rounds EXP`, or `mpirun`, `torchrun`, or processes by hand that have RANK and
WORLD_SIZE. Rank 0 samples and aggregates; every rank trains its jobs of a round. They meet in the
experiment's folder alone, which all see (a network file system will do), so that what they do is
what single commands would:

    EXP/ranks/<rank>      JSON of a rank: host, process, a random word, when it began, and the word
                          of the rank 0 that it follows; written every few seconds
    EXP/ranks/run         JSON of rank 0: the words of the ranks it has accepted, its last round,
                          and whether it has ended
    EXP/ranks/<rank>.err  the same as EXP/ranks/<rank>, and why the rank stopped

A rank that is seen no more ends the run with one line; the same command goes on from there. Ranks
that outlive a killed run do not count in the next: they follow another rank 0, and of two processes
with one rank the younger stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtools.federation.federation import Federation
from fedtools.federation.steps import train_local
from fedtools.files.atomic import is_running, machine, write_text
from fedtools.files.errors import UserError
from fedtools.files.experiment import Experiment

# How each launcher tells a process its rank, the number of ranks, and its rank on the machine.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_BEAT = 2.0
# A network file system may show a file that late; a rank may begin that much later than another.
_PATIENCE, _COMING = 60.0, 600.0
_POLL = 0.01
_POLL_AT_MOST = 0.2


@dataclass(frozen=True)
class Rank:
    """Which of `size` processes this is, and which of those on this machine."""

    number: int
    size: int
    local: int


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that a launcher gave this process; None if there is a single one."""
    for names in _LAUNCHERS:
        values = [environment.get(name, "") for name in names]
        if values[0].isdecimal() and values[1].isdecimal() and int(values[1]) > 1:
            number, size = int(values[0]), int(values[1])
            if number >= size:
                raise UserError(f"{names[0]} is {number}, {names[1]} is {size}")
            return Rank(number, size, int(values[2]) if values[2].isdecimal() else number)
    return None


class _Sign:
    """A rank's sign of life, given by a thread as long as a block lasts.

    Attributes:
        leader: the word of the rank 0 that this one follows, "" before it has met one.
        replaced: whether a younger process has this rank.
    """

    def __init__(self, folder: Path, rank: int):
        self.word, self.leader, self.replaced = secrets.token_hex(8), "", False
        self._begun = time.time()
        self._path, self._error = folder / str(rank), folder / f"{rank}.err"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _told(self, **more: str) -> str:
        told = {"host": machine(), "process": os.getpid(), "word": self.word}
        return json.dumps({**told, "begun": self._begun, "leader": self.leader, **more}) + "\n"

    def _beat(self) -> None:
        while True:
            begun = _read_json(self._path).get("begun")
            if isinstance(begun, float) and begun > self._begun:
                self.replaced = True
                return
            # Anew each time: rank 0 clears away what an earlier run has left.
            with contextlib.suppress(OSError):
                self._path.write_text(self._told())
            if self._stop.wait(_BEAT):
                return

    def __enter__(self) -> _Sign:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is not None and kind is not _Ended and not self.replaced:
            reason = " ".join(str(error).split()) or type(error).__name__
            with contextlib.suppress(OSError):
                self._path.write_text(self._told())
                write_text(self._error, self._told(reason=reason))


class _Ended(Exception):
    """Rank 0 has ended the run."""


class _Watch:
    """Whether another rank is alive: its file changes, and on this machine its process exists.

    Args:
        leader: the word of the rank 0 that it is to follow, or "" of rank 0 itself; what follows
            another one is left of an earlier run.
    """

    def __init__(self, folder: Path, rank: int, leader: str = ""):
        self.rank = rank
        # Whether it is known to be of this run: before that nobody misses it.
        self.met = False
        self._leader = leader
        self._path, self._error = folder / str(rank), folder / f"{rank}.err"
        self._content: dict[str, Any] = {}
        self._changed: tuple[float, int] = (time.monotonic(), 0)
        self._looked = 0.0

    def read(self) -> dict[str, Any]:
        """What the rank wrote, {} if nothing."""
        with contextlib.suppress(OSError):
            status = self._path.stat()
            if status.st_mtime_ns != self._changed[1]:
                self._changed = time.monotonic(), status.st_mtime_ns
                found = _read_json(self._path)
                # It is written in place, and may be empty for a moment.
                if found and found.get("leader") in ("", self._leader):
                    self._content = found
        return self._content

    def check(self, experiment: Path) -> None:
        """Raise a `UserError` if the rank has stopped."""
        now = time.monotonic()
        if now - self._looked < 1.0:
            return
        self._looked = now
        found, error = self.read(), _read_json(self._error)
        if found and error.get("word") == found.get("word") and (self.met or self._leader):
            raise UserError(f"rank {self.rank} stopped: {error.get('reason')}")
        if not self.met:
            return
        gone = now - self._changed[0] > _PATIENCE
        if found.get("host") == machine():
            process = found.get("process")
            gone = gone or not (isinstance(process, int) and is_running(process))
        if gone:
            raise UserError(
                f"rank {self.rank} is seen no more",
                path=experiment,
                remedy="the same command goes on from here",
            )


@contextlib.contextmanager
def lead(federation: Federation, rank: Rank) -> Iterator[Callable[[int, int], None]]:
    """As rank 0, yield a function that trains all jobs of a round: (round, number of jobs)."""
    path = federation.experiment.path
    folder = path / "ranks"
    folder.mkdir(exist_ok=True)
    for left in folder.iterdir():
        left.unlink(missing_ok=True)
    with _Sign(folder, 0) as sign:
        others = [_Watch(folder, number, sign.word) for number in range(1, rank.size)]
        _await(lambda: all(one.read() for one in others), _COMING, others, path)
        for other in others:
            other.met = True
        announced: dict[str, object] = {}

        def announce(number: int, ended: bool = False) -> None:
            words = {str(one.rank): one.read().get("word") for one in others}
            run = {"words": words, "round": number, "ended": ended}
            # Again where a rank of an earlier run had answered in another's place.
            if run != announced:
                write_text(folder / "run", json.dumps(run) + "\n")
                announced.update(run)

        def train(number: int, jobs: int) -> None:
            announce(number)
            folder = federation.experiment.round(number).path
            tables = [folder / f"update.{job}.tsv" for job in range(1, jobs + 1)]
            for job in range(1, jobs + 1, rank.size):
                train_local(federation, number, job)

            def complete() -> bool:
                announce(number)
                return all(_appears(table) for table in tables)

            _await(complete, None, others, path)

        try:
            yield train
        finally:
            announce(0, ended=True)


def follow(path: str | Path, rank: Rank, device: str) -> None:
    """As another rank, train this rank's jobs of every round until rank 0 has ended the run."""
    folder = Path(path) / "ranks"
    leader = _Watch(folder, 0)
    with contextlib.suppress(_Ended), _Sign(_made(folder), rank.number) as sign:
        federation = Federation(path, device)
        done, begun, words = 0, time.monotonic(), set()
        while True:

            def called() -> bool:
                run = _read_run(folder, rank.number, sign.word)
                leader.met = leader.met or bool(run)
                if leader.met:
                    words.add(leader.read().get("word"))
                    sign.leader = sign.leader or leader.read().get("word", "")
                elif time.monotonic() - begun > _COMING:
                    raise UserError("rank 0 has not come", path=path)
                if len(words) > 1 or sign.replaced:
                    raise UserError("another run has begun", path=path)
                if run.get("ended"):
                    raise _Ended
                return bool(run.get("round", 0) > done)  # noqa: B023

            _await(called, None, [leader], Path(path))
            done = _read_run(folder, rank.number, sign.word)["round"]
            needed = _needed(federation.experiment, done)
            _await(lambda: all(map(_appears, needed)), _PATIENCE, [leader], Path(path))  # noqa: B023
            jobs = federation.experiment.round(done).jobs()
            for job in range(rank.number + 1, jobs + 1, rank.size):
                train_local(federation, done, job)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _needed(experiment: Experiment, number: int) -> list[Path]:
    """What rank 0 has written before a round can be trained."""
    before, folder = experiment.round(number - 1), experiment.round(number)
    marks = [before.done] if number > 1 else []
    return [*marks, folder.global_state, folder.path / "jobs"]


def _read_run(folder: Path, rank: int, word: str) -> dict[str, Any]:
    """What rank 0 has announced to this very process; {} before that."""
    run = _read_json(folder / "run")
    words = run.get("words")
    return run if isinstance(words, dict) and words.get(str(rank)) == word else {}


def _read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file; {} if there is none, or it is half-written."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _appears(path: Path) -> bool:
    if path.exists():
        return True
    # A listing makes a network file system look again.
    with contextlib.suppress(OSError):
        list(path.parent.iterdir())
    return path.exists()


def _await(
    ready: Callable[[], bool], patience: float | None, others: list[_Watch], path: Path
) -> None:
    """Wait until something is so; a `UserError` if another rank stops, or patience ends."""
    begun, pause = time.monotonic(), _POLL
    while not ready():
        for other in others:
            other.check(path)
        if patience is not None and time.monotonic() - begun > patience:
            raise UserError("not all ranks came", path=path, remedy="look into their logs")
        time.sleep(pause)
        pause = min(1.2 * pause, _POLL_AT_MOST)
