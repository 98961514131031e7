"""Locks of an experiment: whoever writes to it holds one; a killed process holds none."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedtools.files.errors import UserError


@contextmanager
def lock(
    experiment: Path, name: str, *, shared: bool = False, wait: bool = False
) -> Iterator[None]:
    """Hold a lock of an experiment for the length of a block.

    Args:
        experiment: its folder.
        name: what is locked, such as "rounds".
        shared: hold it together with others who share it.
        wait: wait for those who hold it; otherwise their presence is an error.

    Raises:
        UserError: if somebody else holds it.
    """
    path = experiment / ".locks" / name
    path.parent.mkdir(exist_ok=True)
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)

    # Opened for writing, without which NFS locks no file; nothing is written. A FIFO does not wait.
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK, 0o666)

    with open(path, "ab", opener=opener) as file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            problem = f"another process is writing to this experiment ({name})"
            raise UserError(problem, path=experiment, remedy="wait for it, or end it") from None
        except OSError as error:
            # A file system without locks is no reason not to work.
            print(f"{experiment}: not locked: {error.strerror}", file=sys.stderr)
        yield
