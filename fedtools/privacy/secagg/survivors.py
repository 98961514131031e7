"""The one list of survivors, and the signatures under it (Bonawitz et al., figure 4, round 3).

A server that told one client that u survived, and another that it was lost, would be given shares
of u's seed and of its private key, and learn its vector. So there is one list of all clients, and
nobody unmasks anything before more than (n + G) / 2 have signed it: honest clients sign one list in
a round, so that no second one has as many signatures. The list also says who has dealt shares, for
a server that hid one neighbour from another would leave less masks than the graph has edges.

    32 bytes the session's digest, and two bits per client, in bytes of eight, low bits first: who
    has dealt shares; who has sent its masked vector

A certificate is the list and rows of 68 bytes: a client's number, and its signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fedtools.core.errors import UserError
from fedtools.privacy.secagg.session import DIGEST_BYTES, Session
from fedtools.privacy.secagg.signed import (
    NUMBER_BYTES,
    SIGNATURE_BYTES,
    Step,
    content_of,
    is_signed,
)

_SIGNED_BYTES = NUMBER_BYTES + SIGNATURE_BYTES


@dataclass(frozen=True)
class Listed:
    """Who took part.

    Attributes:
        dealers: the clients that have dealt shares, and that their neighbours share masks with.
        survivors: those of them whose masked vectors are in the sum.
    """

    dealers: frozenset[int]
    survivors: frozenset[int]

    @property
    def dropped(self) -> frozenset[int]:
        """Return the dealers that did not survive."""
        return self.dealers - self.survivors


def write_list(session: Session, listed: Listed) -> bytes:
    """Return a list's bytes."""
    clients = session.plan.clients
    return b"".join(
        (session.digest, _packed(listed.dealers, clients), _packed(listed.survivors, clients))
    )


def read_list(session: Session, content: bytes | memoryview) -> Listed:
    """Read a list.

    Raises:
        UserError: if it is not of this session, or no list.
    """
    content, size = bytes(content), _list_bytes(session)
    if len(content) != size:
        raise UserError(f"a list of survivors of {len(content)} bytes instead of {size}")
    if content[:DIGEST_BYTES] != session.digest:
        raise UserError("a list of survivors of another experiment, round or attempt")
    half = (size - DIGEST_BYTES) // 2
    dealers, survivors = content[DIGEST_BYTES:-half], content[-half:]
    clients = session.plan.clients
    listed = Listed(_unpacked(dealers, clients), _unpacked(survivors, clients))
    if not listed.survivors <= listed.dealers or write_list(session, listed) != content:
        raise UserError("a list of survivors that contradicts itself")
    return listed


def list_digest(content: bytes) -> bytes:
    """Return what stands for a list in a signed message."""
    return hashlib.sha256(content).digest()


def write_certificate(content: bytes, signatures: Mapping[int, bytes]) -> bytes:
    """Return a list with signatures, by the numbers of clients."""
    rows = (number.to_bytes(NUMBER_BYTES, "big") + signatures[number] for number in signatures)
    return b"".join((content, *sorted(rows)))


def read_certificate(session: Session, content: bytes | memoryview) -> bytes:
    """Return the list of a certificate, after its signatures have been checked.

    Raises:
        UserError: if it is no certificate, or fewer survivors than `plan.quorum` have signed.
    """
    size, content = _list_bytes(session), memoryview(content)
    rows = content[size:]
    most = most_certificate_bytes(session)
    if len(content) < size or len(rows) % _SIGNED_BYTES or len(content) > most:
        raise UserError(f"a certificate of {len(content)} bytes")
    listed = bytes(content[:size])
    survivors, digest = read_list(session, listed).survivors, list_digest(listed)
    found, quorum = set[int](), session.plan.quorum
    for start in range(0, len(rows), _SIGNED_BYTES):
        row = bytes(rows[start : start + _SIGNED_BYTES])
        number, signature = int.from_bytes(row[:NUMBER_BYTES], "big"), row[NUMBER_BYTES:]
        if number in found or number not in survivors:
            continue
        if is_signed(session, number, signature, signing(session, number, digest)):
            found.add(number)
        if len(found) == quorum:
            return listed
    raise UserError(f"a list of survivors that {len(found)} have signed, and {quorum} must")


def signing(session: Session, number: int, digest: bytes) -> bytes:
    """Return what a client signs of a list."""
    return content_of(Step.SURVIVORS, session, number, digest)


def _list_bytes(session: Session) -> int:
    return DIGEST_BYTES + 2 * ((session.plan.clients + 7) // 8)


def _packed(numbers: Iterable[int], clients: int) -> bytes:
    found = np.zeros(clients, np.uint8)
    found[list(numbers)] = 1
    return np.packbits(found, bitorder="little").tobytes()


def _unpacked(content: bytes, clients: int) -> frozenset[int]:
    found = np.unpackbits(np.frombuffer(content, np.uint8), count=clients, bitorder="little")
    return frozenset(np.flatnonzero(found).tolist())


def most_certificate_bytes(session: Session) -> int:
    """Return the largest size of a list with signatures."""
    return _list_bytes(session) + session.plan.clients * _SIGNED_BYTES
