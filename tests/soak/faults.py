"""Faults injected into a process at a chosen moment: it dies, or the disk is full."""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# The exit status of a process that died.
CRASHED = 77
_CHANGES = ("replace", "rename", "link", "unlink", "remove", "rmdir", "mkdir", "fsync")
_NEED_ROOM = ("replace", "rename", "link", "mkdir", "fsync", "pwrite")


@dataclass
class Fault:
    """A fault that happens to the process in which it is installed.

    Attributes:
        kind: "before" or "after": it dies before or after change number `at` that it makes to a
            folder; "full": from that write on no file can grow; "once full": just that one cannot.
        at: counted from 1; 0 means no fault.
        log: a descriptor to which a byte is written for each change, or write.
    """

    kind: str
    at: int
    log: int | None = None
    seen: int = 0

    def install(self) -> None:
        """Start to count."""
        full = "full" in self.kind
        for name in _NEED_ROOM if full else _CHANGES:
            setattr(os, name, self._wrapped(getattr(os, name), full))
        if full:
            self._fill()

    def _count(self) -> bool:
        self.seen += 1
        if self.log is not None:
            os.write(self.log, b".")
        return self.seen == self.at

    def _wrapped(self, real: Callable, full: bool) -> Callable:
        def call(*arguments, **named):
            if full:
                self.need_room(arguments[0])
                return real(*arguments, **named)
            now = self._count()
            if now and self.kind == "before":
                os._exit(CRASHED)
            result = real(*arguments, **named)
            if now:
                os._exit(CRASHED)
            return result

        return call

    def need_room(self, path: object = None) -> None:
        """Raise an error if there is no space."""
        if self._count() or (self.kind == "full" and 0 < self.at < self.seen):
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if isinstance(path, str | os.PathLike):
                error.filename = os.fspath(path)
            raise error

    def _fill(self) -> None:
        real_open, real_os_open, fault = io.open, os.open, self

        class Raw(io.FileIO):
            def write(self, data):
                fault.need_room()
                return super().write(data)

        def os_open(path, flags, *arguments, **named):
            if flags & os.O_CREAT:
                fault.need_room(path)
            return real_os_open(path, flags, *arguments, **named)

        def open_(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
            if not set(mode) & set("wax+"):
                return real_open(file, mode, buffering, encoding, errors, newline, **more)
            if mode[0] != "r" and not (isinstance(file, int) or Path(file).exists()):
                fault.need_room(file)
            raw = Raw(file, mode.replace("b", "").replace("t", ""), **more)
            if buffering == 0:
                return raw
            buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

        os.open = os_open
        builtins.open = io.open = open_
        # Python 3.10's pathlib took its `open` when it was imported.
        if accessor := getattr(pathlib, "_NormalAccessor", None):
            accessor.open = staticmethod(open_)
