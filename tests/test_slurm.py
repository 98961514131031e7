"""utils/slurm.py on a real Slurm cluster: two nodes, both on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keyword_world
import pytest
import slurm_cluster
import small_recipe
from commands import alive, wait_until
from conftest import ROOT, Result, inside, run

RUN = ROOT / "utils/run.py"
SLURM = ROOT / "utils/slurm.py"

pytestmark = pytest.mark.skipif(bool(slurm_cluster.why_not()), reason=slurm_cluster.why_not())


class Cluster:
    """A user's shell on the cluster: an environment and a working directory."""

    def __init__(self, environment: dict[str, str], folder: Path):
        # The nodes' python3 and fedtools are those of the tests, as path.sh would set them.
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self.environment, self.folder = {**environment, "PATH": path}, folder

    def __call__(self, *command: str | Path) -> Result:
        return run(*command, cwd=self.folder, env=self.environment)

    def submit(self, *arguments: str | Path) -> subprocess.Popen:
        """Start utils/slurm.py without waiting for it."""
        return subprocess.Popen(
            [str(word) for word in (SLURM, *arguments)],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def jobs(self) -> list[str]:
        """Return Slurm's running and pending jobs."""
        return self("squeue", "--noheader").ok().out.splitlines()

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(f"#!/usr/bin/env bash\nset -euo pipefail\n{text}")
        path.chmod(0o755)
        return path

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    with slurm_cluster.slurm_cluster() as variables:
        yield variables


@pytest.fixture
def cluster(environment, tmp_path) -> Iterator[Cluster]:
    folder = tmp_path / "a folder"
    folder.mkdir()
    cluster = Cluster(environment, folder)
    yield cluster
    cluster("scancel", "--user", "root").ok()
    wait_until(lambda: not cluster.jobs())


def timeless(log: str) -> str:
    """Return a log without its times."""
    log = re.sub(r"(?<= at )\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}", "TIME", log)
    return re.sub(r"(?<=time[ =])\d+", "N", log)


def test_an_array_runs_as_on_one_machine(cluster):
    (cluster.folder / "path.sh").write_text("export FROM_PATH='path.sh was here'\n")
    command = ["echo", "job JOB", 'say "JOB  it\'s"', "${FROM_PATH:-path.sh was here}", "|", "cat"]
    options = ["--config", ROOT / "conf/slurm.conf", "--mem", "1G", "--num-threads", "2"]
    # An array that Slurm has forgotten blocks nothing.
    (cluster.folder / "there/q").mkdir(parents=True)
    (cluster.folder / "there/q/x.JOB.id").write_text("999999\n")
    cluster(SLURM, *options, "JOB=2:4", "there/x.JOB.log", *command).ok()
    cluster(RUN, *options, "JOB=2:4", "here/x.JOB.log", *command).ok()
    logs = sorted(path.name for path in (cluster.folder / "here").glob("*.log"))
    assert logs == ["x.2.log", "x.3.log", "x.4.log"]
    assert logs == sorted(path.name for path in (cluster.folder / "there").glob("*.log"))
    for name in logs:
        log = timeless(cluster.read(f"there/{name}"))
        assert log == timeless(cluster.read(f"here/{name}"))
        assert f'job {name[2]} say "{name[2]}  it\'s" path.sh was here\n# Accounting' in log
    assert not (cluster.folder / "there/q/x.JOB.id").exists()


def test_a_failure_shows_its_log(cluster):
    command = ["echo", "before;", "[", "JOB", "-ne", "2", "]", "||", "exit", "3"]
    failed = cluster(SLURM, "JOB=1:3", "log/x.JOB.log", *command)
    assert failed.code == 1
    assert "1 of 3 jobs failed" in failed.err
    assert "the end of log/x.2.log" in failed.err
    assert "before" in failed.err
    assert "log/x.1.log" not in failed.err
    assert "# Ended (code 3) at" in cluster.read("log/x.2.log")
    refused = cluster(SLURM, "--time", "nonsense", "log/y.log", "true")
    assert refused.code == 1
    assert "slurm.py: sbatch failed" in refused.err
    assert not (cluster.folder / "log/q/y.id").exists()
    large = cluster(SLURM, "JOB=1:100000", "log/z.JOB.log", "true")
    assert large.code == 1
    assert "(MaxArraySize), and this one at 100000: lower --nj" in large.err


# A job records its own and its child's number, and reports if one of another array still runs.
# A killed process that is not reaped yet (a zombie) does not run, but `kill -0` would count it.
MARKED = r"""
for file in pid.*; do
    [[ $file == "pid.$SLURM_ARRAY_JOB_ID."* || ! -s $file ]] && continue
    for pid in $(cat "$file"); do
        state=$(ps -o stat= -p "$pid" || true)
        [[ -z $state || $state == Z* ]] ||
            echo "$file: $pid ($state) runs beside $SLURM_ARRAY_JOB_ID" >>overlap
    done
done
sleep "$1" &
echo $$ $! >"pid.$SLURM_ARRAY_JOB_ID.$SLURM_ARRAY_TASK_ID"
wait $!
"""


def started(cluster: Cluster, number: int) -> list[int]:
    """Wait until a number of marked jobs run; return the processes of all marked jobs."""
    files = cluster.folder.glob
    wait_until(lambda: len([path for path in files("pid.*") if path.read_text()]) == number)
    return [int(pid) for path in files("pid.*") for pid in path.read_text().split()]


def test_sigterm_cancels_the_array(cluster):
    job = cluster.script("job.sh", MARKED)
    submitter = cluster.submit("-tc", "2", "JOB=1:4", "log/x.JOB.log", job, "100")
    processes = started(cluster, 2)
    submitter.send_signal(signal.SIGTERM)
    assert submitter.wait(timeout=60) == 128 + signal.SIGTERM
    wait_until(lambda: not cluster.jobs())
    assert not any(map(alive, processes))
    assert len(list(cluster.folder.glob("pid.*"))) == 2
    for number in (1, 2):
        assert re.search(r"# Ended \(code 1(37|43)\)", cluster.read(f"log/x.{number}.log"))


def test_a_killed_submitters_array_never_runs_beside_its_reruns(cluster):
    job = cluster.script("job.sh", MARKED)
    submitter = cluster.submit("-tc", "2", "JOB=1:4", "log/x.JOB.log", job, "100")
    processes = started(cluster, 2)
    submitter.kill()
    submitter.wait(timeout=60)
    assert len(cluster.jobs()) == 3  # two that run, and a line for pending ones
    assert all(map(alive, processes))
    old = cluster.read("log/q/x.JOB.id").strip()
    rerun = cluster(SLURM, "JOB=1:3", "log/x.JOB.log", job, "0.1").ok()
    overlap = cluster.folder / "overlap"
    assert not overlap.exists(), overlap.read_text()
    assert not any(map(alive, processes))
    assert f"cancelling array {old} of an earlier run" in rerun.err
    assert len(list(cluster.folder.glob(f"pid.{old}.*"))) == 2
    assert len(list(cluster.folder.glob("pid.*"))) == 2 + 3
    for number in (1, 2, 3):
        assert "# Ended (code 0)" in cluster.read(f"log/x.{number}.log")
    assert not (cluster.folder / "log/q/x.JOB.id").exists()


def test_ranks_are_spread_over_nodes_as_the_config_says(cluster):
    text = (ROOT / "conf/slurm.conf").read_text()
    other = "option ntasks=* --ntasks $0 --ntasks-per-node 1"
    assert f"# {other}\n" in text  # options for users to choose
    (cluster.folder / "nodes.conf").write_text(
        text.replace(f"# {other}\n", "").replace("option ntasks=* --ntasks $0", other)
    )
    command = ["echo", "$RANK/$WORLD_SIZE", "$SLURM_PROCID", "$SLURMD_NODENAME", "|", "cat"]
    options = ["--config", "nodes.conf", "--ntasks", "2", "--num-threads", "2"]
    cluster(SLURM, *options, "x.log", *command).ok()
    head, *_, one, two, accounting, ended = cluster.read("x.log").splitlines()
    assert head == "# echo $RANK/$WORLD_SIZE $SLURM_PROCID $SLURMD_NODENAME | cat"
    assert sorted([one, two]) == ["0/2 0 n1", "1/2 1 n2"]
    assert accounting == "# Accounting: time=0 threads=2"
    assert ended.startswith("# Ended (code 0) at")


def test_a_rank_that_fails_ends_the_others(cluster):
    job = cluster.script(
        "job.sh",
        """[ "$RANK" = 1 ] || { echo $$ >pid; exec sleep 100; }
        until [ -s pid ]; do sleep 0.05; done
        echo enough of this
        exit 3
        """,
    )
    failed = cluster(SLURM, "--ntasks", "2", "log/x.log", job)
    assert failed.code == 1
    assert "enough of this\n" in failed.err
    assert "task 1: Exited with exit code 3\n" in failed.err
    assert not alive(int(cluster.read("pid")))


def global_states(experiment: Path) -> dict[str, bytes]:
    """Return the global state of every round of an experiment."""
    return {
        path.parent.name: path.read_bytes()
        for path in sorted(experiment.glob("round_*/global.safetensors"))
    }


ROUNDS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make keyword clips, and `local`, an experiment whose rounds were computed without Slurm."""
    root = keyword_world.make_world(tmp_path_factory.mktemp("world"))
    local = keyword_world.begin(root, root / "local")
    inside("rounds", local, "--to", ROUNDS).ok()
    return root


def test_a_federation_on_the_cluster_gives_the_same_bytes(cluster, world):
    path = keyword_world.begin(world, cluster.folder / "exp")
    train = ["fedtools", "train-local", path, "--job", "JOB"]
    for number in range(1, ROUNDS + 1):
        inside("sample", path, "--nj", 2).ok()
        cluster(SLURM, "JOB=1:2", f"exp/round_{number:04d}/log/local.JOB.log", *train).ok()
        inside("aggregate", path).ok()
    states = global_states(world / "local")
    assert len(states) == ROUNDS + 1
    assert len(set(states.values())) == ROUNDS + 1
    assert global_states(path) == states


def test_rounds_over_ranks_on_two_nodes_give_the_same_bytes(cluster, world):
    path = keyword_world.begin(world, cluster.folder / "ranks")
    command = ["fedtools", "rounds", path, "--to", ROUNDS]
    cluster(SLURM, "--ntasks", "2", "log/rounds.log", *command).ok()
    assert global_states(path) == global_states(world / "local")
    # Both ranks took part.
    assert (path / "round_0001" / "jobs").read_text() == "2\n"


def test_waves_of_experiments_on_the_cluster_give_the_same_bytes(cluster, world):
    """Each wave is an array; the second starts when the first has ended."""
    recipe = small_recipe.make_recipe(
        cluster.folder / "a recipe", world, "train_cmd=utils/slurm.py"
    )
    lines = small_recipe.listed(world, "later", "exp/first", "--seed", "1")
    lines += small_recipe.listed(world, "first", "-") + small_recipe.listed(world, "beside", "-")
    small_recipe.order(recipe, lines).ok()
    cluster("bash", recipe / "run.sh").ok()
    ended = {name: recipe / "exp" / name / "round_0002/.done" for name in ("first", "later")}
    begun = (recipe / "exp/later/config.yaml").stat().st_mtime
    assert ended["first"].stat().st_mtime <= begun < ended["later"].stat().st_mtime
    alone = keyword_world.begin(world, cluster.folder / "alone", "fedavg", "rounds=2")
    inside("rounds", alone).ok()
    assert global_states(recipe / "exp/first") == global_states(alone)
    assert global_states(recipe / "exp/beside") == global_states(alone)
    assert (recipe / "exp/log/train.3.log").read_text().startswith("# utils/line.sh list 3 ")
