"""The secret key of the noise: a file outside the experiment, readable by its owner only.

An attacker with the key can subtract the noise from everything released under it. In a real
federation with `trust: client` every client has its own key; a simulation has one key, with a
separate stream for each client.

Noise is a function of the key and of everything that defines a release: the experiment with its
data and its nonce (`fedtools.privacy.record`), round, draw, sender and purpose, the parameters of
the mechanism, and the counts themselves. So a killed and repeated run draws the same noise for the
same release, while another experiment, another epsilon or other counts never get the same noise,
which the difference of the two releases would cancel.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

import numpy as np

from fedtools.core.atomic import write_text
from fedtools.core.errors import UserError
from fedtools.core.locks import lock
from fedtools.core.secret_files import read_secret, write_secret
from fedtools.core.text_files import decode, read_text
from fedtools.privacy.noise import Stream

VARIABLE = "FEDTOOLS_NOISE_KEY"
# The file in the experiment's folder with the name of the key, which does not reveal the key.
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
        """Return 16 hexadecimal digits that identify the key without revealing it."""
        return self._derive("name").hex()[:16]

    def stream(self, *parts: str | int | bytes | np.ndarray) -> Stream:
        """Return the stream for a purpose; other parts, or another split of them, give another."""
        return Stream(self._derive("stream", *parts))

    def _derive(self, *parts: str | int | bytes | np.ndarray) -> bytes:
        keyed = hashlib.blake2b(key=self._secret, digest_size=32, person=b"fedtools noise")
        for part in parts:
            kind, raw = _encode(part)
            keyed.update(kind + len(raw).to_bytes(8, "big"))
            keyed.update(raw)
        return keyed.digest()


def _encode(part: str | int | bytes | np.ndarray) -> tuple[bytes, bytes]:
    """Encode a part as a letter for its type, and its bytes."""
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
    """Return the path of the key: the option, $FEDTOOLS_NOISE_KEY, or the user's default path.

    The default is `$XDG_CONFIG_HOME/fedtools/noise.key`, where XDG_CONFIG_HOME is by default
    ~/.config.
    """
    chosen = option or os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen)
    settings = os.environ.get("XDG_CONFIG_HOME")
    try:
        return Path(settings or Path.home() / ".config") / "fedtools" / "noise.key"
    except RuntimeError:
        remedy = f"set {VARIABLE} to a file for the noise key"
        raise UserError("the user has no home folder", remedy=remedy) from None


def open_key(experiment: Path, option: str | Path | None = None) -> NoiseKey:
    """Open the key of an experiment, and create it the first time.

    The experiment's file `noise_key` records the name of its key. A rerun with another key, which
    would draw a second noise for the same release, is refused.

    Args:
        experiment: the experiment's folder.
        option: the path given by the user, if any.

    Raises:
        UserError: if the key lies inside the experiment, is accessible to other users, is
            malformed, or is not the key that the experiment began with.
    """
    path, record = key_path(option), experiment / RECORD
    # Not Path.resolve, which fails on a loop of links; opening one fails with a clear message.
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
        raise UserError(problem, path=path, remedy="use that key, or begin another experiment")
    return key


def check_own(folder: Path) -> None:
    """Raise a `UserError` if another user owns a folder next to the key, or can write to it."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        problem = "another user can change this record of the noise key"
        raise UserError(problem, path=folder, remedy="use a key and a record of your own")


def make_key(path: Path) -> None:
    """Create a key unless there is one; safe for several processes at once."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock(path.parent, path.name, wait=True):
            if not path.exists():
                write_secret(path, f"{secrets.token_hex(_BYTES)}\n".encode())


def read_key(path: Path) -> NoiseKey:
    """Read a key.

    Raises:
        UserError: if it is missing, malformed, or accessible to other users.
    """
    remedy = "put the noise key back, or begin another experiment"
    try:
        secret = bytes.fromhex(decode(read_secret(path, "noise key", remedy), path).strip())
    except ValueError:
        secret = b""
    if len(secret) != _BYTES:
        # The message omits the content, which may be another secret.
        raise UserError(f"not a noise key of {2 * _BYTES} hexadecimal digits", path=path, line=1)
    return NoiseKey(secret)
