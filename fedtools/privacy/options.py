"""The options of differential privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fedtools.files.config import AboveZero

WORD: Final = "word"
UTTERANCE: Final = "utterance"
USER: Final = "user"
INCREMENTS: Final = "increments"
CUMULATIVE: Final = "cumulative"
SERVER: Final = "server"
CLIENT: Final = "client"
NONE: Final = "none"
LAPLACE: Final = "laplace"
PAPER: Final = "paper"
# Of epsilon and cap: beyond, noise or grid would be no floats.
_LEAST, _MOST = 1e-6, 1e9


@dataclass(frozen=True)
class Privacy:
    """What is protected, how strongly, and from whom.

    Attributes:
        mechanism: "laplace", the mechanism of this package; "paper", equations 8 and 9 as they are
            written, which protect less than the paper says (`marginals.PAPER_WARNING`); "none".
        epsilon: what one unit costs over all releases of the experiment together, above 0; the
            smaller, the more is protected. Of "paper", the epsilon of equation 9.
        unit: what epsilon is promised for. Two data sets are adjacent (Definition 4.1) if one of
            them lacks just one unit of the other: a "word" is all that one utterance's N-best list
            says of one word; an "utterance"; a "user" is a client with its whole history. A client
            may be less than a person: where it is a speaker in one meeting, whoever is in four
            meetings has four times the epsilon. To change a unit, not to remove it, costs twice as
            much.
        cap: the largest L1 norm of what a unit adds to counts, in weighted words: of a word in an
            utterance, of an utterance, or of a user's whole history.
        release: "increments", the counts of what is new in a round, or "cumulative" ones, which pay
            again in every round for all that came before.
        trust: who sees counts without noise. "server": clients send them, the server adds noise to
            their sum, and what it makes of that (the next global state) is protected, while its
            own files and the messages to it are not. "client": nobody; each client adds noise to
            what it sends, so that a message is protected from the server and everybody else, and
            the sum over n clients has n times the variance.
    """

    mechanism: Literal["none", "laplace", "paper"] = NONE
    epsilon: AboveZero = 1.0
    unit: Literal["word", "utterance", "user"] = UTTERANCE
    cap: AboveZero = 20.0
    release: Literal["increments", "cumulative"] = INCREMENTS
    trust: Literal["server", "client"] = SERVER

    def __post_init__(self) -> None:
        """Check the numbers, for those who make it without `from_mapping`.

        Raises:
            ValueError: if epsilon or cap is not above 0, or beyond any use.
        """
        for name in ("epsilon", "cap"):
            value = getattr(self, name)
            if not _LEAST <= value <= _MOST:
                raise ValueError(f"{name} is {value:g}; it must be from {_LEAST:g} to {_MOST:g}")
