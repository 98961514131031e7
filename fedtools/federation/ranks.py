"""Rounds distributed over the processes of a launcher, on any number of machines.

Started by `srun -n 8 fedtools rounds EXP`, `mpirun` or `torchrun`, or by hand with RANK and
WORLD_SIZE set. Rank 0 samples and aggregates; every rank trains its jobs of a round. Ranks
communicate only through files in the experiment's folder, which all can access (a network file
system is enough), so that the results are those of single commands:

    EXP/ranks/<rank>      JSON of a rank: host, process, a random word, start time, and the word of
                          the rank 0 that it follows; written every few seconds
    EXP/ranks/run         JSON of rank 0: the words of the ranks it has accepted, its last round and
                          turn, and whether it has ended; of a secure sum, each step is a turn
    EXP/ranks/<rank>.err  the same as EXP/ranks/<rank>, and why the rank stopped

A rank that stops responding ends the run with one message; the same command resumes it. Ranks that
outlive a killed run are not part of the next one, since they follow another rank 0. Of two
processes with the same rank the younger one continues.
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

from fedtools.core.atomic import is_running, machine, write_text
from fedtools.core.errors import UserError
from fedtools.exchange.experiment import Experiment
from fedtools.federation.federation import Federation
from fedtools.federation.secure_round import replies_in
from fedtools.federation.steps import marks_of, train_local

# The variables in which launchers give a process its rank, the number of ranks, and its rank on the
# machine.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
_BEAT = 2.0
# The most seconds until a network file system shows a file, and until all ranks have started.
_PATIENCE, _COMING = 60.0, 600.0
_POLL = 0.01
_POLL_AT_MOST = 0.2


@dataclass(frozen=True)
class Rank:
    """The rank of a process among `size` processes, and among those on its machine."""

    number: int
    size: int
    local: int


def find_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Return the rank that a launcher gave this process; None for a single process."""
    for names in _LAUNCHERS:
        values = [environment.get(name, "") for name in names]
        if values[0].isdecimal() and values[1].isdecimal() and int(values[1]) > 1:
            number, size = int(values[0]), int(values[1])
            if number >= size:
                raise UserError(f"{names[0]} is {number}, {names[1]} is {size}")
            return Rank(number, size, int(values[2]) if values[2].isdecimal() else number)
    return None


class _Sign:
    """A rank's heartbeat, written by a thread while a block runs.

    Attributes:
        leader: the word of the rank 0 that this rank follows, "" before it has found one.
        replaced: whether a younger process has taken this rank.
    """

    def __init__(self, folder: Path, rank: int):
        self.word, self.leader, self.replaced = secrets.token_hex(8), "", False
        self._begun = time.time()
        self._path, self._error = folder / str(rank), folder / f"{rank}.err"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _status(self, **more: str) -> str:
        status = {"host": machine(), "process": os.getpid(), "word": self.word}
        return json.dumps({**status, "begun": self._begun, "leader": self.leader, **more}) + "\n"

    def _beat(self) -> None:
        while True:
            begun = _read_json(self._path).get("begun")
            if isinstance(begun, float) and begun > self._begun:
                self.replaced = True
                return
            # Written completely each time, since rank 0 removes files of earlier runs.
            with contextlib.suppress(OSError):
                self._path.write_text(self._status())
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
                self._path.write_text(self._status())
                write_text(self._error, self._status(reason=reason))


class _Ended(Exception):
    """Raised when rank 0 has ended the run."""


class _Watch:
    """Monitor of another rank: its file must change, and on this machine its process must exist.

    Args:
        folder: the folder of the ranks' files.
        rank: the rank to monitor.
        leader: the word of the rank 0 that it must follow, "" if it is rank 0; a file with another
            word is left from an earlier run.
    """

    def __init__(self, folder: Path, rank: int, leader: str = ""):
        self.rank = rank
        # Whether the rank has joined this run; before that it may be absent.
        self.met = False
        self._leader = leader
        self._path, self._error = folder / str(rank), folder / f"{rank}.err"
        self._content: dict[str, Any] = {}
        self._changed: tuple[float, int] = (time.monotonic(), 0)
        self._checked = 0.0

    def read(self) -> dict[str, Any]:
        """Return the last content of the rank's file, {} if there is none."""
        with contextlib.suppress(OSError):
            status = self._path.stat()
            if status.st_mtime_ns != self._changed[1]:
                self._changed = time.monotonic(), status.st_mtime_ns
                found = _read_json(self._path)
                # The file is written in place, and may briefly be empty.
                if found and found.get("leader") in ("", self._leader):
                    self._content = found
        return self._content

    def check(self, experiment: Path) -> None:
        """Raise a `UserError` if the rank has stopped."""
        now = time.monotonic()
        if now - self._checked < 1.0:
            return
        self._checked = now
        found, error = self.read(), _read_json(self._error)
        if found and error.get("word") == found.get("word") and (self.met or self._leader):
            raise UserError(f"rank {self.rank} stopped: {error.get('reason')}")
        if not self.met:
            return
        stopped = now - self._changed[0] > _PATIENCE
        if found.get("host") == machine():
            process = found.get("process")
            stopped = stopped or not (isinstance(process, int) and is_running(process))
        if stopped:
            raise UserError(
                f"rank {self.rank} stopped responding",
                path=experiment,
                remedy="the same command goes on from here",
            )


@contextlib.contextmanager
def lead(federation: Federation, rank: Rank) -> Iterator[Callable[[int, int], None]]:
    """Yield rank 0's function that trains all jobs of a round: (round, number of jobs)."""
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
        turn = 0

        def announce(number: int, ended: bool = False) -> None:
            words = {str(one.rank): one.read().get("word") for one in others}
            run = {"words": words, "round": number, "turn": turn, "ended": ended}
            run["replies"] = replies_in(federation.experiment.round(number).path)
            # Written again if words change: a rank of an earlier run may have answered first.
            if run != announced:
                write_text(folder / "run", json.dumps(run) + "\n")
                announced.update(run)

        def train(number: int, jobs: int) -> None:
            nonlocal turn
            turn += 1
            announce(number)
            marks = marks_of(federation, number)
            for job in range(1, jobs + 1, rank.size):
                train_local(federation, number, job)

            def complete() -> bool:
                announce(number)
                return all(_appears(mark) for mark in marks)

            _await(complete, None, others, path)

        try:
            yield train
        finally:
            announce(0, ended=True)


def follow(path: str | Path, rank: Rank, device: str, keys: Path | None = None) -> None:
    """Train this rank's jobs of every round until rank 0 has ended the run; for other ranks."""
    folder = Path(path) / "ranks"
    leader = _Watch(folder, 0)
    with contextlib.suppress(_Ended), _Sign(_made(folder), rank.number) as sign:
        federation = Federation(path, device, keys)
        turn, begun, words = 0, time.monotonic(), set()
        while True:

            def called() -> bool:
                run = _read_run(folder, rank.number, sign.word)
                leader.met = leader.met or bool(run)
                if leader.met:
                    words.add(leader.read().get("word"))
                    sign.leader = sign.leader or leader.read().get("word", "")
                elif time.monotonic() - begun > _COMING:
                    raise UserError("rank 0 did not start", path=path)
                if len(words) > 1 or sign.replaced:
                    raise UserError("another run has begun", path=path)
                if run.get("ended"):
                    raise _Ended
                return bool(run.get("turn", 0) > turn)  # noqa: B023

            _await(called, None, [leader], Path(path))
            run = _read_run(folder, rank.number, sign.word)
            number, turn = run["round"], run["turn"]
            needed = _needed(federation.experiment, number, run["replies"])
            _await(lambda: all(map(_appears, needed)), _PATIENCE, [leader], Path(path))  # noqa: B023
            jobs = federation.experiment.round(number).jobs()
            for job in range(rank.number + 1, jobs + 1, rank.size):
                train_local(federation, number, job)


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _needed(experiment: Experiment, number: int, replies: list[str]) -> list[Path]:
    """Return the files that rank 0 writes before a round, or a step of it, can be trained."""
    before, folder = experiment.round(number - 1), experiment.round(number)
    marks = [before.done] if number > 1 else []
    return [*marks, folder.global_state, folder.path / "jobs", *map(folder.path.joinpath, replies)]


def _read_run(folder: Path, rank: int, word: str) -> dict[str, Any]:
    """Read rank 0's announcement to this process; return {} before there is one."""
    run = _read_json(folder / "run")
    words = run.get("words")
    return run if isinstance(words, dict) and words.get(str(rank)) == word else {}


def _read_json(path: Path) -> dict[str, Any]:
    """Read the mapping in a file; return {} if the file is missing or incomplete."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _appears(path: Path) -> bool:
    if path.exists():
        return True
    # Listing the folder refreshes the cache of a network file system.
    with contextlib.suppress(OSError):
        list(path.parent.iterdir())
    return path.exists()


def _await(
    ready: Callable[[], bool], patience: float | None, others: list[_Watch], path: Path
) -> None:
    """Wait until `ready()`; raise a `UserError` if another rank stops or patience runs out."""
    begun, pause = time.monotonic(), _POLL
    while not ready():
        for other in others:
            other.check(path)
        if patience is not None and time.monotonic() - begun > patience:
            raise UserError("not all ranks started", path=path, remedy="look into their logs")
        time.sleep(pause)
        pause = min(1.2 * pause, _POLL_AT_MOST)
