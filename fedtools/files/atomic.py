"""Files that are either whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed to it if the block ends without an error.

    For libraries that want a file name. The temporary file is in the same directory, so that the
    rename cannot cross file systems; it is flushed to disk first, so that a power cut cannot
    leave an empty file under the final name. A failed block leaves nothing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = f".{path.name}.{platform.node()}-"
    _remove_orphans(path.parent, ours)
    handle, name = tempfile.mkstemp(".tmp", f"{ours}{os.getpid()}.", path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        # mkstemp gives 0600; a data file should be as readable as any other file of the user.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            # The system does not say which file found no room.
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path: str | Path, mode: str = "w") -> Iterator[IO]:
    """Open `path` for writing ("w" UTF-8 text with "\\n" line ends, or "wb"); see `atomic_path`."""
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    with atomic_path(path) as temporary, open(temporary, mode, **text) as file:
        yield file


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file atomically."""
    with atomic_write(path) as file:
        file.write(text)


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _remove_orphans(folder: Path, prefix: str) -> None:
    """Remove what processes of this machine that were killed left of the same file."""
    for left in folder.glob(f"{glob.escape(prefix)}*.tmp"):
        owner = left.name.removeprefix(prefix).partition(".")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            left.unlink(missing_ok=True)
        except (PermissionError, ValueError):
            continue


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
