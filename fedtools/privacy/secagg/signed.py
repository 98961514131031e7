"""Clients' messages: a header, a body, and the signature of the client that the header names.

    8 bytes "secagg1" and the step's letter, 32 the session's digest, 4 the sender's number (high
    byte first); the body, whose length follows from the session; 64 bytes: Ed25519 (RFC 8032)

What is signed is the header and the SHA-256 of the body: a vector of words is hashed faster that
way. It begins with a zero-terminated tag, which no statement of `fedtools.exchange.signed` has, so
that a signature of the one kind never passes for one of the other.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import TYPE_CHECKING

from fedtools.core.errors import UserError
from fedtools.privacy.secagg.session import DIGEST_BYTES, Session

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_MAGIC = b"secagg1"
NUMBER_BYTES = 4
SIGNATURE_BYTES = 64
HEADER_BYTES = len(_MAGIC) + 1 + DIGEST_BYTES + NUMBER_BYTES
_TAG = b"fedtools secagg 1 message\0"


class Step(Enum):
    """The messages of a client, in their order."""

    KEYS = b"K"
    SHARES = b"S"
    MASKED = b"M"
    SURVIVORS = b"L"
    UNMASK = b"U"

    @property
    def before(self) -> Step:
        """Return the step before; there is none before the first."""
        steps = list(Step)
        return steps[steps.index(self) - 1]


def seal(
    step: Step, session: Session, sender: int, body: bytes | memoryview, key: Ed25519PrivateKey
) -> bytes:
    """Return a message with its signature."""
    header = _header(step, session, sender)
    return b"".join((header, body, key.sign(_signed(header, body))))


def opened(
    step: Step, session: Session, sender: int, message: bytes | memoryview, size: int
) -> memoryview:
    """Return the body of a message.

    Args:
        sender: the number of the client that it has to be from.
        size: the length of the body in bytes.

    Raises:
        UserError: if the message is not of that client, step, session and length, or not signed
            with the client's key in the roster.
    """
    whole = memoryview(message)
    name, what = session.names[sender], f"message '{step.name.lower()}'"
    if len(whole) != HEADER_BYTES + size + SIGNATURE_BYTES:
        wanted = HEADER_BYTES + size + SIGNATURE_BYTES
        raise UserError(f"{what} of {name} has {len(whole)} bytes instead of {wanted}")
    header, body = whole[:HEADER_BYTES], whole[HEADER_BYTES:-SIGNATURE_BYTES]
    if header != _header(step, session, sender):
        raise UserError(f"{what} of {name}: {_difference(step, session, sender, bytes(header))}")
    if not is_signed(session, sender, bytes(whole[-SIGNATURE_BYTES:]), _signed(header, body)):
        raise UserError(f"{what} of {name} is not signed with its key in the roster")
    return body


def sender_of(message: bytes) -> int:
    """Return the number of the client that a message claims to be from."""
    return int.from_bytes(message[HEADER_BYTES - NUMBER_BYTES : HEADER_BYTES], "big")


def is_signed(session: Session, sender: int, signature: bytes, content: bytes) -> bool:
    """Say whether a signature is that of a client in the roster."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    # Clients of one place check the same signatures of their common neighbours.
    known = (sender, signature, hashlib.sha256(content).digest())
    if known in session.checked:
        return True
    public = bytes.fromhex(session.roster[session.names[sender]])
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    session.checked.add(known)
    return True


def content_of(step: Step, session: Session, sender: int, body: bytes) -> bytes:
    """Return what a client signs of a message."""
    return _signed(_header(step, session, sender), body)


def _header(step: Step, session: Session, sender: int) -> bytes:
    number = sender.to_bytes(NUMBER_BYTES, "big")
    return b"".join((_MAGIC, step.value, session.digest, number))


def _signed(header: bytes | memoryview, body: bytes | memoryview) -> bytes:
    return b"".join((_TAG, header, hashlib.sha256(body).digest()))


def _difference(step: Step, session: Session, sender: int, header: bytes) -> str:
    """Say in what a header is not the wanted one."""
    wanted, kind = _header(step, session, sender), len(_MAGIC) + 1
    if header[:kind] != wanted[:kind]:
        return "no such message"
    if header[kind:-NUMBER_BYTES] != session.digest:
        return f"of another experiment, round or attempt than {session.attempt}"
    return "sent by another client"
