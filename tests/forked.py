"""Programs for PATH that are run by forks of a server: see `fork_client.py`.

Recipes start some ninety short processes, each of which would spend two seconds importing torch.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path

# The directory of the servers and the programs, shared by all processes of a test run.
FOLDER = "FEDTOOLS_TESTS_FORKS"
CLIENT = Path(__file__).with_name("fork_client.py")
FEDTOOLS = """\
#!/bin/sh
exec {client} {fedtools} "$@"
"""
# Scripts of recipes, and processes that multiprocessing spawns; everything else is not forked.
PYTHON = """\
#!/bin/sh
case "$*" in
    *" --multiprocessing-fork")
        # Options of an interpreter come from its environment, which a server has, too.
        while [ "$1" != -c ]; do shift; done
        exec {client} "$@"
        ;;
esac
case $1 in *local/*.py) exec {client} "$@" ;; esac
exec {python} "$@"
"""
# A command's first call has a process of its own; a directory per command records that it had one.
FIRST = """\
#!/bin/sh
name=$1
case $1 in attack) name="$1 $2" ;; esac
if mkdir -- {begun}/"$name" 2>/dev/null; then exec {fedtools} "$@"; fi
exec {forked} "$@"
"""


def make_folder(owner: int) -> Path:
    """Write the programs and return their directory, to be removed; servers end with `owner`."""
    # Not in pytest's directory: a socket's path is at most 107 bytes long.
    folder = Path(tempfile.mkdtemp(prefix="forks."))
    programs = Path(sys.executable).parent
    words = (sys.executable, "-IS", CLIENT, folder, owner)
    quoted = {
        "client": shlex.join(map(str, words)),
        "fedtools": shlex.quote(str(programs / "fedtools")),
        "python": shlex.quote(sys.executable),
    }
    (folder / "bin").mkdir()
    for name, text in (("fedtools", FEDTOOLS), ("python3", PYTHON)):
        program = folder / "bin" / name
        program.write_text(text.format(**quoted))
        program.chmod(0o755)
    return folder


def forked(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which fedtools and the scripts of recipes are forks of a server."""
    programs = f"{os.environ[FOLDER]}/bin"
    path = f"{programs}:{environment['PATH']}"
    return environment | {"PATH": path, "FORK_CLIENT_PYTHON": f"{programs}/python3"}


def first_unforked(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which each fedtools command is a fork from its second call on.

    First calls and all scripts have an interpreter of their own, as a user's have.

    Args:
        environment: with the real programs on its PATH.
        folder: for a program, and for a record of each command that was called.
    """
    begun = folder / "begun"
    begun.mkdir(parents=True)
    named = {
        "begun": begun,
        "fedtools": Path(sys.executable).parent / "fedtools",
        "forked": Path(os.environ[FOLDER]) / "bin" / "fedtools",
    }
    quoted = {name: shlex.quote(str(path)) for name, path in named.items()}
    program = folder / "fedtools"
    program.write_text(FIRST.format(**quoted))
    program.chmod(0o755)
    return forked(environment) | {"PATH": f"{folder}:{environment['PATH']}"}
