"""Commands in forks of this process, which has imported all modules; readers of their files."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import fedtools.cli
from fedtools.core import config, tables, text_files
from fedtools.core.errors import UserError
from fedtools.data import datadir, nbest
from fedtools.exchange import states

ROOT = Path(__file__).resolve().parent.parent.parent


def fork(
    commands: Sequence[Sequence[str]],
    root: Path,
    output: int,
    *,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Start command lines, one after the other, in a process group of their own.

    Args:
        commands: words, the first a `fedtools` command or a script of this project.
        root: the current folder.
        output: a descriptor for what they write to stderr.
        env: changes of the environment.
        prepare: called in the child before the first command.

    Returns:
        the process, which ends with the first exit status that is not 0.
    """
    sys.stdout.flush()
    if child := _forked():
        # Also in the parent, since either may be first.
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        return child
    code = 70
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ.update(env or {})
        os.chdir(root)
        # Otherwise processes of `multiprocessing` would import this program.
        sys.modules["__main__"] = types.ModuleType("__main__")
        prepare()
        code = 0
        for words in commands:
            code = code or _main(list(words))
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)


def _forked() -> int:
    while True:
        # A machine that has no room for another process now is not a bug.
        with contextlib.suppress(BlockingIOError):
            return os.fork()
        time.sleep(0.1)


def _main(command: list[str]) -> int:
    sys.argv = ["fedtools", *command]
    try:
        if command[0].endswith(".py"):
            script = ROOT / command[0]
            sys.argv = [str(script), *command[1:]]
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
        else:
            fedtools.cli.main()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def kill(group: int) -> None:
    """Kill a process group, wherever it is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def read(path: Path) -> None:
    """Read a file by its own reader; a `UserError` is raised if the reader refuses it."""
    if path.name.startswith("nbest.") and path.suffix == ".tsv":
        nbest.read_nbest(path)
    elif path.suffix == ".tsv":
        tables.read_tsv(path, None)
    elif path.suffix == ".yaml":
        config.read_yaml(path)
    elif path.suffix == ".safetensors":
        states.read_layout(path)
    elif datadir.keyed_by(path.name) or path.name in ("client2utt", "text"):
        datadir.read_table(path, values="optional")
    elif path.suffix in (".txt", ".md", ".trn"):
        text_files.read_lines(path)
    elif path.suffix == ".png" and not path.read_bytes().endswith(b"IEND\xaeB`\x82"):
        raise UserError("cut off", path=path)
