"""Ctrl-C: what a program says, and how processes that it starts are kept from it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The status of a program that Ctrl-C has ended.
INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C, which all processes of a terminal get, from those that are started within.

    They inherit the mask, even while they import modules. Here, a Ctrl-C takes effect afterwards.
    A signal to the process goes to any thread that does not mask it, such as a library's, and
    Python then runs the handler in the main thread: so that one only takes note meanwhile.
    """
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGINT)
    # What is ignored stays so, in processes that are started as well.
    noted = main and callable(handler)
    if noted:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        # What was held back comes while the handler still takes note alone.
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if noted:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C is behind an error, as when it comes while a module in C is loaded."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
