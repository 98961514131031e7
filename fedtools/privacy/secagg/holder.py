"""What clients keep to themselves: keys, promises, and the secrets of an attempt.

    KEYS/<client>.key               a private key for each client; or one file for all of a site
    KEYS/promises.tsv               see `fedtools.privacy.secagg.promises`
    KEYS/secrets.<experiment>.<job> the secrets of a job's clients in an attempt, and sums of what
                                    the server has given to them, and of what they have sent

The folder is the clients' own, on their disk, and no command of a server opens it. Secrets are
removed as soon as the clients have answered the last step, or the round is closed where they are,
and replaced in the next attempt or round. What a file system keeps of removed files is not erased.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.core.atomic import remove
from fedtools.core.errors import UserError
from fedtools.core.locks import lock
from fedtools.core.secret_files import read_secret, write_secret
from fedtools.exchange.private import make_private
from fedtools.exchange.signed import make_key, read_key
from fedtools.privacy.secagg.keys import Secrets
from fedtools.privacy.secagg.participant import Participant
from fedtools.privacy.secagg.promises import Promises
from fedtools.privacy.secagg.session import Session

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# Of a client in the file of secrets, and of the rest.
_CLIENT_BYTES, _MORE_BYTES = 1024, 4096
_MOST_BYTES = 10_000 * _CLIENT_BYTES


class Holder:
    """The keys and secrets of some clients.

    Args:
        folder: where they are.
        key: the path of one key for all clients, as of a site; None: each has its own.

    Attributes:
        working: digest of a session, job -> number -> the participants of that job that have done
            a step in this process, and not the next.
    """

    def __init__(self, folder: Path, key: Path | None = None):
        self.folder, self._key = folder, key
        self.working: dict[tuple[bytes, int], dict[int, Participant]] = {}

    @classmethod
    def of_site(cls, key: Path) -> Holder:
        """Return the holder of a site's clients, whose folder is beside the site's key."""
        return cls(make_private(key.with_name(f"{key.name}.secure")), key)

    @cached_property
    def promises(self) -> Promises:
        """Return what the clients have bound themselves to."""
        return Promises(self.folder / "promises.tsv")

    def key(self, client: str) -> Ed25519PrivateKey:
        """Return a client's private key."""
        if self._key:
            return self._common
        return read_key(self.key_path(client))

    @cached_property
    def _common(self) -> Ed25519PrivateKey:
        assert self._key is not None
        return read_key(self._key)

    def key_path(self, client: str) -> Path:
        """Return the path of a client's own key; clients' names are names of files."""
        return self.folder / f"{client}.key"

    def make_keys(self, clients: Collection[str]) -> dict[str, str]:
        """Return each client's public key, after making those that are missing."""
        make_private(self.folder)
        return {client: make_key(self.key_path(client)) for client in clients}

    def attempt(self, session: Session, job: int, clients: Collection[str]) -> Attempt | None:
        """Return what was kept of an attempt; None if there is nothing, or of another attempt."""
        path = self._path(session, job)
        if not path.exists():
            return None
        remedy = "remove the file; its clients are lost in the open round"
        most = _MORE_BYTES + _CLIENT_BYTES * len(clients)
        found = _parse(read_secret(path, "file of secrets", remedy, most), path, remedy)
        if found.session != session.digest.hex():
            return None
        if found.secrets.keys() != set(clients):
            problem = f"has the secrets of other clients than those of job {job}"
            raise UserError(problem, path=path, remedy="cut the round into the jobs that it had")
        return found

    def begin(self, session: Session, job: int, clients: Collection[str]) -> Attempt:
        """Draw and keep the secrets of an attempt, in place of those of an earlier one.

        Raises:
            UserError: if the clients have signed in this round, or have secrets in another job.
        """
        self.promises.check(session)
        if self.promises.signed(session.label, session.round):
            problem = f"the clients have signed in round {session.round}, and forgotten their masks"
            raise UserError(problem, path=self.folder)
        for path in self.folder.glob(f"secrets.{session.label[:16]}.*"):
            remedy = "cut the round into the jobs that it had"
            kept = _parse(read_secret(path, "file of secrets", remedy, _MOST_BYTES), path, remedy)
            if kept.session == session.digest.hex() and kept.secrets.keys() & set(clients):
                raise UserError("has clients that are now in another job", path=path, remedy=remedy)
        attempt = Attempt.new(session, clients)
        self.keep(session, job, attempt)
        return attempt

    @contextmanager
    def at_work(self, session: Session, job: int) -> Iterator[None]:
        """Hold a job's secrets, also against copies of the experiment, while a block runs."""
        with lock(self.folder, f"secrets.{session.label[:16]}.{job}"):
            yield

    def keep(self, session: Session, job: int, attempt: Attempt) -> None:
        """Write what is kept of an attempt, in place of what was."""
        write_secret(self._path(session, job), json.dumps(vars(attempt), indent=1).encode())

    def forget(self, session: Session, job: int) -> None:
        """Remove the secrets of an attempt."""
        remove(self._path(session, job))

    def forget_all(self, label: str) -> None:
        """Remove all secrets of an experiment, whose round is closed."""
        for path in self.folder.glob(f"secrets.{label[:16]}.*"):
            remove(path)

    def _path(self, session: Session, job: int) -> Path:
        return self.folder / f"secrets.{session.label[:16]}.{job}"


@dataclass
class Attempt:
    """What the clients of a job keep of an attempt.

    Attributes:
        session: the digest of the session, in hexadecimal.
        secrets: client -> its secrets, in hexadecimal.
        given: step -> SHA-256 of the server's reply that was used.
        sent: step -> SHA-256 of the messages that may have been sent.
    """

    session: str
    secrets: dict[str, str] = field(repr=False)
    given: dict[str, str] = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)

    @classmethod
    def new(cls, session: Session, clients: Collection[str]) -> Attempt:
        """Draw the secrets of some clients."""
        return cls(session.digest.hex(), {one: Secrets().to_bytes().hex() for one in clients})

    def secrets_of(self, client: str) -> Secrets:
        """Return a client's secrets."""
        return Secrets.from_bytes(bytes.fromhex(self.secrets[client]))

    def bind(self, of: str, step: str, digest: str) -> None:
        """Note a sum; raise a `UserError` if another was noted before.

        Args:
            of: "given" or "sent".
        """
        known = getattr(self, of)
        if known.setdefault(step, digest) != digest:
            what = "another reply of the server was used" if of == "given" else "others were sent"
            raise UserError(f"messages of step '{step}': {what} in this attempt")


def _parse(content: bytes, path: Path, remedy: str) -> Attempt:
    try:
        fields = json.loads(content)
        found = Attempt(**fields)
        tables = (found.secrets, found.given, found.sent)
        if not all(isinstance(one, Mapping) for one in tables):
            raise ValueError
        for one in found.secrets.values():
            Secrets.from_bytes(bytes.fromhex(one))
    except (ValueError, TypeError):
        # The message omits the content, which is secret.
        raise UserError("not a file of secrets", path=path, remedy=remedy) from None
    return found
