"""Locks of an experiment, held by the processes that write to it; a killed process holds none."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedtools.core.errors import UserError


@contextmanager
def lock(
    experiment: Path, name: str, *, shared: bool = False, wait: bool = False
) -> Iterator[None]:
    """Hold a lock of an experiment for the duration of a block.

    Args:
        experiment: the experiment's folder.
        name: what is locked, such as "rounds".
        shared: share the lock with other processes that share it.
        wait: wait for other holders; otherwise their presence is an error.

    Raises:
        UserError: if another process holds the lock.
    """
    path = experiment / ".locks" / name
    path.parent.mkdir(exist_ok=True)
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)

    # NFS locks only files that are open for writing, though nothing is written. O_NONBLOCK: a FIFO
    # in place of the file must not block.
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK, 0o666)

    with open(path, "ab", opener=opener) as file:
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            problem = f"another process is writing to this experiment ({name})"
            raise UserError(problem, path=experiment, remedy="wait for it, or end it") from None
        except OSError as error:
            # A file system without locks must not stop the work.
            print(f"{experiment}: not locked: {error.strerror}", file=sys.stderr)
        yield
