"""The options of differential privacy: of word counts, and of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from fedtools.core.config import AboveZero, Natural, NonNegative

WORD: Final = "word"
UTTERANCE: Final = "utterance"
USER: Final = "user"
INCREMENTS: Final = "increments"
CUMULATIVE: Final = "cumulative"
SERVER: Final = "server"
CLIENT: Final = "client"
CLIENTS: Final = "clients"
NONE: Final = "none"
LAPLACE: Final = "laplace"
PAPER: Final = "paper"
# Limits of epsilon and cap, within which noise and grid are representable as floats.
_LEAST, _MOST = 1e-6, 1e9
# Of models. More noise than a million times C is useless, and a larger epsilon meaningless.
MOST_EPSILON, _MOST_NOISE = 1000.0, 10**6
# The private state of the server has as many vectors as there are bands.
_MOST_COHORTS = 256


@dataclass(frozen=True)
class Privacy:
    """Of word counts: what is protected, how strongly, and from whom.

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


@dataclass(frozen=True)
class UserPrivacy:
    """Of models: the privacy of a client with all of its data, in all rounds together.

    Two federations are adjacent if one client's data are empty in one of them; the list of clients
    is the same, and public. See `fedtools/privacy/README.md`.

    Attributes:
        clip: C, the largest norm of a client's change of all tensors that it sends. It must be
            chosen without looking at the clients' data, or on those of other people.
        epsilon: privacy loss of a client over all rounds of the experiment, from which the noise
            follows; or null, and `noise` is given.
        delta: probability with which the loss may exceed epsilon.
        noise: standard deviation of the noise on the sum of a round's changes, in multiples of C;
            0 adds none, and protects nobody.
        cohorts: m, the number of groups of clients that take turns, each by a hash of its name; 0:
            all clients take part in all rounds, or a secret sample of them, which is what
            `clients_per_round` with `sampling: poisson` draws.
        bands: b, rounds over which the noise of cohorts is correlated, see
            `fedtools.privacy.banded`: from 1, for independent noise, to m, which is the default.
        trust: who adds the noise. "server", to the sum of what it sees; "clients", each its share
            to its own change, before a secure sum: then epsilon also holds against the server, with
            as many clients lost and colluding as `sums_conf` says. It is that of zCDP, some per
            cent more than the closed form, and the noise is sized for the fewest honest clients
            that can be in a sum.
        simulated_users: factor by which the noise on the mean is divided, as if there were that
            many times as many clients. Above 1 the protection is not that of `epsilon`, but what
            the ledger says.
    """

    clip: AboveZero = 0.1
    epsilon: AboveZero | None = None
    delta: AboveZero = 1e-5
    noise: NonNegative | None = None
    cohorts: Natural = 0
    bands: Natural | None = None
    trust: Literal["server", "clients"] = SERVER
    simulated_users: AboveZero = 1.0

    def __post_init__(self) -> None:
        """Check the options, also of objects created without `from_mapping`.

        Raises:
            ValueError: if an option is out of range, or both epsilon and noise are given.
        """
        if self.epsilon is not None and self.noise is not None:
            raise ValueError("noise follows from epsilon: give one of them")
        if self.epsilon is not None and not _LEAST <= self.epsilon <= MOST_EPSILON:
            problem = f"epsilon is {self.epsilon:g}; it must be from {_LEAST:g} to {MOST_EPSILON:g}"
            raise ValueError(problem)
        if not 1e-15 <= self.delta < 1:
            raise ValueError(f"delta is {self.delta:g}; it must be from 1e-15 to below 1")
        if self.noise and not _LEAST <= self.noise <= _MOST_NOISE:
            problem = f"noise is {self.noise:g}; it must be 0, or from {_LEAST:g} to {_MOST_NOISE}"
            raise ValueError(problem)
        if not _LEAST <= self.clip <= _MOST:
            raise ValueError(f"clip is {self.clip:g}; it must be from {_LEAST:g} to {_MOST:g}")
        if self.cohorts == 1 or self.cohorts > _MOST_COHORTS:
            problem = f"cohorts is {self.cohorts}; it must be 0, or from 2 to {_MOST_COHORTS}"
            raise ValueError(problem)
        if self.bands is not None and not 1 <= self.bands <= self.cohorts:
            problem = f"bands is {self.bands}; it must be from 1 to the number of cohorts"
            raise ValueError(f"{problem}, {self.cohorts}")
        if self.trust == CLIENTS and self.cohorts:
            problem = "draw no noise that is correlated over rounds: leave cohorts out"
            raise ValueError(f"trust: clients {problem}")
        if not 1 <= self.simulated_users <= _MOST_NOISE:
            problem = f"simulated_users is {self.simulated_users:g}"
            raise ValueError(f"{problem}; it must be from 1 to {_MOST_NOISE}")
