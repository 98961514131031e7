"""What a client has bound itself to: in each round one attempt, and one list of survivors.

Training repeats byte for byte, so that a client has the same vector in every attempt at a round. If
some clients unmasked a sum over S, and others, in a second attempt, one over S without u, the
difference would be u's vector. It is not enough that those who unmasked refuse: others, which had
only signed, could make up the second sum. So a client is bound when it *signs*.
"""

from __future__ import annotations

from fedtools.core.errors import UserError
from fedtools.privacy.secagg.session import Session


class Promises:
    """The lists that a client has signed, and the rounds that it has unmasked; in memory."""

    def __init__(self) -> None:
        self._signed: dict[tuple[str, int], bytes] = {}
        self._unmasked = set[tuple[str, int]]()

    def check(self, session: Session) -> None:
        """Raise a `UserError` if another attempt at the round was signed, or it is closed."""
        where = session.label, session.round
        if where in self._unmasked:
            raise UserError(f"round {session.round} was unmasked before, and is never again")
        signed = self._signed.get(where)
        if signed is not None and not signed.startswith(session.digest):
            problem = f"in round {session.round} another attempt than {session.attempt} was signed"
            raise UserError(problem, remedy="finish that one")

    def sign(self, session: Session, digest: bytes) -> None:
        """Bind the client to a list, before its signature leaves it.

        Args:
            digest: of the list.

        Raises:
            UserError: as in `check`, or if it has signed another list.
        """
        self.check(session)
        wanted = session.digest + digest
        if self._signed.setdefault((session.label, session.round), wanted) != wanted:
            raise UserError(f"in round {session.round} another list of survivors was signed")

    def unmask(self, session: Session, digest: bytes) -> None:
        """Close a round, before anything of it is unmasked.

        Raises:
            UserError: as in `check`, or unless this list was signed.
        """
        self.check(session)
        where = session.label, session.round
        if self._signed.get(where) != session.digest + digest:
            raise UserError(f"in round {session.round} this list of survivors was not signed here")
        self._unmasked.add(where)
