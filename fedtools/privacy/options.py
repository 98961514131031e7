"""The options of differential privacy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from fedtools.core.config import AboveZero

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
# Limits of epsilon and cap, within which noise and grid are representable as floats.
_LEAST, _MOST = 1e-6, 1e9


@dataclass(frozen=True)
class Privacy:
    """What is protected, how strongly, and from whom.

    Attributes:
        mechanism: "laplace", the mechanism of this package; "paper", equations 8 and 9 as
            published, which protect less than claimed (`marginals.PAPER_WARNING`); "none".
        epsilon: privacy loss of one unit over all releases of the experiment together, above 0;
            smaller values protect more. For "paper", the epsilon of equation 9.
        unit: the unit of protection. Two data sets are adjacent (Definition 4.1) if they differ by
            one unit that only one of them has: a "word" is one word in the N-best list of one
            utterance; an "utterance"; a "user" is a client with its whole history. A client may be
            less than a person: where a client is a speaker in one meeting, a person in four
            meetings has four times the epsilon. Changing a unit instead of removing it costs twice
            the epsilon.
        cap: the largest L1 norm of a unit's contribution to the counts, in weighted words: of a
            word in an utterance, of an utterance, or of a user's whole history.
        release: "increments", the new counts of a round, or "cumulative", all counts so far, which
            cost epsilon again in every round.
        trust: the party that sees counts without noise. "server": clients send exact counts and the
            server adds noise to their sum; its release (the next global state) is protected, but
            its own files and the client messages are not. "client": only the client; each client
            adds noise to what it sends, so that messages are protected from the server and all
            others, and the noise of the sum over n clients has n times the variance.
    """

    mechanism: Literal["none", "laplace", "paper"] = NONE
    epsilon: AboveZero = 1.0
    unit: Literal["word", "utterance", "user"] = UTTERANCE
    cap: AboveZero = 20.0
    release: Literal["increments", "cumulative"] = field(
        default=INCREMENTS, metadata={"set_by": "method_conf.sends"}
    )
    trust: Literal["server", "client"] = SERVER

    def __post_init__(self) -> None:
        """Check epsilon and cap, also for objects created without `from_mapping`.

        Raises:
            ValueError: if epsilon or cap is out of range.
        """
        for name in ("epsilon", "cap"):
            value = getattr(self, name)
            if not _LEAST <= value <= _MOST:
                raise ValueError(f"{name} is {value:g}; it must be from {_LEAST:g} to {_MOST:g}")
