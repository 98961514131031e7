"""How many neighbours a client has, and how many of them recover a secret: k and t from n.

J. H. Bell et al., CCS 2020, section 3.2, with the numbers here computed instead of bounded. Of n
clients at most L are lost during a round, and at most G work with the server; neither choice looks
at the graph, so that a client's k neighbours are a random sample of the n - 1 others. A round fails
with a probability of at most the sum of three:

- *privacy*: t of an honest client's neighbours are among the G, which then hold enough shares of
  its secrets. Of each of n - G honest clients, P(X >= t), X hypergeometric.
- *correctness*: fewer than t of those who hold shares of a client's secrets are left. A client that
  is lost has its k neighbours, P(Y < t); one that is left holds a share of its own, P(Y + 1 < t).
- *connection*: the honest clients that are left fall into parts, of which the server would learn
  the sums. On a ring with k / 2 neighbours to either side they do only if k / 2 successive clients
  are lost or among the G in two places at once.

In a complete graph only the numbers count: any t above G, up to the clients that are left.

What the bound does not cover: a server that chooses who is lost *after* it has seen the graph. It
could cut off the ring's parts. `graph: complete` has no parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import comb, log2
from typing import Final, Literal

from fedtools.core.config import Natural, NonNegative
from fedtools.core.errors import UserError

SPARSE: Final = "sparse"
COMPLETE: Final = "complete"
LEAST_CLIENTS, MOST_CLIENTS = 3, 10_000
# Degrees are multiples of it, which are as easy to remember as to compare.
_STEP = 10


@dataclass(frozen=True)
class Options:
    """What secure sums tolerate.

    Attributes:
        lost: the largest share of a round's clients that are lost before its end.
        colluding: the largest share of them that work with the server.
        failure_bits: b; a round fails with a probability of at most 2^-b.
        graph: "sparse", each client shares masks with as few others as b allows; "complete", with
            all others, which also stands a server that chooses who is lost.
    """

    lost: NonNegative = 0.3
    colluding: NonNegative = 0.2
    failure_bits: Natural = 40
    graph: Literal["sparse", "complete"] = SPARSE

    def __post_init__(self) -> None:
        """Check the options, also of objects created without `from_mapping`.

        Raises:
            ValueError: if one is out of range, or too many may be lost or collude.
        """
        for name in ("lost", "colluding"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value:g}; it must be from 0 to below 1")
        if 2 * self.lost + self.colluding >= 1:
            problem = f"lost is {self.lost:g} and colluding {self.colluding:g}"
            remedy = "twice the one and the other must be below 1 together"
            raise ValueError(f"{problem}; {remedy}, or those who are left could not agree")
        if not 10 <= self.failure_bits <= 128:
            raise ValueError(f"failure_bits is {self.failure_bits}; it must be from 10 to 128")
        if self.graph not in (SPARSE, COMPLETE):
            raise ValueError(f"graph is {self.graph!r}; it must be {SPARSE} or {COMPLETE}")


@dataclass(frozen=True)
class Plan:
    """The numbers of a round, fixed before it.

    Attributes:
        clients: n, those who are asked to take part.
        lost: L, the most that may be lost.
        colluding: G, the most that may work with the server.
        neighbours: k; of a complete graph n - 1.
        threshold: t, the shares that recover a secret.
    """

    clients: int
    lost: int
    colluding: int
    neighbours: int
    threshold: int

    @property
    def least(self) -> int:
        """Return the number of survivors that a client insists on before it unmasks anything."""
        return self.clients - self.lost

    @property
    def quorum(self) -> int:
        """Return the number of signatures under a list of survivors.

        Two lists with that many each would have more than n + G together, although the n - G
        honest clients sign one, and the G others two: n + G at most.
        """
        return (self.clients + self.colluding) // 2 + 1

    @property
    def failure(self) -> Fraction:
        """Return the bound on the probability that a round fails."""
        every = range(self.threshold, self.threshold + 1)
        return _failures(self.clients, self.lost, self.colluding, self.neighbours, every)[0]

    def __str__(self) -> str:
        """Say the numbers in a line."""
        failure = self.failure
        chance = f"2^{log2(failure):.1f}" if failure else "0"
        return (
            f"{self.clients} clients, {self.neighbours} neighbours each, of whom {self.threshold} "
            f"recover a secret; {self.least} survivors at least, {self.quorum} signatures; a round "
            f"fails with a probability of at most {chance}"
        )


def plan(options: Options, clients: int) -> Plan:
    """Choose the smallest k, in steps of ten, and the best t for it.

    Raises:
        UserError: if there are too few or too many clients.
    """
    if not LEAST_CLIENTS <= clients <= MOST_CLIENTS:
        remedy = f"take from {LEAST_CLIENTS} to {MOST_CLIENTS}"
        raise UserError(f"a secure sum of {clients} clients", remedy=remedy)
    # Shares are decimal fractions: 0.3 of 10 is 3, whatever floats say.
    lost = int(Fraction(str(options.lost)) * clients)
    colluding = int(Fraction(str(options.colluding)) * clients)
    if options.colluding and not colluding:
        colluding = 1
    if Plan(clients, lost, colluding, 1, 1).quorum > clients - lost:
        problem = f"of {clients} clients {lost} may be lost and {colluding} collude"
        raise UserError(f"{problem}, so that the rest could not agree", remedy="take more clients")
    complete = options.graph == COMPLETE
    for degree in [] if complete else range(_STEP, clients - 1, _STEP):
        threshold, failure = _best(clients, lost, colluding, degree)
        if failure * 2**options.failure_bits <= 1:
            return Plan(clients, lost, colluding, degree, threshold)
    threshold, failure = _best(clients, lost, colluding, clients - 1)
    if failure:
        remedy = "take more clients, or tolerate less"
        raise UserError(f"no secure sum of {clients} clients, {lost} lost", remedy=remedy)
    return Plan(clients, lost, colluding, clients - 1, threshold)


@lru_cache(maxsize=4096)
def _best(clients: int, lost: int, colluding: int, degree: int) -> tuple[int, Fraction]:
    """Return the threshold that fails least, the middle one of equals, and how often it fails."""
    # One neighbour alone never recovers a secret.
    every = range(2, degree + 1)
    found = _failures(clients, lost, colluding, degree, every)
    least = min(found)
    equals = [t for t, failure in zip(every, found, strict=True) if failure == least]
    return equals[len(equals) // 2], least


def _failures(
    clients: int, lost: int, colluding: int, degree: int, thresholds: range
) -> list[Fraction]:
    """Compute the bound of this page for some thresholds, exactly."""
    others = clients - 1
    left = clients - lost
    corrupt = _ways(others, colluding, degree)
    of_lost = _ways(others, left, degree)
    of_left = _ways(others, left - 1, degree)
    # at[x]: ways to draw fewer than x
    below_corrupt, below_lost, below_left = (
        [0, *accumulate(ways)] for ways in (corrupt, of_lost, of_left)
    )
    every = comb(others, degree)
    apart = _disconnected(clients, lost + colluding, degree)
    found = []
    for t in thresholds:
        privacy = (clients - colluding) * (every - below_corrupt[t])
        correctness = lost * below_lost[t] + left * below_left[t - 1]
        found.append(Fraction(privacy + correctness, every) + apart)
    return found


def _ways(population: int, marked: int, drawn: int) -> list[int]:
    """Count the samples of `drawn` with 0, 1, ..., `drawn` marked ones (hypergeometric)."""
    marked = min(marked, population)
    rest = population - marked
    return [comb(marked, x) * comb(rest, drawn - x) for x in range(drawn + 1)]


def _disconnected(clients: int, bad: int, degree: int) -> Fraction:
    """Bound the probability of two places on the ring where k / 2 successive clients are bad."""
    if degree >= clients - 1 or bad < degree:
        return Fraction(0)
    pairs = comb(clients, 2)
    return Fraction(pairs * comb(clients - degree, bad - degree), comb(clients, bad))
