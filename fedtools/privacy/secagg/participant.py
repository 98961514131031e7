"""A client's part of an attempt at a secure sum (Bonawitz et al., CCS 2017, figure 4: user u).

It believes nothing that it cannot check: keys are signed by who is in the roster, shares come from
whose keys they fit, and before it unmasks anything, the list of survivors is long enough, names
exactly the neighbours that it shares masks with, and has been signed by enough others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedtools.core.errors import UserError
from fedtools.privacy.secagg.keys import (
    KEYS_BYTES,
    Keys,
    Secrets,
    agree,
    pair_masks,
    read_keys,
    self_mask,
    send_keys,
)
from fedtools.privacy.secagg.masks import apply, to_words
from fedtools.privacy.secagg.promises import Promises
from fedtools.privacy.secagg.session import Session
from fedtools.privacy.secagg.shares import NO_SHARE, Held, deal_shares, open_shares, read_rows
from fedtools.privacy.secagg.signed import Step, seal, sender_of
from fedtools.privacy.secagg.survivors import Listed, list_digest, read_certificate, read_list

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class Participant:
    """A client in one attempt; each step is done once, in the order of `Step`.

    Args:
        session: the attempt.
        name: the client.
        key: the private key of what the roster has.
        promises: what the client has bound itself to in this and other attempts.
        kept: its secrets in the attempt; by default fresh ones.

    Attributes:
        problems: a line for each neighbour whose shares are not usable.

    Raises:
        UserError: if the key is another's, or the round is bound to another attempt.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        key: Ed25519PrivateKey,
        promises: Promises,
        kept: Secrets | None = None,
    ):
        self._session, self._number = session, session.number(name)
        if key.public_key().public_bytes_raw().hex() != session.roster[name]:
            raise UserError(f"not the key of {name} in the roster of round {session.round}")
        promises.check(session)
        self._key, self._promises = key, promises
        self._due = list(Step)
        self._kept = kept or Secrets()
        # Of neighbours: their keys, secrets agreed with them; of dealers, what this client holds.
        self._keys: dict[int, Keys] = {}
        self._agreed: dict[int, bytes] = {}
        self._held: dict[int, Held | None] = {}
        self._listed = b""
        self.problems: list[str] = []

    def resume(self, *given: bytes) -> None:
        """Go on in another process, behind the steps to which the server has answered.

        Args:
            given: what the server sent before the step that is due, exactly as it was taken then:
                keys, shares, the list of survivors.

        Raises:
            UserError: as in these steps.
        """
        takes = (self._take_keys, self._take_shares, self._take_list)[: len(given)]
        for take, content in zip(takes, given, strict=True):
            take(content)
        self._due = list(Step)[1 + len(given) :]

    def keys(self) -> bytes:
        """Return fresh public keys, signed."""
        self._check(Step.KEYS)
        return self._done(send_keys(self._session, self._number, self._kept, self._key))

    def shares(self, keys: bytes) -> bytes:
        """Return shares of this client's secrets, encrypted for its neighbours.

        Args:
            keys: the messages `keys` of its neighbours, in the order of their numbers.

        Raises:
            UserError: if one is not a neighbour's, or there are fewer than t.
        """
        self._check(Step.SHARES)
        self._take_keys(keys)
        dealt = deal_shares(self._session, self._number, self._kept, self._agreed)
        return self._done(self._sealed(Step.SHARES, dealt))

    def _take_keys(self, keys: bytes) -> None:
        if len(keys) % KEYS_BYTES:
            raise UserError(f"keys of neighbours: {len(keys)} bytes are no rows of {KEYS_BYTES}")
        rows = [keys[start : start + KEYS_BYTES] for start in range(0, len(keys), KEYS_BYTES)]
        numbers = [sender_of(row) for row in rows]
        self._check_neighbours("keys", numbers)
        pairs = zip(numbers, rows, strict=True)
        self._keys = {number: read_keys(self._session, number, row) for number, row in pairs}
        for_shares = {number: one.shares for number, one in self._keys.items()}
        self._agreed = agree(self._session, self._kept.shares, for_shares)

    def masked(self, shares: bytes, values: np.ndarray) -> bytes:
        """Return this client's vector, masked.

        Args:
            shares: the rows that its neighbours have dealt to it, in the order of their numbers.
            values: (size,), whole numbers of at most `most` in magnitude.

        Raises:
            UserError: if a row is of no neighbour that sent keys, or there are fewer than t.
            ValueError: if the vector is not what the session says.
        """
        self._check(Step.MASKED)
        session = self._session
        if values.shape != (session.size,):
            raise ValueError(f"values of shape {values.shape} instead of ({session.size},)")
        words = to_words(values, session.most, session.bits)
        self._take_shares(shares)
        others = {number: self._keys[number].masks for number in self._held}
        plus, minus = pair_masks(session, self._number, self._kept.masks, others)
        apply(words, [self_mask(session, self._number, self._kept.seed), *plus], minus)
        return self._done(self._sealed(Step.MASKED, words.data.cast("B")))

    def _take_shares(self, shares: bytes) -> None:
        session = self._session
        rows = read_rows(shares, "shares of neighbours", None)
        self._check_neighbours("shares", [row.other for row in rows])
        if unknown := [row.other for row in rows if row.other not in self._keys]:
            raise UserError(f"shares of {session.names[unknown[0]]}, which sent no keys")
        for row in rows:
            try:
                agreed = self._agreed[row.other]
                self._held[row.other] = open_shares(session, self._number, agreed, row)
            except UserError as error:
                # The others hold enough. The mask with this neighbour needs no share.
                self._held[row.other] = None
                self.problems.append(str(error))

    def survivors(self, listed: bytes) -> bytes:
        """Return this client's signature under the list of survivors, which binds it for good.

        Raises:
            UserError: if it may not unmask such a list, or has signed another in this round.
        """
        self._check(Step.SURVIVORS)
        self._take_list(listed)
        digest = list_digest(listed)
        self._promises.sign(self._session, digest)
        return self._done(self._sealed(Step.SURVIVORS, digest))

    def _take_list(self, listed: bytes) -> None:
        self._check_list(read_list(self._session, listed))
        self._listed = bytes(listed)

    def unmask(self, certificate: bytes) -> bytes:
        """Return what unmasks the sum, and forget all secrets.

        Args:
            certificate: the list of survivors, with signatures.

        Raises:
            UserError: unless it is the list that was signed here, and by enough others.
        """
        self._check(Step.UNMASK)
        content = read_certificate(self._session, certificate)
        if content != self._listed:
            raise UserError("another list of survivors than was signed here")
        self._promises.check_signed(self._session, list_digest(content))
        listed = read_list(self._session, content)
        rows = [self._kept.seed]
        for number, held in sorted(self._held.items()):
            share = NO_SHARE
            if held is not None:
                share = held.seed if number in listed.survivors else held.masks
            rows.append(share)
        body = b"".join(rows)
        self._held, self._agreed, self._kept = {}, {}, Secrets()
        return self._done(self._sealed(Step.UNMASK, body))

    def _check_list(self, listed: Listed) -> None:
        """Raise a `UserError` unless this client may unmask such a list."""
        session, plan = self._session, self._session.plan
        mine = set(session.graph.neighbours[self._number])
        problem = ""
        if self._number not in listed.survivors:
            problem = "this client is missing from the list of survivors"
        elif len(listed.survivors) < plan.least:
            problem = f"{len(listed.survivors)} survivors, and {plan.least} are the least"
        elif listed.dealers & mine != self._held.keys():
            problem = "the list of survivors has other neighbours than this client's masks"
        elif (left := len(listed.survivors & mine) + 1) < plan.threshold:
            problem = f"of this client and its neighbours {left} are left, and {plan.threshold}"
            problem += " are the least"
        if problem:
            raise UserError(f"round {session.round}: {problem}")

    def _check_neighbours(self, what: str, numbers: list[int]) -> None:
        """Raise a `UserError` unless these are enough neighbours, ascending."""
        session, least = self._session, self._session.plan.threshold
        mine = session.graph.neighbours[self._number]
        if numbers != sorted(set(numbers)) or not set(numbers) <= set(mine):
            raise UserError(f"{what} of others than this client's neighbours")
        if len(numbers) < least:
            raise UserError(f"{what} of {len(numbers)} of {len(mine)} neighbours; {least} needed")

    def _check(self, step: Step) -> None:
        """Raise a `UserError` if a step is not due."""
        if not self._due or self._due[0] is not step:
            due = self._due[0].name.lower() if self._due else "none"
            raise UserError(f"step '{step.name.lower()}' is not due, but {due}")
        self._promises.check(self._session)

    def _done(self, message: bytes) -> bytes:
        self._due.pop(0)
        return message

    def _sealed(self, step: Step, body: bytes | memoryview) -> bytes:
        return seal(step, self._session, self._number, body, self._key)
