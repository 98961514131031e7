"""One federation over the processes of a launcher: the same bytes as in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keyword_world
import pytest
from conftest import ROOT, fedtools, inside, ledger

SIZE = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return keyword_world.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def reference(world) -> Path:
    """All rounds in one process."""
    path = keyword_world.begin(world, world / "reference")
    inside("rounds", path, "--evaluate", "test").ok()
    return path


def states(path: Path) -> dict[str, bytes]:
    files = [*path.glob("round_*/global.safetensors"), *path.glob("clients/*/round_*/*")]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def start(path: Path, rank: int, *more: str, names=("RANK", "WORLD_SIZE")) -> subprocess.Popen:
    command = [sys.executable, "-m", "fedtools", "rounds", str(path), *more]
    env = {**os.environ, names[0]: str(rank), names[1]: str(SIZE)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


def wait(process: subprocess.Popen) -> tuple[int, str]:
    _, error = process.communicate(timeout=100)
    return process.returncode, error


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_ranks_give_the_same_bytes(world, reference, tmp_path, names):
    path = keyword_world.begin(world, tmp_path / "exp")
    # What an earlier run has left is no rank of this one.
    (path / "ranks").mkdir()
    for name in ("0", "1", "run", "2.err"):
        (path / "ranks" / name).write_text('{"word": "old", "host": "", "process": 1}\n')
    # In any order, rank 0 among the last.
    ranks = [start(path, rank, "--evaluate", "test", names=names) for rank in (2, 0, 1)]
    for process in ranks:
        code, error = wait(process)
        assert code == 0, error
    assert states(path) == states(reference)
    tables = [(one / "evaluate_test.tsv").read_text() for one in (path, reference)]
    assert tables[0] == tables[1]
    assert all((path / f"round_0001/update.{job}.tsv").exists() is False for job in range(1, 4))
    for ours, theirs in zip(ledger(path), ledger(reference), strict=True):
        assert {**ours, "seconds": ""} == {**theirs, "seconds": ""}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_run_and_the_same_command_goes_on(
    world, reference, tmp_path, dead
):
    path = keyword_world.begin(world, tmp_path / "exp")
    ranks = [start(path, rank) for rank in range(SIZE)]
    deadline = time.monotonic() + 60
    while not (path / "round_0001" / ".done").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks[dead].kill()
    ranks[dead].wait()
    for rank, process in enumerate(ranks):
        code, error = wait(process)
        if rank == dead:
            assert code == -signal.SIGKILL
        elif (path / "round_0004" / ".done").exists():
            pytest.skip("the run was over before the kill")
        elif dead == 0 or rank == 0:
            assert code == 1 and f"rank {dead} is seen no more" in error, error
            lines = [line for line in error.splitlines() if line.startswith("fedtools:")]
            assert len(lines) == 1 and "Traceback" not in error
    for process in [start(path, rank) for rank in range(SIZE)]:
        code, error = wait(process)
        assert code == 0, error
    assert states(path) == states(reference)


def test_a_rank_that_fails_says_why(world, tmp_path):
    """An error of one rank is the one line of the run."""
    path = keyword_world.begin(world, tmp_path / "exp", "fedavg", "method_conf.min_clients=6")
    ranks = [start(path, rank) for rank in range(SIZE)]
    errors = [wait(process) for process in ranks]
    assert errors[0][0] == 0
    path = keyword_world.begin(world, tmp_path / "other")
    (path / "round_0001" / "update.2.safetensors").mkdir(parents=True)
    ranks = [start(path, rank) for rank in range(SIZE)]
    errors = [wait(process) for process in ranks]
    assert errors[0][0] == 1 and "rank 1 stopped" in errors[0][1], errors
    assert errors[1][0] == 1 and "update.2.safetensors" in errors[1][1]
    assert all("Traceback" not in error for _, error in errors)


def test_a_rank_alone_gives_up(world, tmp_path):
    path = keyword_world.begin(world, tmp_path / "exp")
    env = {"RANK": "3", "WORLD_SIZE": "3"}
    fedtools("rounds", path, env=env).fails(1, "RANK is 3, WORLD_SIZE is 3")
    # One process is no federation of ranks.
    env = {"RANK": "0", "WORLD_SIZE": "1"}
    fedtools("rounds", path, "--to", "1", env=env).ok()
    assert not (path / "ranks").exists()
