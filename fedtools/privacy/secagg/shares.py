"""The second step: shares of a client's secrets, encrypted for its neighbours (round 1).

For each neighbour v, client u has a row

    v, 4 bytes; a random nonce, 12; AES-256-GCM of the shares of b_u and s_u, 2 * 33 + 16; and the
    commitments to the two, 2 * 32

whose associated data are the attempt, u, v and the commitments. The key follows from X25519 of the
keys of u and v, in this direction. The commitments tell the server later which shares are right, so
that a wrong one costs its sender alone; a share is as random as a key, and its hash hides it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from fedtools.core.errors import UserError
from fedtools.privacy.secagg.keys import Secrets
from fedtools.privacy.secagg.masks import derive
from fedtools.privacy.secagg.session import DIGEST_BYTES, Session
from fedtools.privacy.secagg.shamir import SHARE_BYTES, deal
from fedtools.privacy.secagg.signed import NUMBER_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEED: Final = "share of seed"
MASKS: Final = "share of masks"
_NONCE_BYTES, _TAG_BYTES = 12, 16
_CIPHER_BYTES = 2 * SHARE_BYTES + _TAG_BYTES
ROW_BYTES = NUMBER_BYTES + _NONCE_BYTES + _CIPHER_BYTES + 2 * DIGEST_BYTES
# What stands for a share that its holder could not read; no value of the field has these bytes.
NO_SHARE = b"\xff" * SHARE_BYTES


class Row(NamedTuple):
    """The shares of one client for another, encrypted.

    Attributes:
        other: the number of the other: whom it is for, or whom it is from.
        nonce, cipher: what AES-GCM takes.
        commitments: to the shares of the dealer's seed and private key.
    """

    other: int
    nonce: bytes
    cipher: bytes
    commitments: tuple[bytes, bytes]

    def to_bytes(self) -> bytes:
        """Return the row's bytes."""
        number = self.other.to_bytes(NUMBER_BYTES, "big")
        return b"".join((number, self.nonce, self.cipher, *self.commitments))


@dataclass(frozen=True)
class Held:
    """The shares that a client holds of another's secrets.

    Attributes:
        seed: of the seed of its own mask.
        masks: of its private key for masks of pairs.
    """

    seed: bytes = field(repr=False)
    masks: bytes = field(repr=False)


def committed(session: Session, dealer: int, holder: int, kind: str, share: bytes) -> bytes:
    """Return the commitment to a share of a kind, `SEED` or `MASKS`."""
    return hashlib.sha256(session.info(kind, dealer, holder, share)).digest()


def deal_shares(session: Session, dealer: int, kept: Secrets, agreed: Mapping[int, bytes]) -> bytes:
    """Share a client's secrets among its neighbours, and encrypt each one's shares for it.

    Args:
        agreed: neighbour -> the secret that the pairs of keys for shares agree on.

    Returns:
        a row for each, ascending.
    """
    numbers = sorted(agreed)
    points, threshold = [point(number) for number in numbers], session.plan.threshold
    both = zip(deal(kept.seed, points, threshold), deal(kept.masks, points, threshold), strict=True)
    rows = []
    for holder, (seed, masks) in zip(numbers, both, strict=True):
        commitments = (
            committed(session, dealer, holder, SEED, seed),
            committed(session, dealer, holder, MASKS, masks),
        )
        key = _key(session, agreed[holder], dealer, holder)
        nonce, bound = secrets.token_bytes(_NONCE_BYTES), _bound(session, dealer, holder)
        cipher = key.encrypt(nonce, seed + masks, b"".join((bound, *commitments)))
        rows.append(Row(holder, nonce, cipher, commitments).to_bytes())
    return b"".join(rows)


def open_shares(session: Session, holder: int, agreed: bytes, row: Row) -> Held:
    """Decrypt the shares that another client has dealt to this one.

    Args:
        agreed: the secret that the pairs of keys for shares agree on.
        row: from the dealer, `row.other`.

    Raises:
        UserError: if they are not what the dealer encrypted in this attempt for this client, or do
            not fit its commitments.
    """
    from cryptography.exceptions import InvalidTag

    dealer, name = row.other, session.names[row.other]
    key = _key(session, agreed, dealer, holder)
    bound = b"".join((_bound(session, dealer, holder), *row.commitments))
    try:
        clear = key.decrypt(row.nonce, row.cipher, bound)
    except InvalidTag:
        raise UserError(f"the shares of {name} for {session.names[holder]} are damaged") from None
    held = Held(clear[:SHARE_BYTES], clear[SHARE_BYTES:])
    found = (
        committed(session, dealer, holder, SEED, held.seed),
        committed(session, dealer, holder, MASKS, held.masks),
    )
    if found != row.commitments:
        raise UserError(f"the shares of {name} do not fit its commitments")
    return held


def read_rows(content: bytes | memoryview, whose: str, wanted: Sequence[int] | None) -> list[Row]:
    """Read rows.

    Args:
        whose: what to call them in an error.
        wanted: the numbers that they must have, ascending; None: any, in ascending order.

    Raises:
        UserError: if their length or numbers are others.
    """
    if len(content) % ROW_BYTES:
        raise UserError(f"{whose}: {len(content)} bytes are no rows of {ROW_BYTES}")
    rows = list(_rows(memoryview(content)))
    numbers = [row.other for row in rows]
    if numbers != sorted(set(numbers)) or (wanted is not None and numbers != list(wanted)):
        raise UserError(f"{whose}: rows of other clients than its neighbours")
    return rows


def _rows(content: memoryview) -> Iterator[Row]:
    for start in range(0, len(content), ROW_BYTES):
        row = bytes(content[start : start + ROW_BYTES])
        at = NUMBER_BYTES + _NONCE_BYTES
        nonce, cipher, rest = row[NUMBER_BYTES:at], row[at:][:_CIPHER_BYTES], row[-64:]
        number = int.from_bytes(row[:NUMBER_BYTES], "big")
        yield Row(number, nonce, cipher, (rest[:DIGEST_BYTES], rest[DIGEST_BYTES:]))


def point(number: int) -> int:
    """Return where a client's shares lie on polynomials; 0 is the secret's place."""
    return number + 1


def _key(session: Session, agreed: bytes, dealer: int, holder: int) -> AESGCM:
    """Return the key for shares of a dealer for a holder; the other direction has another."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(derive(agreed, session.info("shares", dealer, holder)))


def _bound(session: Session, dealer: int, holder: int) -> bytes:
    return session.info("row", dealer, holder)
