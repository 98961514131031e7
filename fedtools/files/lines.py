"""Text files as lists of lines, with the checks that every reader makes."""

from __future__ import annotations

from pathlib import Path

from fedtools.files.errors import UserError


def read_lines(path: str | Path, remedy: str | None = None) -> list[str]:
    """Read the lines of a UTF-8 file, without their ends; only "\\n" ends a line.

    Args:
        path: the file; the last line must have an end.
        remedy: what to do about a file that is missing or no text.

    Raises:
        UserError: if it cannot be read, is not UTF-8, or is cut off.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path=path, remedy=remedy) from None
    try:
        content = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        remedy = remedy or "convert the file"
        raise UserError("not UTF-8", path=path, line=line, remedy=remedy) from None
    if content and not content.endswith("\n"):
        last = content.count("\n") + 1
        raise UserError("the last line has no end", path=path, line=last, remedy="file cut off?")
    # splitlines() would also split at characters that may stand in a word.
    return content.split("\n")[:-1]
