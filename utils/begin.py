#!/usr/bin/env python3
"""Begin the experiments of some lines of a list that waves.py made, in forks of this process.

    begin.py [--nj N] LIST FIRST LAST fedtools init EXP --config CONFIG OPTIONS

For each line, this command, in which EXP is the experiment's folder and OPTIONS are its options, N
at a time. What torch takes to import, several times as long as to begin a small experiment, is
spent once. What a command prints follows the command. After one that fails no other is begun.

Exit status: 0; 1 if a command fails, with its message as the last line that is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import tempfile
from collections import deque
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

from fedtools.cli import main as run_fedtools
from fedtools.core.config import read_yaml
from fedtools.core.errors import UserError, exit_with_message
from fedtools.tasks import facts_of
from fedtools.tasks.base import task_of


def begin(command: list[str], said: Path) -> None:
    """Begin an experiment and exit; what is printed goes to a file."""
    with open(said, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = command
    run_fedtools()


def filled(command: list[str], line: list[str]) -> list[str]:
    """Return the command of an experiment's line, as `line.sh` does."""
    meant = {"EXP": line[1:2], "OPTIONS": line[3:]}
    return [part for word in command for part in meant.get(word, [word])]


def begin_all(commands: list[list[str]], jobs: int, folder: Path) -> bool:
    """Run all commands, or those up to the first that fails.

    Args:
        jobs: how many at a time.
        folder: where output is kept until it is printed.
    """
    waiting: deque[tuple[str, ForkProcess, Path]] = deque()
    left, good = deque(enumerate(commands)), True
    while waiting or (good and left):
        while good and left and len(waiting) < jobs:
            number, command = left.popleft()
            said = folder / str(number)
            process = get_context("fork").Process(target=begin, args=(command, said))
            process.start()
            waiting.append((shlex.join(command), process, said))
        line, process, said = waiting.popleft()
        process.join()
        if good:
            print(f"# {line}\n{said.read_text(errors='replace')}", end="", flush=True)
        good = good and process.exitcode == 0
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nj", type=int, default=1, help="commands at a time")
    parser.add_argument("list", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="0: to the end")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="fedtools init EXP ...")
    given = parser.parse_args()
    if "--config" not in given.command:
        parser.error("the command has no --config")
    with exit_with_message("begin.py"):
        lines = given.list.read_text("utf-8").splitlines()[given.first - 1 : given.last or None]
        import_module("fedtools.federation.init")
        with contextlib.suppress(UserError):
            # The commands report themselves what is wrong with their options.
            config = Path(given.command[given.command.index("--config") + 1])
            task_of(facts_of(read_yaml(config).get("task"), config))
        commands = [filled(given.command, line.split("\t")) for line in lines]
        with tempfile.TemporaryDirectory(prefix="begin.") as folder:
            good = begin_all(commands, max(given.nj, 1), Path(folder))
        sys.exit(not good)


if __name__ == "__main__":
    main()
