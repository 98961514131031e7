"""Programs for PATH that are run by forks of servers: see `fork_client.py`.

A run of all tests starts some thousand short processes, each of which would spend two seconds
importing torch.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

from fork_client import kept

# The directory of the servers and the programs, shared by all processes of a test run.
FOLDER = "FEDTOOLS_TESTS_FORKS"
# In the environment of one program, the kind of server that runs it: "light" or "torch".
KIND = "FEDTOOLS_TESTS_KIND"
CLIENT = Path(__file__).with_name("fork_client.py")
FEDTOOLS = """\
#!/bin/sh
exec {client} "${{{kind}:-torch}}" {fedtools} "$@"
"""
# Scripts of recipes, `-c`, `-m fedtools`, and what multiprocessing spawns; everything else
# is not forked. Scripts find packages without torch imported, except those that train or draw.
PYTHON = """\
#!/bin/sh
case "$*" in
    *" --multiprocessing-fork")
        # Options of an interpreter come from its environment, which a server has, too.
        while [ "$1" != -c ]; do shift; done
        exec {client} "${{{kind}:-torch}}" "$@"
        ;;
esac
case $1 in
    # It ends with its parent, which would be a server. It imports little.
    *utils/run.py) exec {python} "$@" ;;
    -c | {heavy}) exec {client} "${{{kind}:-torch}}" "$@" ;;
    *local/*.py | *utils/*.py) exec {client} light "$@" ;;
esac
case "$1 $2" in "-m fedtools") exec {client} "${{{kind}:-torch}}" "$@" ;; esac
exec {python} "$@"
"""
HEAVY = ("arms.py", "begin.py", "landscape.py", "plot_clients.py", "price.py", "report.py")


def make_folder(owner: int) -> Path:
    """Write the programs and return their directory, to be removed; servers end with `owner`."""
    # Not in pytest's directory: a socket's path is at most 107 bytes long.
    folder = Path(tempfile.mkdtemp(prefix="forks."))
    programs = Path(sys.executable).parent
    words = (sys.executable, "-IS", CLIENT, folder, owner, kept(dict(os.environb)))
    words += (os.environ.get("PYTHONPATH", ""),)
    texts = {
        "client": shlex.join(map(str, words)),
        "fedtools": shlex.quote(str(programs / "fedtools")),
        "python": shlex.quote(sys.executable),
        "heavy": " | ".join(f"*/{name}" for name in HEAVY),
        "kind": KIND,
    }
    (folder / "bin").mkdir()
    for name, text in (("fedtools", FEDTOOLS), ("python3", PYTHON)):
        program = folder / "bin" / name
        program.write_text(text.format(**texts))
        program.chmod(0o755)
    return folder


def programs() -> Path | None:
    """Return the directory of the programs, if this process belongs to a run of tests."""
    folder = os.environ.get(FOLDER)
    return Path(folder) / "bin" if folder else None


def forked(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which fedtools and Python's scripts are forks of a server."""
    return environment | {"PATH": f"{programs()}:{environment['PATH']}"}


def seconds() -> float:
    """Return the processor time of the servers and of their forks that have ended."""
    ticks = 0
    for file in Path(os.environ[FOLDER]).glob("*.pid"):
        stat = Path(f"/proc/{file.read_text()}/stat").read_text()
        # Of itself and of its children, user and system.
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def cold() -> int:
    """Return the number of programs that could not be forks: see `fork_client.py`."""
    file = Path(os.environ[FOLDER]) / "cold"
    return len(file.read_text().splitlines()) if file.exists() else 0
