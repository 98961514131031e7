"""Errors of one system by utterance: the files that scoring writes, and sums of them.

Differences of systems are paired by speaker, and a report keeps these counts next to its page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedtools.core.errors import UserError
from fedtools.core.tables import count, read_tsv
from fedtools.score.bootstrap import ALL, AVERAGE, error_rates

# The file that `fedtools score` writes.
FILE = "utterances.tsv"
KEYS = ("client", "speaker", "utterance")
# A client and a speaker, as intervals draw them.
Speaker = tuple[str, str]
Key = TypeVar("Key", str, Speaker)


def columns_of(rates: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of a file of these rates."""
    return *KEYS, *(f"{rate}_{what}" for rate in rates for what in ("tokens", "errors"))


@dataclass(frozen=True, eq=False)
class Utterances:
    """Errors of one system.

    Attributes:
        keys: client, speaker and utterance of each.
        tokens, errors: rate -> (utterances,) int.
    """

    keys: Sequence[tuple[str, str, str]]
    tokens: Mapping[str, np.ndarray]
    errors: Mapping[str, np.ndarray]

    @classmethod
    def read(cls, path: Path, rates: Collection[str], remedy: str) -> Utterances:
        """Read a file of these rates; `remedy` is how to write it.

        Raises:
            UserError: if it is missing or malformed.
        """
        if not path.exists():
            raise UserError("no errors by utterance", path=path, remedy=remedy)
        rows = read_tsv(path, columns_of(rates))
        tokens, errors = (
            {
                rate: np.array(
                    [count(row, f"{rate}_{what}", path, n) for n, row in enumerate(rows, 2)], int
                )
                for rate in rates
            }
            for what in ("tokens", "errors")
        )
        return cls([(row[KEYS[0]], row[KEYS[1]], row[KEYS[2]]) for row in rows], tokens, errors)

    def is_of_same_data(self, other: Utterances) -> bool:
        """Return whether utterances, speakers, clients and numbers of tokens are the same."""
        return list(self.keys) == list(other.keys) and all(
            np.array_equal(tokens, other.tokens.get(rate)) for rate, tokens in self.tokens.items()
        )

    def by_speaker(self, rate: str) -> tuple[list[Speaker], np.ndarray, np.ndarray]:
        """Sum over speakers: client and speaker, tokens and errors of each, (speakers,)."""
        keys = [key[:2] for key in self.keys]
        return self._sums(rate, keys, list(dict.fromkeys(keys)))

    def by_person(self, rate: str) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Sum over speakers, each with the utterances of all clients, in C order."""
        keys = [speaker for _, speaker, _ in self.keys]
        return self._sums(rate, keys, sorted(set(keys)))

    def _sums(
        self, rate: str, keys: Sequence[Key], order: list[Key]
    ) -> tuple[list[Key], np.ndarray, np.ndarray]:
        """Sum tokens and errors over the utterances of each key, in the given order."""
        places = {key: place for place, key in enumerate(order)}
        of = [places[key] for key in keys]
        # Sums of whole numbers in floating point are exact.
        return order, np.bincount(of, self.tokens[rate]), np.bincount(of, self.errors[rate])

    def sizes(self, rate: str) -> dict[str, tuple[int, int, int]]:
        """Return client -> speakers, utterances and tokens; `average` is of all."""
        found = {}
        for client, chosen in self._clients().items():
            speakers = {self.keys[index][1] for index in chosen}
            found[client] = len(speakers), len(chosen), int(self.tokens[rate][chosen].sum())
        found[AVERAGE] = found.pop(ALL)
        return found

    def rates(self, path: Path) -> dict[str, dict[str, float]]:
        """Return rate -> client -> its error rate in %, then `average`, the clients' mean.

        Args:
            path: the source of the counts, for messages.

        Raises:
            UserError: if a client has no token.
        """
        groups = self._clients()
        if len(groups) > 1:
            del groups[ALL]
        found = {}
        for rate, tokens in self.tokens.items():
            of_tokens = {client: tokens[chosen, None] for client, chosen in groups.items()}
            if empty := [client for client, one in of_tokens.items() if not one.sum()]:
                raise UserError(
                    f"client {empty[0]!r} has no token, so no {rate.upper()}", path=path
                )
            of_errors = {name: self.errors[rate][chosen, None] for name, chosen in groups.items()}
            values = error_rates(of_errors, of_tokens)
            del values[ALL]
            found[rate] = {client: float(value[0]) for client, value in values.items()}
        return found

    def _clients(self) -> dict[str, list[int]]:
        """Return client -> the indices of its utterances, and last those of all."""
        found: dict[str, list[int]] = {}
        for index, (client, _, _) in enumerate(self.keys):
            found.setdefault(client, []).append(index)
        return {**found, ALL: list(range(len(self.keys)))}
