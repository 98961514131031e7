"""Files with a secret: keys that their owner alone may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input

_MOST_BYTES = 1 << 10


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file for its owner alone, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_secret(path: Path, name: str, remedy: str, most: int = _MOST_BYTES) -> bytes:
    """Read a secret.

    Args:
        path: the file.
        name: what the secret is, such as "noise key".
        remedy: what to do if it is missing.
        most: its largest size in bytes.

    Raises:
        UserError: if it is missing, too long, another user's, or accessible to other users.
    """
    with open_input(path, most, remedy) as file:
        status, content = os.fstat(file.fileno()), file.read()
    if status.st_nlink != 1:
        # Under another name it would have another record of its use.
        problem = f"a {name} with {status.st_nlink} hard links"
        raise UserError(problem, path=path, remedy="remove the others, and keep one")
    if stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"other users can access the {name} (mode {status.st_mode & 0o777:o})"
        remedy = f"chmod 600 {path}, or create a new key if another user may have read it"
        raise UserError(problem, path=path, remedy=remedy)
    if status.st_uid != os.geteuid():
        raise UserError(f"the {name} is another user's", path=path, remedy="use your own key")
    return content
