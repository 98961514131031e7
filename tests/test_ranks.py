"""One federation over the processes of a launcher: the same bytes as in one process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import commands
import counts
import pytest

from fedtools.core.errors import UserError
from fedtools.federation.ranks import Rank, _Sign, find_rank

SIZE = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return counts.make_world(tmp_path_factory.mktemp("counts"))


@pytest.fixture(scope="module")
def reference(world) -> Path:
    path = counts.begin(world, world / "reference")
    counts.fedtools(world, "rounds", path).ok()
    return path


def start(path: Path, rank: int, *more: str, size: int = SIZE, **env: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "fedtools", "rounds", str(path), *more]
    env = {"RANK": str(rank), "WORLD_SIZE": str(size), **env}
    pipe = subprocess.PIPE
    # Ranks know each other by their process numbers.
    return commands.start(*command, env=env, stdout=pipe, stderr=pipe, cold=True)


def wait(process: subprocess.Popen) -> tuple[int, str]:
    _, error = process.communicate(timeout=100)
    assert "Traceback" not in error, error
    return process.returncode, error


def eventually(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _text(path: Path) -> str:
    """Return the text of a file that another process may remove."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_run_and_the_same_command_goes_on(
    world, reference, tmp_path, dead
):
    path, env = counts.begin(world, tmp_path / "exp"), counts.environment(world)
    ranks = [start(path, rank, SLOW="0.7", **env) for rank in range(SIZE)]
    eventually(lambda: (path / "round_0001" / ".done").exists())
    ranks[dead].kill()
    ranks[dead].wait()
    for rank, process in enumerate(ranks):
        code, error = wait(process)
        if rank != dead and 0 in (dead, rank):
            assert code == 1 and f"rank {dead} stopped responding" in error, error
            lines = [line for line in error.splitlines() if line.startswith("fedtools:")]
            assert len(lines) == 1
    assert not (path / "round_0004" / ".done").exists()
    for process in [start(path, rank, **env) for rank in range(SIZE)]:
        code, error = wait(process)
        assert code == 0, error
    assert counts.states(path) == counts.states(reference)


def test_a_rank_that_outlives_a_killed_run_does_not_end_the_next(world, reference, tmp_path):
    path, env = counts.begin(world, tmp_path / "exp"), counts.environment(world)
    killed, orphan = (start(path, rank, size=2, SLOW="0.5", **env) for rank in range(2))
    eventually(lambda: (path / "round_0001" / ".done").exists())
    # It sleeps, like a machine that is unreachable for a while, and wakes up during the next run.
    os.kill(orphan.pid, signal.SIGSTOP)
    killed.kill()
    killed.wait()
    first = start(path, 0, size=2, **env)
    beat = path / "ranks" / "0"
    eventually(lambda: f'"process": {first.pid},' in _text(beat))
    os.kill(orphan.pid, signal.SIGCONT)
    code, error = wait(orphan)
    assert code == 1 and "another run has begun" in error
    assert (path / "ranks" / "1.err").exists()
    # Longer than rank 0 needs to see that the orphan stopped, and why.
    time.sleep(2.5)
    second = start(path, 1, size=2, **env)
    for process in (first, second):
        code, error = wait(process)
        assert code == 0, error
    assert counts.states(path) == counts.states(reference)


def test_of_two_processes_with_one_rank_the_younger_stays(tmp_path):
    older, younger = _Sign(tmp_path, 1), _Sign(tmp_path, 1)
    younger._begun = older._begun + 1
    with younger:
        eventually((tmp_path / "1").exists)
        with pytest.raises(UserError), older:
            eventually(lambda: older.replaced)
            raise UserError("rank 0 stopped responding")
        assert younger.word in (tmp_path / "1").read_text() and not younger.replaced
        assert not (tmp_path / "1.err").exists()


def test_a_rank_that_fails_says_why(world, tmp_path):
    path, env = counts.begin(world, tmp_path / "exp"), counts.environment(world)
    ranks = [start(path, rank, **env, **({"FAIL": "no room"} if rank == 1 else {}))
             for rank in range(SIZE)]  # fmt: skip
    errors = [wait(one) for one in ranks]
    assert errors[0][0] == errors[1][0] == 1
    assert "rank 1 stopped: no room" in errors[0][1] and "no room" in errors[1][1]


def test_launchers_name_ranks_in_their_own_ways():
    slurm = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    assert find_rank(slurm) == Rank(2, 4, 0)
    # A batch script without srun has a process and no rank.
    assert find_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert find_rank(mpi) == Rank(1, 2, 1)
    assert find_rank({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_rank({"RANK": "1", "WORLD_SIZE": "2", **slurm}) == Rank(1, 2, 1)
    assert find_rank({}) is None
    with pytest.raises(UserError, match="RANK is 3, WORLD_SIZE is 3"):
        find_rank({"RANK": "3", "WORLD_SIZE": "3"})
