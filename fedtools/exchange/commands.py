"""The commands that made an experiment, in order, with all options: EXP/commands.sh.

    #!/usr/bin/env bash
    # The commands that made this experiment. Paths are relative to the folder they were run in.
    set -euo pipefail
    [ ! -e exp/mini/fedavg/seed0 ] || ...
    fedtools init exp/mini/fedavg/seed0 --config conf/mini.yaml ...
    fedtools rounds exp/mini/fedavg/seed0 --nj 2 --evaluate valid
    fedtools average exp/mini/fedavg/seed0

Only commands are listed, not calls of the package's functions: an experiment that a program made
has no such file. A command that resumes a killed one is the same command, and is listed once; one
that was stopped and not resumed is listed as if it had gone on to its end. The list refuses to run
where the experiment is, since a reset in it would undo rounds there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from fedtools.core.atomic import atomic_write
from fedtools.core.locks import lock

COMMANDS = "commands.sh"
_HEAD = b"""\
#!/usr/bin/env bash
# The commands that made this experiment. Paths are relative to the folder they were run in.
set -euo pipefail
[ ! -e %(path)s ] || { echo %(path)s" is there: run this in another folder" >&2; exit 1; }
"""
# The words of the command that this process runs, without the program; none in other programs.
_words: ContextVar[tuple[str, ...]] = ContextVar("words", default=())


@contextmanager
def running(words: Sequence[str]) -> Iterator[None]:
    """Let experiments list a command, `words` without the program, while a block runs."""
    before = _words.set(tuple(words))
    try:
        yield
    finally:
        _words.reset(before)


def begin_commands(experiment: Path) -> None:
    """List the running command as the first one of an experiment."""
    if line := _line():
        head = _HEAD % {b"path": os.fsencode(shlex.quote(str(experiment)))}
        _write(experiment / COMMANDS, head + line)


def add_command(experiment: Path, *options: str, once: bool = False) -> None:
    """List the running command, unless it is the last one that is listed.

    Args:
        experiment: the experiment's folder; without the list of `begin_commands`, none is begun.
        options: options to add, for what the command has chosen itself.
        once: do not list it either if it is listed before other commands, since the last reset.
    """
    path, line = experiment / COMMANDS, _line(*options)
    if not line or not path.is_file():
        return
    with lock(experiment, "commands", wait=True):
        text = path.read_bytes()
        since = text[text.rfind(b"\nfedtools reset ") + 1 :] if once else b""
        if not text.endswith(b"\n" + line) and b"\n" + line not in since:
            _write(path, text + line)


def _line(*options: str) -> bytes:
    words = _words.get()
    return os.fsencode(shlex.join(["fedtools", *words, *options]) + "\n") if words else b""


def _write(path: Path, text: bytes) -> None:
    with atomic_write(path, "wb") as file:
        file.write(text)
