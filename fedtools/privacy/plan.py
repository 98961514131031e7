"""Noise scale of the releases, and the release itself.

Counts are whole multiples of a grid, the power of two in (cap / 2^21, cap / 2^20], so that sums of
counts and noise are exact in float64 in any order. The effective bound is `Plan.steps` grid steps:
`cap` rounded down to the grid, at most a millionth less.

Sensitivity in L1, in multiples of the cap, to the removal of one unit:

    unit        release     in one release   in all R releases together
    word        increments        1                  1
    word        cumulative        1                  R
    utterance   increments        1                  1       (even groups: 3 and 2R)
    utterance   cumulative        1                  R       (even groups: 2 and 2R)
    user        increments        1                  1
    user        cumulative        1                  R

The scale of the noise is the last column times cap / epsilon: all releases together are one vector,
to which Laplace noise of that scale gives (epsilon, 0)-DP. For words and utterances, whose
increments enter one release only, this is parallel composition over rounds; for cumulative counts
it is sequential composition, with epsilon / R per release.

For an utterance to enter only one release and move no other utterance, its round must depend on the
utterance alone, such as on its time of day. Section 3.2 of the paper instead cuts a client's
utterances into groups of equal size ("even groups"): one more utterance moves a neighbour over
every border between groups, and increments lose their advantage over cumulative counts. Removing a
user removes all of its groups, so for the unit "user" even groups make no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import floor, frexp, ldexp, sqrt

import numpy as np

from fedtools.core.errors import UserError
from fedtools.privacy.bounds import Utterances, bound_user, bound_utterances, bound_words, steps
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.noise import discrete_laplace
from fedtools.privacy.options import CLIENT, CUMULATIVE, LAPLACE, USER, UTTERANCE, WORD, Privacy

_FINE = 20  # a cap is 2^20 to 2^21 steps
# In steps, so that sums of thousands of noisy vectors are exact in float64.
_LARGEST_SCALE = 1 << 36


@dataclass(frozen=True)
class Plan:
    """Noise parameters of an experiment, derived from the user's options.

    Attributes:
        options: the user's options.
        releases: the number of releases, fixed in advance and independent of the data.
        even_groups: whether a client's utterances are cut into groups of equal size, so that one
            more moves others between rounds; False if an utterance alone determines its round.
        grid: the length of a step, in weighted words.
        steps: the cap in steps.

    Raises:
        UserError: if epsilon is so small that noise would not be exact.
    """

    options: Privacy
    releases: int
    even_groups: bool
    grid: float = field(init=False)
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute grid and steps, and check epsilon."""
        if self.releases < 1:
            raise ValueError(f"{self.releases} releases")
        exponent = frexp(self.options.cap)[1] - 1 - _FINE
        object.__setattr__(self, "grid", ldexp(1.0, exponent))
        object.__setattr__(self, "steps", floor(Fraction(self.options.cap) / Fraction(self.grid)))
        if self.options.mechanism == LAPLACE and self.scale_steps > _LARGEST_SCALE:
            least = self.joint * self.steps / _LARGEST_SCALE
            problem = f"epsilon is {self.options.epsilon:g}, too small for {self.releases} releases"
            raise UserError(problem, remedy=f"use at least {least:.2g}, or fewer releases")

    @property
    def joint(self) -> int:
        """Return the sensitivity of all releases together to one unit, in caps; see the table."""
        if self.options.unit == UTTERANCE:
            return self.moved(together=True)
        return self.releases if self.options.release == CUMULATIVE else 1

    @property
    def single(self) -> int:
        """Return the sensitivity of one release to one unit, in caps."""
        return self.moved(together=False) if self.options.unit == UTTERANCE else 1

    def moved(self, together: bool) -> int:
        """Count how often one more utterance, or one it displaces, enters or leaves a release.

        Args:
            together: count over all releases, else in the release with the most changes.
        """
        cumulative = self.options.release == CUMULATIVE
        if self.even_groups:
            # One enters, and neighbours move over both borders of a group, or over the last border
            # of cumulative groups.
            return 2 * self.releases if together else 2 if cumulative else min(3, 2 * self.releases)
        return self.releases if cumulative and together else 1

    @property
    def scale_steps(self) -> Fraction:
        """Return the scale of the noise, in steps."""
        return Fraction(self.joint * self.steps) / Fraction(self.options.epsilon)

    @property
    def scale(self) -> float:
        """Return the scale of the noise in weighted words: its standard deviation / sqrt(2)."""
        return float(self.scale_steps * Fraction(self.grid))

    def deviation(self, releases: int, senders: int) -> float:
        """Return the standard deviation of the noise on the server's count of a word; public.

        Args:
            releases: the number of releases so far; increments are added up.
            senders: the number of clients; with `trust: client`, each has added noise.
        """
        if self.options.mechanism != LAPLACE:
            return 0.0
        summed = min(releases, 1) if self.options.release == CUMULATIVE else releases
        each = senders if self.options.trust == CLIENT else 1
        return self.scale * sqrt(2 * summed * each)

    def bound(self, new: Utterances, spent: int = 0) -> tuple[np.ndarray, int]:
        """Bound a client's counts of the new utterances in a round.

        With cumulative counts the client adds up the results.

        Args:
            new: the client's new utterances.
            spent: the second result of this client's last call, at first 0; used for unit "user".

        Returns:
            The bounded counts, (size,), whole multiples of the grid in float64, and what the client
            has spent of its bound so far. Without the mechanism "laplace", unbounded counts and 0.
        """
        if self.options.mechanism != LAPLACE:
            return new.total(), 0
        counts, unit = steps(new.weight, self.grid), self.options.unit
        if unit == WORD:
            counts = bound_words(counts, self.steps)
        elif unit == UTTERANCE:
            counts = bound_utterances(counts, new.utterance, self.steps)
        total = np.zeros(new.size, np.int64)
        np.add.at(total, new.word, counts)
        if unit == USER:
            total, spent = bound_user(total, spent, self.steps)
        return total * self.grid, spent

    def release(
        self,
        counts: np.ndarray,
        key: NoiseKey,
        *,
        experiment: str,
        number: int,
        sender: str,
        draw: int = 1,
    ) -> np.ndarray:
        """Add noise to a client's counts (`trust: client`) or their sum (`trust: server`).

        Equal arguments give equal noise. Different arguments, including counts and options, give
        independent noise.

        Args:
            counts: (size,), float64: results of `bound`, or sums of them.
            key: the secret key; see `key`.
            experiment: the identity of the experiment: a hash of configuration, data and nonce.
            number: the number of the release.
            sender: the client, or "" for the server.
            draw: 1, plus one for each time that the release was reset and drawn again.

        Returns:
            (size,), float64, whole multiples of the grid, of either sign. Without the mechanism
            "laplace", the counts.

        Raises:
            ValueError: if counts cannot be results of `bound`.
        """
        if self.options.mechanism != LAPLACE:
            return counts
        whole = counts / self.grid
        if counts.dtype != np.float64 or not (np.abs(whole) < 2**53).all():
            raise ValueError("counts are not float64, or too large")
        if (whole < 0).any() or (whole != np.rint(whole)).any():
            raise ValueError("counts were not bounded: they are negative or not on the grid")
        exact = whole.astype(np.int64)
        scale = self.scale_steps
        stream = key.stream(
            *("release", experiment, number, sender, draw, repr(self.grid), str(scale)), exact
        )
        noisy: np.ndarray = exact + discrete_laplace(stream, scale, len(exact))
        return noisy * self.grid
