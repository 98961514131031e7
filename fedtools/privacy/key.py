"""The secret that noise is drawn under: a file outside the experiment, for its owner alone.

Who knows the key can subtract the noise of everything that was released under it. In a real
federation with `trust: client` every client has a key of its own; a simulation has one, under which
each client has its own stream.

Noise is a function of the key and of all that a release is: the experiment with its data and its
nonce (`fedtools.privacy.record`), round, draw, sender and purpose, the mechanism's numbers, and the
very counts that it hides. So a run that was killed draws the same noise for the same release, while
another experiment, another epsilon or other counts never meet the same noise, which the difference
of both releases would cancel.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

import numpy as np

from fedtools.files.atomic import write_text
from fedtools.files.errors import UserError
from fedtools.files.text_files import decode, open_input, read_text
from fedtools.privacy.noise import Stream

VARIABLE = "FEDTOOLS_NOISE_KEY"
# Of this file in the experiment's folder, which names the key without giving it away.
RECORD = "noise_key"
_BYTES = 32


class NoiseKey:
    """A secret of 256 bits.

    Args:
        secret: 32 bytes.
    """

    def __init__(self, secret: bytes):
        if len(secret) != _BYTES:
            raise ValueError(f"a key of {len(secret)} bytes, not {_BYTES}")
        self._secret = secret

    @property
    def name(self) -> str:
        """16 hexadecimal digits that tell this key from others, and nothing of it."""
        return self._derive("name").hex()[:16]

    def stream(self, *parts: str | int | bytes | np.ndarray) -> Stream:
        """The stream for a purpose; other parts, or the same ones cut otherwise, give another."""
        return Stream(self._derive("stream", *parts))

    def _derive(self, *parts: str | int | bytes | np.ndarray) -> bytes:
        keyed = hashlib.blake2b(key=self._secret, digest_size=32, person=b"fedtools noise")
        for part in parts:
            kind, raw = _encode(part)
            keyed.update(kind + len(raw).to_bytes(8, "big"))
            keyed.update(raw)
        return keyed.digest()


def _encode(part: str | int | bytes | np.ndarray) -> tuple[bytes, bytes]:
    """A letter for the kind of a part, and its bytes."""
    if isinstance(part, np.ndarray):
        if part.dtype != np.int64 or part.ndim != 1:
            raise TypeError(f"{part.dtype} of {part.shape}")
        return b"a", part.astype("<i8").tobytes()
    if isinstance(part, str):
        return b"s", part.encode()
    if isinstance(part, bytes):
        return b"b", part
    if isinstance(part, int) and not isinstance(part, bool):
        return b"i", str(part).encode()
    raise TypeError(f"{part!r}")


def key_path(option: str | Path | None = None) -> Path:
    """Where the key is: the option, else $FEDTOOLS_NOISE_KEY, else the user's own settings.

    Those are `$XDG_CONFIG_HOME/fedtools/noise.key`, by default in ~/.config.
    """
    chosen = option or os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    settings = os.environ.get("XDG_CONFIG_HOME")
    try:
        return Path(settings or Path.home() / ".config") / "fedtools" / "noise.key"
    except RuntimeError:
        remedy = f"set {VARIABLE} to a file for the noise key"
        raise UserError("no home folder", remedy=remedy) from None


def open_key(experiment: Path, option: str | Path | None = None) -> NoiseKey:
    """The key of an experiment, made the first time.

    The experiment's file `noise_key` records which key it began with, so that a rerun with another
    one, which would draw a second noise for the same release, is refused.

    Args:
        experiment: its folder.
        option: the path that a user gave, if any.

    Raises:
        UserError: if the key lies inside the experiment, is not this user's alone, is malformed, or
            is not, or no longer, the one that the experiment began with.
    """
    path, record = key_path(option), experiment / RECORD
    # Not Path.resolve, which fails on a loop of links; opening one fails, and says so.
    if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(experiment)):
        remedy = f"keep it elsewhere: method_conf.noise_key or ${VARIABLE}"
        raise UserError("the noise key lies inside the experiment", path=path, remedy=remedy)
    known = read_text(record).strip() if record.exists() else None
    if known is None:
        make_key(path)
    key = read_key(path)
    if known is None:
        write_text(record, f"{key.name}\n")
    elif known != key.name:
        problem = f"not the noise key that {experiment} began with"
        raise UserError(problem, path=path, remedy="give that one, or begin another experiment")
    return key


def make_key(path: Path) -> None:
    """Make a key unless there is one; of several that try at once, one makes it."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_hex(_BYTES)}\n")
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link fails where another process was first.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()


def read_key(path: Path) -> NoiseKey:
    """Read a key.

    Raises:
        UserError: if it is missing, malformed, or not its owner's alone.
    """
    remedy = "put the noise key back, or begin another experiment"
    with open_input(path, 1 << 10, remedy) as file:
        status, text = os.fstat(file.fileno()), decode(file.read(), path).strip()
    if stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"others can read or write the noise key (mode {status.st_mode & 0o777:o})"
        remedy = f"chmod 600 {path}, or make a new one if anybody may have read it"
        raise UserError(problem, path=path, remedy=remedy)
    if status.st_uid != os.geteuid():
        raise UserError("the noise key is another user's", path=path, remedy="take your own")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != _BYTES:
        # Without its content: it may be some other secret.
        raise UserError(f"not a noise key: {2 * _BYTES} hexadecimal digits", path=path, line=1)
    return NoiseKey(secret)
