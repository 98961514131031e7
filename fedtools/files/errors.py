"""The one kind of error that a user sees: a single line saying what to mend, and where."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """Bad input, told in one line; the command line prints it and exits 1, without a traceback.

    Args:
        problem: what is wrong, without a full stop.
        path: the file it is wrong in, when there is one.
        line: the line of that file, counted from 1.
        remedy: what the user can do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        path: str | Path | None = None,
        line: int | None = None,
        remedy: str | None = None,
    ):
        place = "" if path is None else f"{path}:{line}: " if line else f"{path}: "
        tail = f"; {remedy}" if remedy else ""
        super().__init__(" ".join(f"{place}{problem}{tail}".split("\n")))
