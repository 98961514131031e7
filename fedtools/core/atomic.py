"""Atomic writing: files get a temporary name, and are renamed when they are complete."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import platform
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input

# A temporary file of an unknown process is an orphan after this many seconds without a change.
_FORSAKEN = 7 * 24 * 3600.0

# Folders in which this process has already looked for orphans; listing a large folder is slow.
_cleaned: set[tuple[int, Path]] = set()


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, renamed to it if the block ends without an error.

    For libraries that need a file name. The temporary file is in the same directory, so that the
    rename cannot cross file systems; it is flushed to disk first, so that a power cut cannot
    leave an empty file under the final name. A block that fails leaves no file. Users who cannot
    read the folder cannot read the file either, also when the folder is opened to them later.
    """
    path = Path(path)
    suffix, prefix = _marks(path.parent, path.name)
    temporary = path.with_name(f"{prefix}{os.urandom(6).hex()}{suffix}")
    # The mode that the system gives by the user's umask, also to a library's own file.
    allowed = 0o600 | 0o066 & path.parent.stat().st_mode
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, allowed)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename is None:
            # On a full disk, the system does not name the file.
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
    """Open `path` for atomic writing: "w" for UTF-8 text with "\\n" line ends, or "wb"."""
    encoding, newline = (None, None) if mode == "wb" else ("utf-8", "\n")
    with (
        atomic_path(path) as temporary,
        open(temporary, mode, encoding=encoding, newline=newline) as file,
    ):
        yield file


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as file:
        file.write(text)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write bytes to a file atomically."""
    with atomic_write(path, "wb") as file:
        file.write(content)


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    """Write lines without line ends to a text file atomically, one by one."""
    with atomic_write(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open_input(path) as file:
        return sha256_of(file)


def sha256_once(path: Path) -> str:
    """Return a file's SHA-256, computed once per process unless the file changes."""
    stat = path.stat()
    return _hashed(path.resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@functools.lru_cache(maxsize=64)
def _hashed(path: Path, *_: int) -> str:
    return sha256(path)


def sha256_of(file: IO[bytes]) -> str:
    """Return the SHA-256 of the rest of an open file, in hexadecimal."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def scratch_dir(parent: Path) -> Iterator[Path]:
    """Yield a temporary folder in `parent`, removed afterwards; clean up after killed processes."""
    suffix, prefix = _marks(parent, "scratch")
    with tempfile.TemporaryDirectory(suffix, prefix, parent) as name:
        yield Path(name)


def check_new(out: Path) -> None:
    """Raise a `UserError` if a path exists and is not an empty folder."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError("already exists", path=out, remedy="remove it, or name another folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `out` if the block ends without an error."""
    with scratch_dir(out.parent) as scratch:
        # A subfolder, because only the owner may open the scratch folder itself.
        folder = scratch / "folder"
        folder.mkdir()
        yield folder
        folder.rename(out)


def _marks(folder: Path, name: str) -> tuple[str, str]:
    """Return suffix and prefix of this process's temporary files; remove orphans first."""
    _make_folder(folder)
    if (os.getpid(), folder) not in _cleaned:
        _remove_orphans(folder)
        _cleaned.add((os.getpid(), folder))
    return ".tmp", f".{name}.{machine()}-{os.getpid()}."


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, each readable by nobody who cannot read the one above."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(0o700 | 0o077 & folder.parent.stat().st_mode, exist_ok=True)


def _remove_orphans(folder: Path) -> None:
    """Remove temporary files that killed processes of this machine left in a folder.

    Other machines, containers and earlier boots may have the same host name. Their process ids mean
    nothing here, so their files are removed only when they are old.
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
    """Remove the file or the whole folder at a path, if there is one.

    Clients can write into an experiment's folder: a directory in place of a file must not block the
    experiment for good.
    """
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        if not path.is_dir() or path.is_symlink():
            raise
        # shutil.rmtree fails on a thousand nested folders, which a client may have made.
        done = subprocess.run(
            ["rm", "-rf", "--", path], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise OSError(errno.EIO, " ".join(done.stderr.split()), str(path)) from None


@functools.cache
def machine() -> str:
    """Return this machine's name and 12 digits that identify its boot and its process namespace.

    Two machines, or two containers on one machine, may share a name, while their process ids are
    unrelated. Only Linux reports boot and namespace; elsewhere, the name must do.
    """
    identity = ""
    with suppress(OSError):
        identity += Path("/proc/sys/kernel/random/boot_id").read_text()
    with suppress(OSError):
        identity += str(Path("/proc/self/ns/pid").readlink())
    return f"{platform.node()}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def is_running(process: int) -> bool:
    """Return whether a process is running on this machine, whichever user it belongs to."""
    try:
        os.kill(process, 0)
        # In a container, orphaned processes may stay as zombies, which only Linux reports.
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[:1] != [b"Z"]
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
