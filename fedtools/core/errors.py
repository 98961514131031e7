"""The kind of error that users see: a single line that says what to fix, and where."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

from fedtools.core.signals import INTERRUPTED

# The remedy if the packages of setup.py's extra "pretrained" are missing.
INSTALL_PRETRAINED = "run in the checkout: utils/pretrained.sh, or pip install '.[pretrained]'"
# The same for the extra "privacy".
INSTALL_PRIVACY = (
    "run pip install 'dp-accounting>=0.6,<0.7', or in the checkout: pip install '.[privacy]'"
)

# A message lists at most this many names.
_NAMED = 5
# A message is at most this long: names in hostile files may have a million letters.
_LONGEST = 1900
# Control characters, marks that reverse the direction of text, and what is no character at all.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


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
        text = printable(" ".join(f"{place}{problem}{tail}".split("\n")))
        if len(text) > _LONGEST:
            text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 3 :]}"
        super().__init__(text)


class Missing(UserError):
    """An error about data that an experiment began with, and that are missing or unreadable now."""


def some(names: Sequence[str]) -> str:
    """Return the first few of many names, for a message of one line."""
    left = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"and {left} more"] if left > 0 else [])])


def printable(text: str, kept: str = "\t") -> str:
    """Return a text with escapes instead of characters that a terminal would obey.

    Args:
        kept: control characters that stay.
    """
    return _CONTROL.sub(lambda one: one[0] if one[0] in kept else ascii(one[0])[1:-1], text)


class Terminal:
    """A stream to a terminal, or to a log that will be shown on one, without escape sequences.

    Names of files, and words of texts, come from others and could clear the screen or set a title.

    Args:
        stream: the stream; everything but writing is left to it.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; lines may end, or begin again for a progress bar."""
        return self._stream.write(printable(text, "\n\r\t"))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


@contextmanager
def harmless() -> Iterator[None]:
    """Show nothing that a terminal would obey, on stderr, and on stdout if it is a terminal."""
    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, Terminal(sys.stderr))
    if sys.stdout.isatty():
        sys.stdout = cast(TextIO, Terminal(sys.stdout))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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
        print(f"{program}: {printable(f'{place}{error.strerror or error}')}", file=sys.stderr)
        sys.exit(1)
