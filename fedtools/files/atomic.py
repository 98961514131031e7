"""Files that are either whole or absent: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from fedtools.files.errors import UserError
from fedtools.files.text_files import open_input

# A temporary file that nothing can vouch for, and that was not touched for so long, is an orphan.
_FORSAKEN = 7 * 24 * 3600.0

# Folders that this process has looked for orphans in: once is enough, and a folder may be large.
_cleaned: set[tuple[int, Path]] = set()


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed to it if the block ends without an error.

    For libraries that want a file name. The temporary file is in the same directory, so that the
    rename cannot cross file systems; it is flushed to disk first, so that a power cut cannot
    leave an empty file under the final name. A failed block leaves nothing.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(*_marks(path.parent, path.name), path.parent)
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


@overload
@contextmanager
def atomic_write(path: str | Path) -> Iterator[TextIO]: ...


@overload
@contextmanager
def atomic_write(path: str | Path, mode: Literal["wb"]) -> Iterator[BinaryIO]: ...


@contextmanager
def atomic_write(path: str | Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Open `path` for writing ("w" UTF-8 text with "\\n" line ends, or "wb"); see `atomic_path`."""
    encoding, newline = (None, None) if mode == "wb" else ("utf-8", "\n")
    with (
        atomic_path(path) as temporary,
        open(temporary, mode, encoding=encoding, newline=newline) as file,
    ):
        yield file


def write_text(path: str | Path, text: str) -> None:
    """Write a whole text file atomically."""
    with atomic_write(path) as file:
        file.write(text)


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write lines, which have no ends yet, atomically, as they come."""
    with atomic_write(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with open_input(path) as file:
        return sha256_of(file)


def sha256_of(file: IO[bytes]) -> str:
    """The SHA-256 of the rest of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def scratch_dir(parent: Path) -> Iterator[Path]:
    """Yield a temporary folder in `parent`; it is removed, as are those of killed processes."""
    suffix, prefix = _marks(parent, "scratch")
    with tempfile.TemporaryDirectory(suffix, prefix, parent) as name:
        yield Path(name)


def check_new(out: Path) -> None:
    """Raise a `UserError` if there is something at a path already, but for an empty folder."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError("is there already", path=out, remedy="remove it, or name another folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `out` if the block ends without an error."""
    with scratch_dir(out.parent) as scratch:
        # Not the scratch folder itself, which only its owner may open.
        folder = scratch / "folder"
        folder.mkdir()
        yield folder
        folder.rename(out)


def _marks(folder: Path, name: str) -> tuple[str, str]:
    """Suffix and prefix of this process' temporary files; a folder's orphans are removed first."""
    folder.mkdir(parents=True, exist_ok=True)
    if (os.getpid(), folder) not in _cleaned:
        _remove_orphans(folder)
        _cleaned.add((os.getpid(), folder))
    return ".tmp", f".{name}.{machine()}-{os.getpid()}."


def _remove_orphans(folder: Path) -> None:
    """Remove what killed processes of this machine left in a folder.

    Other machines, containers and earlier boots may have its name. Of those, process ids say
    nothing: what they left is removed when it is old.
    """
    node, here = re.escape(platform.node()), re.escape(machine())
    own = re.compile(rf"\..+\.{here}-(\d+)\.[^.]+\.tmp")
    namesake = re.compile(rf"\..+\.{node}(-[0-9a-f]{{12}})?-\d+\.[^.]+\.tmp")
    for left in os.scandir(folder):
        orphan = False
        if owner := own.fullmatch(left.name):
            orphan = not is_running(int(owner[1]))
        elif namesake.fullmatch(left.name):
            with suppress(FileNotFoundError):
                orphan = time.time() - left.stat(follow_symlinks=False).st_mtime > _FORSAKEN
        if orphan:
            with suppress(OSError):
                remove(Path(left.path))


def remove(path: Path) -> None:
    """Remove whatever lies at a path, a folder with all that is in it; nothing there is no error.

    Others can write into an experiment's folder: a directory where a file belongs must not stay in
    the way for good.
    """
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        if not path.is_dir() or path.is_symlink():
            raise
        # Not shutil.rmtree, which fails where somebody has put a thousand folders into each other.
        done = subprocess.run(
            ["rm", "-rf", "--", path], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise OSError(errno.EIO, " ".join(done.stderr.split()), str(path)) from None


@functools.cache
def machine() -> str:
    """The name of this machine and 12 digits for its boot and its process ids.

    Two machines, or two containers of one, may have the same name; a process id of one says nothing
    of the other's. Linux alone tells these things; elsewhere the name is all.
    """
    told = ""
    with suppress(OSError):
        told += Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(OSError):
        told += str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def is_running(process: int) -> bool:
    """Whether there is such a process on this machine, which may be somebody else's."""
    try:
        os.kill(process, 0)
        # In a container nobody may wait for orphans, which stay as zombies; Linux alone has this.
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[:1] != [b"Z"]
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
