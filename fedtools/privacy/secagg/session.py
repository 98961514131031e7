"""What one attempt at a round's sum is about: everybody computes it from what was frozen.

Each key, signature and ciphertext of an attempt is bound to `Session.digest`, a hash of all of it,
so that nothing of another experiment, round or attempt, or with other numbers, is accepted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedtools.core.errors import UserError
from fedtools.data.datadir import byte_order
from fedtools.privacy.secagg.graph import Graph, harary
from fedtools.privacy.secagg.masks import word_bits
from fedtools.privacy.secagg.plan import Plan

DIGEST_BYTES = 32
# A server that begins again until a graph suits it gains six bits, and no more.
MOST_ATTEMPTS = 64
_MOST_VALUES = 1 << 34
_NUMBER = b"i" + (8).to_bytes(8, "big")


def encode(purpose: str, *parts: str | int | bytes) -> bytes:
    """Encode parts so that no other purpose or parts have the same bytes.

    Each part is preceded by its type and length; a whole number has 8 bytes, high ones first.
    """
    return b"fedtools secagg 1\0" + _encoded(purpose, *parts)


def _encoded(*parts: str | int | bytes) -> bytes:
    found = []
    for part in parts:
        if isinstance(part, int):
            found += [_NUMBER, part.to_bytes(8, "big")]
        else:
            kind, content = (b"s", part.encode()) if isinstance(part, str) else (b"b", part)
            found += [kind, len(content).to_bytes(8, "big"), content]
    return b"".join(found)


@dataclass(frozen=True)
class Session:
    """An attempt at a sum of the clients of a round.

    Attributes:
        label: what tells the experiment from all others, such as its random name.
        round: the round's number.
        attempt: from 1; an attempt with less than the least number of survivors is given up.
        basis: what the clients' changes follow from: sums of the options and of the state that they
            start from. Who was given others is in another session.
        roster: name -> Ed25519 public key, 64 hexadecimal digits, of the clients that are asked to
            take part. Clients of one site may have one key.
        plan: the numbers for that many clients.
        size: the number of values of a client.
        most: the largest magnitude of a value, in steps of the grid.
    """

    label: str
    round: int
    attempt: int
    basis: str
    roster: Mapping[str, str]
    plan: Plan
    size: int
    most: int

    def __post_init__(self) -> None:
        """Check all numbers.

        Raises:
            UserError: if one is out of range, or the plan is for another number of clients.
        """
        problem = ""
        if not 1 <= self.attempt <= MOST_ATTEMPTS:
            problem = f"attempt {self.attempt}; there are {MOST_ATTEMPTS}"
        elif not 0 <= self.round < 1 << 32:
            problem = f"round {self.round}"
        elif self.plan.clients != len(self.roster):
            problem = f"a plan for {self.plan.clients} clients, and a roster of {len(self.roster)}"
        elif not 1 <= self.size <= _MOST_VALUES:
            problem = f"{self.size} values"
        elif not 1 <= self.most < 1 << 52:
            problem = f"values up to {self.most}"
        if problem:
            raise UserError(f"no secure sum: {problem}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the clients in C order, in which they are numbered from 0."""
        return tuple(byte_order(self.roster))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Return the number of each client."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def bits(self) -> int:
        """Return the bits of a word that holds the sum."""
        return word_bits(self.most, self.plan.clients)

    @cached_property
    def _seed(self) -> bytes:
        """Return the hash of what the graph follows from, which no client can influence."""
        rows = (part for name in self.names for part in (name, bytes.fromhex(self.roster[name])))
        content = encode("graph", self.label, self.round, self.attempt, self.basis, *rows)
        return hashlib.sha256(content).digest()

    @cached_property
    def digest(self) -> bytes:
        """Return the hash of everything."""
        plan = self.plan
        numbers = (plan.clients, plan.lost, plan.colluding, plan.neighbours, plan.threshold)
        content = encode("session", self._seed, *numbers, self.size, self.most, self.bits)
        return hashlib.sha256(content).digest()

    @cached_property
    def graph(self) -> Graph:
        """Return who is whose neighbour."""
        return harary(self._seed, self.names, self.plan.neighbours)

    def number(self, name: str) -> int:
        """Return a client's number.

        Raises:
            UserError: if it is not in the roster.
        """
        if name not in self.numbers:
            raise UserError(f"{name!r} is not in the roster of round {self.round}")
        return self.numbers[name]

    def info(self, purpose: str, *parts: int | bytes) -> bytes:
        """Encode what a key or a hash is for: a purpose, this attempt, and more.

        A client needs some thousands, so that what they have in common is kept.
        """
        prefixes = self._prefixes
        if purpose not in prefixes:
            prefixes[purpose] = encode(purpose, self.digest)
        return prefixes[purpose] + _encoded(*parts)

    @cached_property
    def checked(self) -> set[tuple[int, bytes, bytes]]:
        """Return the signatures that this process has found right, of `signed.is_signed`."""
        return set()

    @cached_property
    def _prefixes(self) -> dict[str, bytes]:
        return {}
