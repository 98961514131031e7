"""Ctrl-C: what a program says, and how processes that it starts are kept from it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# The status of a program that Ctrl-C has ended.
INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C, which all processes of a terminal get, from those that are started within.

    They inherit the mask, even while they import modules. Here, a Ctrl-C takes effect afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C is behind an error, as when it comes while a module in C is loaded."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
