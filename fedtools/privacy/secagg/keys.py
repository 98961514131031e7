"""The first step: fresh keys, signed (Bonawitz et al., CCS 2017, figure 4, round 0).

A client makes for every attempt, from the system's random numbers and never from a seed, two X25519
key pairs, one for encrypting shares, one for masks that pairs share, and the seed of its own mask.
It sends the public keys and a commitment to the seed, so that who recovers the seed, or the private
key, from shares can check it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedtools.core.errors import UserError
from fedtools.privacy.secagg.masks import derive
from fedtools.privacy.secagg.session import Session
from fedtools.privacy.secagg.signed import HEADER_BYTES, SIGNATURE_BYTES, Step, opened, seal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

_BYTES = 32
KEYS_BYTES = HEADER_BYTES + 3 * _BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Secrets:
    """What a client keeps to itself in an attempt, and erases when the round closes.

    Attributes:
        shares: 32 bytes, the private key for encrypting shares.
        masks: the private key for masks that pairs share, s_u.
        seed: the seed of its own mask, b_u.
        noise: the key of the noise that it adds, if any.
    """

    shares: bytes = field(default_factory=lambda: secrets.token_bytes(_BYTES), repr=False)
    masks: bytes = field(default_factory=lambda: secrets.token_bytes(_BYTES), repr=False)
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(_BYTES), repr=False)
    noise: bytes = field(default_factory=lambda: secrets.token_bytes(_BYTES), repr=False)

    def to_bytes(self) -> bytes:
        """Return all secrets, 128 bytes."""
        return self.shares + self.masks + self.seed + self.noise

    @classmethod
    def from_bytes(cls, content: bytes) -> Secrets:
        """Return the secrets of `to_bytes`; raise a ValueError for another length."""
        if len(content) != 4 * _BYTES:
            raise ValueError(f"{len(content)} bytes of secrets")
        return cls(*(content[at : at + _BYTES] for at in range(0, 4 * _BYTES, _BYTES)))


@dataclass(frozen=True)
class Keys:
    """What everybody may know of a client in an attempt.

    Attributes:
        shares, masks: the public keys of its two pairs, 32 bytes each.
        commitment: of its own mask's seed.
    """

    shares: bytes
    masks: bytes
    commitment: bytes


def private(secret: bytes) -> X25519PrivateKey:
    """Return the private key of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret)


def public(key: bytes) -> X25519PublicKey:
    """Return the public key of 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return X25519PublicKey.from_public_bytes(key)


def public_bytes(secret: bytes) -> bytes:
    """Return the public key of a private one."""
    return private(secret).public_key().public_bytes_raw()


def commitment(session: Session, client: int, seed: bytes) -> bytes:
    """Return the commitment to a seed; it hides the seed, which is as random as a key."""
    return hashlib.sha256(session.info("seed", client, seed)).digest()


def send_keys(session: Session, client: int, kept: Secrets, key: Ed25519PrivateKey) -> bytes:
    """Return a client's signed public keys."""
    found = commitment(session, client, kept.seed)
    body = b"".join((public_bytes(kept.shares), public_bytes(kept.masks), found))
    return seal(Step.KEYS, session, client, body, key)


def read_keys(session: Session, client: int, message: bytes | memoryview) -> Keys:
    """Read a client's public keys.

    Raises:
        UserError: as in `opened`.
    """
    body = bytes(opened(Step.KEYS, session, client, message, 3 * _BYTES))
    return Keys(*(body[at : at + _BYTES] for at in range(0, 3 * _BYTES, _BYTES)))


def check_keys(session: Session, client: int, keys: Keys) -> None:
    """Raise a `UserError` if a public key gives everybody the same secret (of small order)."""
    for one in (keys.shares, keys.masks):
        # Any private key finds it.
        agree(session, bytes(_BYTES), {client: one})


def agree(session: Session, kept: bytes, others: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the secrets that a client shares with others (X25519, RFC 7748).

    Args:
        kept: the client's private key.
        others: number -> public key.

    Raises:
        UserError: if a public key gives everybody the same secret.
    """
    mine, found = private(kept), {}
    for number, theirs in others.items():
        try:
            found[number] = mine.exchange(public(theirs))
        except ValueError:
            problem = f"message 'keys' of {session.names[number]} has a key that protects nothing"
            raise UserError(problem) from None
    return found


def pair_masks(
    session: Session, client: int, kept: bytes, others: Mapping[int, bytes]
) -> tuple[list[bytes], list[bytes]]:
    """Return the keys of the masks that a client shares with others.

    Args:
        kept: the private key of the client's pair for masks.
        others: number -> the other's public key.

    Returns:
        those that the client adds, and those that it subtracts.

    Raises:
        UserError: as in `agree`.
    """
    plus, minus = list[bytes](), list[bytes]()
    for other, secret in agree(session, kept, others).items():
        info = session.info("pair", min(client, other), max(client, other))
        (plus if client < other else minus).append(derive(secret, info))
    return plus, minus


def self_mask(session: Session, client: int, seed: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return derive(seed, session.info("self", client))
