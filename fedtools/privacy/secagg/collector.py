"""The server's part of an attempt at a secure sum (Bonawitz et al., CCS 2017, figure 4: server).

It refuses what is malformed, which costs the sender alone, and checks every share against what its
dealer committed to, so that a wrong one cannot spoil what it recovers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from fedtools.core.errors import UserError, some
from fedtools.privacy.secagg.keys import (
    Keys,
    check_keys,
    commitment,
    pair_masks,
    public_bytes,
    read_keys,
    self_mask,
)
from fedtools.privacy.secagg.masks import apply, to_values, word_type
from fedtools.privacy.secagg.session import DIGEST_BYTES, Session
from fedtools.privacy.secagg.shamir import SECRET_BYTES, SHARE_BYTES, recover
from fedtools.privacy.secagg.shares import (
    MASKS,
    NO_SHARE,
    ROW_BYTES,
    SEED,
    committed,
    point,
    read_rows,
)
from fedtools.privacy.secagg.signed import SIGNATURE_BYTES, Step, opened
from fedtools.privacy.secagg.survivors import (
    Listed,
    list_digest,
    read_list,
    write_certificate,
    write_list,
)

# Masks that are removed at once: each has a cipher of some hundred bytes.
_MASKS = 64


class Collector:
    """The server in one attempt; each step takes the clients' messages, by name.

    Args:
        session: the attempt.

    Attributes:
        refused: client -> a line that says why a message of it was refused, the last one.
    """

    def __init__(self, session: Session):
        self.refused: dict[str, str] = {}
        self._session = session
        self._messages: dict[int, bytes] = {}
        self._keys: dict[int, Keys] = {}
        # (dealer, holder) -> commitments to the two shares
        self._commitments: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self._total = np.zeros(session.size, word_type(session.bits))
        self._listed = Listed(frozenset(), frozenset())
        self._signatures: dict[int, bytes] = {}
        self._seeds: dict[int, bytes] = {}
        # of whom -> holder's point -> share
        self._shares: dict[int, dict[int, bytes]] = {}

    def keys(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """Take public keys, and return to each client those of its neighbours.

        Raises:
            UserError: if too few clients are left; so do the other steps.
        """
        for number, message in self._known(messages.items(), range(self._session.plan.clients)):
            with self._refusing(number):
                keys = read_keys(self._session, number, message)
                check_keys(self._session, number, keys)
                self._keys[number] = keys
                self._messages[number] = bytes(message)
        self._enough(Step.KEYS, len(self._keys))
        return {
            self._session.names[number]: b"".join(
                self._messages[other] for other in self._neighbours(number, self._keys)
            )
            for number in self._keys
        }

    def shares(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """Take encrypted shares, and return to each client those that are for it."""
        session, routed = self._session, dict[int, dict[int, bytes]]()
        for number, message in self._known(messages.items(), self._keys):
            with self._refusing(number):
                holders = self._neighbours(number, self._keys)
                body = opened(Step.SHARES, session, number, message, len(holders) * ROW_BYTES)
                whose = f"message 'shares' of {session.names[number]}"
                for row in read_rows(body, whose, holders):
                    self._commitments[number, row.other] = row.commitments
                    sent = routed.setdefault(number, {})
                    sent[row.other] = row._replace(other=number).to_bytes()
        self._listed = Listed(frozenset(routed), frozenset())
        self._enough(Step.SHARES, len(routed))
        return {
            session.names[number]: b"".join(
                routed[other][number] for other in self._neighbours(number, routed)
            )
            for number in sorted(routed)
        }

    def masked(self, messages: Iterable[tuple[str, bytes]]) -> bytes:
        """Take masked vectors, in any order, each of which may then be forgotten.

        Returns:
            the list of survivors, for all.
        """
        session, survivors = self._session, set[int]()
        size = self._total.nbytes
        for number, message in self._known(messages, self._listed.dealers):
            with self._refusing(number):
                if number in survivors:
                    raise UserError(f"a second masked vector of {session.names[number]}")
                body = opened(Step.MASKED, session, number, message, size)
                self._total += np.frombuffer(body, self._total.dtype)
                survivors.add(number)
        self._listed = Listed(self._listed.dealers, frozenset(survivors))
        self._enough(Step.MASKED, len(survivors))
        return write_list(session, self._listed)

    def snapshot(self) -> bytes:
        """Return what the masked vectors have become: the list of survivors, and the masked sum."""
        return write_list(self._session, self._listed) + self._total.tobytes()

    def restore(self, content: bytes) -> bytes:
        """Go on behind the masked vectors, from a snapshot, and return the list of survivors.

        Raises:
            UserError: if it is of another session, or no snapshot.
        """
        words, whole = self._total.nbytes, memoryview(content)
        self._listed = read_list(self._session, whole[:-words])
        self._total = np.frombuffer(whole[-words:], self._total.dtype).copy()
        return bytes(whole[:-words])

    def taken(self, step: Step) -> Collection[int]:
        """Return the numbers of the clients whose messages of a step before the last were taken."""
        return {
            Step.KEYS: self._keys,
            Step.SHARES: self._listed.dealers,
            Step.MASKED: self._listed.survivors,
            Step.SURVIVORS: self._signatures,
        }[step]

    def survivors(self, messages: Mapping[str, bytes]) -> bytes:
        """Take signatures under the list; may be called again when more have come.

        Returns:
            the list and as many signatures as are needed, for all.

        Raises:
            UserError: if these are too few.
        """
        session, content = self._session, write_list(self._session, self._listed)
        digest, quorum = list_digest(content), session.plan.quorum
        for number, message in self._known(messages.items(), self._listed.survivors):
            with self._refusing(number):
                body = opened(Step.SURVIVORS, session, number, message, DIGEST_BYTES)
                if body != digest:
                    name = session.names[number]
                    raise UserError(f"message 'survivors' of {name} is about another list")
                self._signatures[number] = bytes(message[-SIGNATURE_BYTES:])
        if len(self._signatures) < quorum:
            have = len(self._signatures)
            raise UserError(f"round {session.round}: {have} signed the survivors; {quorum} needed")
        enough = sorted(self._signatures)[:quorum]
        return write_certificate(content, {one: self._signatures[one] for one in enough})

    def unmask(self, messages: Mapping[str, bytes]) -> np.ndarray:
        """Take shares, and unmask the sum; may be called again when more have come.

        Returns:
            (size,), int64: the sum of the survivors' vectors.

        Raises:
            UserError: if a secret has fewer shares than are needed, or is not what its client
                committed to.
        """
        for number, message in self._known(messages.items(), self._listed.survivors):
            with self._refusing(number):
                self._take(number, message)
        self._check_shares()
        total = self._total.copy()
        own = [
            self_mask(self._session, number, self._seed(number))
            for number in sorted(self._listed.survivors)
        ]
        for start in range(0, len(own), _MASKS):
            apply(total, (), own[start : start + _MASKS])
        for number in sorted(self._listed.dropped):
            kept = self._recovered(number)
            if public_bytes(kept) != self._keys[number].masks:
                self._spoilt(number)
            left = self._neighbours(number, self._listed.survivors)
            others = {other: self._keys[other].masks for other in left}
            # What the lost client would have added cancels what its neighbours have in the sum.
            apply(total, *pair_masks(self._session, number, kept, others))
        return to_values(total)

    def _take(self, number: int, message: bytes) -> None:
        """Take one client's shares, all of them or none."""
        session, name = self._session, self._session.names[number]
        dealers = self._neighbours(number, self._listed.dealers)
        size = SECRET_BYTES + SHARE_BYTES * len(dealers)
        body = bytes(opened(Step.UNMASK, session, number, message, size))
        seed, rest = body[:SECRET_BYTES], body[SECRET_BYTES:]
        if commitment(session, number, seed) != self._keys[number].commitment:
            raise UserError(f"message 'unmask' of {name} has another seed than its keys")
        found = {}
        for place, dealer in enumerate(dealers):
            share = rest[place * SHARE_BYTES :][:SHARE_BYTES]
            if share == NO_SHARE:
                continue
            which = 0 if dealer in self._listed.survivors else 1
            wanted = self._commitments[dealer, number][which]
            if committed(session, dealer, number, (SEED, MASKS)[which], share) != wanted:
                whose = session.names[dealer]
                raise UserError(f"message 'unmask' of {name} has a wrong share of {whose}")
            found[dealer] = share
        self._seeds[number] = seed
        for dealer, share in found.items():
            self._shares.setdefault(dealer, {})[point(number)] = share

    def _check_shares(self) -> None:
        """Raise a `UserError` if a secret cannot be recovered."""
        least, names = self._session.plan.threshold, self._session.names
        wanted = self._listed.dealers - self._seeds.keys()
        short = [one for one in sorted(wanted) if len(self._shares.get(one, ())) < least]
        if short:
            fewest = min(len(self._shares.get(one, ())) for one in short)
            whose = some([names[one] for one in short])
            problem = f"round {self._session.round}: {fewest} shares of the secrets of {whose}"
            raise UserError(f"{problem}; {least} needed", remedy="wait for other clients")

    def _seed(self, number: int) -> bytes:
        """Return the seed of a survivor's own mask."""
        if number in self._seeds:
            return self._seeds[number]
        seed = self._recovered(number)
        if commitment(self._session, number, seed) != self._keys[number].commitment:
            self._spoilt(number)
        return seed

    def _recovered(self, number: int) -> bytes:
        try:
            return recover(self._shares[number], self._session.plan.threshold)
        except ValueError:
            self._spoilt(number)
            raise

    def _spoilt(self, number: int) -> None:
        """Raise a `UserError`: all shares are as they were dealt, so that the dealer is wrong."""
        name = self._session.names[number]
        problem = f"round {self._session.round}: {name} has dealt shares of something else"
        raise UserError(f"{problem} than its keys", remedy=f"go on without {name}") from None

    def _neighbours(self, number: int, among: Iterable[int]) -> list[int]:
        """Return a client's neighbours among some, ascending."""
        kept = among if isinstance(among, (dict, set, frozenset)) else set(among)
        return [other for other in self._session.graph.neighbours[number] if other in kept]

    def _known(
        self, messages: Iterable[tuple[str, bytes]], allowed: Iterable[int]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield messages of clients that have not been lost before; refuse those of others."""
        numbers, kept = self._session.numbers, frozenset(allowed)
        for name, message in messages:
            if name not in numbers:
                self.refused[name] = f"{name!r} is not in the roster"
            elif numbers[name] not in kept:
                self.refused[name] = f"{name} was lost in an earlier step"
            else:
                yield numbers[name], message

    def _enough(self, step: Step, left: int) -> None:
        """Raise a `UserError` if fewer clients are left than must survive."""
        least = self._session.plan.least
        if left < least:
            problem = f"round {self._session.round}: {left} clients are left after step"
            raise UserError(f"{problem} '{step.name.lower()}', and {least} are the least")

    @contextmanager
    def _refusing(self, number: int) -> Iterator[None]:
        """Note a `UserError` about a client's message, which costs nobody else."""
        try:
            yield
        except UserError as error:
            self.refused[self._session.names[number]] = str(error)
