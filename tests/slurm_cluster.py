"""A real Slurm cluster of two nodes on this machine, for tests: Debian's slurm-wlm and munge."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "sinfo")
# Debian's directories of the daemons, which are not on every user's PATH.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
PATIENCE = 60.0

# Two nodes of four cores, whatever this machine has: jobs are not bound to cores. No accounting;
# processes are tracked by their parents, which needs no cgroups.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
KillWait=20
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=64000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=64000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no cluster can be started here; empty if one can."""
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if lacking:
        return f"no {', '.join(lacking)} here (Debian: apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started by root only"


def free_ports(number: int) -> list[int]:
    """Return free TCP ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Start a cluster, yield its environment, and end it with all its processes."""
    # Not in pytest's folder: munged requires one that is accessible to all users, and a short name.
    folder = Path(tempfile.mkdtemp(prefix="slurm."))
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    config = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    config.write_text(CONFIG.format(host=host, folder=folder, ports=free_ports(3)))
    environment = {"SLURM_CONF": str(config), "PATH": PATH}
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    munge.append(f"--socket={folder}/munge.socket")
    daemons = []
    try:
        daemons.append(start(folder, environment, "munged", "--foreground", *munge))
        wait_for(folder, (folder / "munge.socket").exists)
        daemons.append(start(folder, environment, "slurmctld", "-D"))
        for node in ("n1", "n2"):
            daemons.append(start(folder, environment, "slurmd", "-D", "-N", node))
        wait_for(folder, lambda: idle_nodes(environment) == ["n1", "n2"])
        yield environment
    finally:
        end(str(config))
        for daemon in daemons:
            daemon.wait()
        shutil.rmtree(folder)


def start(folder: Path, environment: dict[str, str], *command: str) -> subprocess.Popen:
    """Start a daemon that ends with this process and writes into a log."""
    with open(folder / f"{command[0]}.{command[-1].rpartition('/')[2]}.out", "wb") as output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *command],
            env={**os.environ, **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def idle_nodes(environment: dict[str, str]) -> list[str]:
    """Return the nodes that would take a job."""
    listed = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return listed.stdout.split()


def wait_for(folder: Path, condition) -> None:
    """Wait for a step of the start; fail with the daemons' logs if it does not come."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            logs = [f"{path.name}:\n{path.read_text()[-3000:]}" for path in folder.glob("*.out")]
            raise RuntimeError("\n".join(["Slurm does not start", *logs]))
        time.sleep(0.1)


def end(config: str) -> None:
    """Kill every process of the cluster: daemons, jobs and processes that wait for them.

    Jobs are not children of this process, but all of them have inherited SLURM_CONF.
    """
    deadline = time.monotonic() + PATIENCE
    while found := processes(config):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"cannot kill {found}"
        time.sleep(0.05)


def processes(config: str) -> list[int]:
    """Return every running process whose environment names the configuration file."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if f"SLURM_CONF={config}".encode() in variables:
                found.append(int(entry.name))
    return found
