"""What a message is an answer to, so that one of another experiment or round does not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_WRONG = {
    "experiment": "is of another experiment",
    "round": "is of another round",
    "base": "started from another global state",
}


class Origin(NamedTuple):
    """What a message is an answer to; every row of its table says so.

    Attributes:
        experiment: SHA-256 of the sums of all that the experiment began with.
        round: the number of the round.
        base: SHA-256 of the global state that the clients start from.
    """

    experiment: str
    round: int
    base: str

    def columns(self) -> dict[str, str]:
        """Return the columns of a row that say where a message came from."""
        return {name: str(value) for name, value in self._asdict().items()}

    def problem(self, row: Mapping[str, str]) -> str:
        """Return what is wrong with the origin that a row gives; "" if it is this one."""
        for name, value in self.columns().items():
            if row[name] != value:
                return _WRONG[name]
        return ""
