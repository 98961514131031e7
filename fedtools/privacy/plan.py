"""How much noise a release needs, and the release itself.

Counts are whole multiples of a grid, the power of two in (cap / 2^21, cap / 2^20], so that sums of
counts and noise are exact in float64 in any order. The bound in force is `Plan.steps` grid steps:
`cap` rounded down to the grid, at most a millionth less.

What one unit changes, in L1 and in multiples of the cap, if it is left out:

    unit        release     in one release   in all R releases together
    word        increments        1                  1
    word        cumulative        1                  R
    utterance   increments        1                  1       (even groups: 3 and 2R)
    utterance   cumulative        1                  R       (even groups: 2 and 2R)
    user        increments        1                  1
    user        cumulative        1                  R

The scale of the noise is the last column times the cap over epsilon: all releases together are one
vector, to which Laplace noise of that scale gives (epsilon, 0)-DP. For words and utterances, whose
increments enter one release only, this is parallel composition over rounds; for cumulative counts
it is sequential composition, epsilon / R for each.

That an utterance enters one release alone, and moves no other, needs the round of an utterance to
depend on nothing but itself, as on its time of day. Section 3.2 of the paper cuts a client's
utterances into groups of equal numbers instead ("even groups"): with one more of them, a neighbour
moves over every border between groups, and increments lose what they gained over cumulative counts.
A user who is left out takes all of that away, so for units "user" it makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import floor, frexp, ldexp, sqrt

import numpy as np

from fedtools.files.errors import UserError
from fedtools.privacy.bounds import Utterances, bound_user, bound_utterances, bound_words, steps
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.noise import discrete_laplace
from fedtools.privacy.options import CLIENT, CUMULATIVE, LAPLACE, USER, UTTERANCE, WORD, Privacy

_FINE = 20  # a cap is 2^20 to 2^21 steps
# In steps: then sums of thousands of noisy vectors are exact in float64.
_LARGEST_SCALE = 1 << 36


@dataclass(frozen=True)
class Plan:
    """What the options mean for an experiment.

    Attributes:
        options: those of the user.
        releases: how many there will be; it must not grow, nor depend on the data.
        even_groups: whether a client's utterances are cut into groups of equal numbers, so that one
            more moves others from round to round; false if each one's round is its own.
        grid: the length of a step, in weighted words.
        steps: what the cap is in steps.

    Raises:
        UserError: naming epsilon, if it is so small that noise would not be exact.
    """

    options: Privacy
    releases: int
    even_groups: bool
    grid: float = field(init=False)
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        """Fix the grid."""
        if self.releases < 1:
            raise ValueError(f"{self.releases} releases")
        exponent = frexp(self.options.cap)[1] - 1 - _FINE
        object.__setattr__(self, "grid", ldexp(1.0, exponent))
        object.__setattr__(self, "steps", floor(Fraction(self.options.cap) / Fraction(self.grid)))
        if self.options.mechanism == LAPLACE and self.scale_steps > _LARGEST_SCALE:
            least = self.joint * self.steps / _LARGEST_SCALE
            problem = f"epsilon is {self.options.epsilon:g}, too small for {self.releases} releases"
            raise UserError(problem, remedy=f"take at least {least:.2g}, or fewer releases")

    @property
    def joint(self) -> int:
        """What a unit changes in all releases together, in caps; the table above."""
        if self.options.unit == UTTERANCE:
            return self.moved(together=True)
        return self.releases if self.options.release == CUMULATIVE else 1

    @property
    def single(self) -> int:
        """What a unit changes in one release, in caps."""
        return self.moved(together=False) if self.options.unit == UTTERANCE else 1

    def moved(self, together: bool) -> int:
        """How often one utterance more enters or leaves a release, or moves another one so.

        Args:
            together: in all releases, else in the one where this is most.
        """
        cumulative = self.options.release == CUMULATIVE
        if self.even_groups:
            # One enters, and a neighbour leaves at each border of the group, or of all until now.
            return 2 * self.releases if together else 2 if cumulative else min(3, 2 * self.releases)
        return self.releases if cumulative and together else 1

    @property
    def scale_steps(self) -> Fraction:
        """The scale of the noise, in steps."""
        return Fraction(self.joint * self.steps) / Fraction(self.options.epsilon)

    @property
    def scale(self) -> float:
        """The scale of the noise, in weighted words; its standard deviation is sqrt(2) times it."""
        return float(self.scale_steps * Fraction(self.grid))

    def deviation(self, releases: int, senders: int) -> float:
        """The standard deviation of the noise on a word's count, of all that was released; public.

        Args:
            releases: how many there were; of increments, they are added up.
            senders: how many clients there are; with `trust: client`, each has added noise.
        """
        if self.options.mechanism != LAPLACE:
            return 0.0
        summed = min(releases, 1) if self.options.release == CUMULATIVE else releases
        each = senders if self.options.trust == CLIENT else 1
        return self.scale * sqrt(2 * summed * each)

    def bound(self, new: Utterances, spent: int = 0) -> tuple[np.ndarray, int]:
        """A client's counts of what is new in a round, bounded; a client adds up cumulative ones.

        Args:
            new: its new utterances.
            spent: what the last call for this client returned; 0 at first. Of unit "user".

        Returns:
            (size,), float64, whole multiples of the grid, to be sent in float64: what is added up
            and released. And what this client has spent of its bound. Without the mechanism
            "laplace", counts as they are, and 0.
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
        """Noisy counts: of a client with `trust: client`, of all clients' sum with `trust: server`.

        The same arguments give the same noise. Any other ones, the counts and the options included,
        give noise that has nothing to do with it.

        Args:
            counts: (size,), float64: what `bound` gave, or sums of it.
            key: the secret; see `key`.
            experiment: what tells the experiment from others: a hash of its configuration, its data
                and its nonce.
            number: of the release.
            sender: the client, or "" for the server.
            draw: 1; one more for each time that a release was taken back and made again.

        Returns:
            (size,), float64, whole multiples of the grid, of either sign. Without the mechanism
            "laplace", the counts.

        Raises:
            ValueError: if counts are not what `bound` gives.
        """
        if self.options.mechanism != LAPLACE:
            return counts
        whole = counts / self.grid
        if counts.dtype != np.float64 or not (np.abs(whole) < 2**53).all():
            raise ValueError("counts are not float64, or too large")
        if (whole < 0).any() or (whole != np.rint(whole)).any():
            raise ValueError("counts that were not bounded: negative, or not on the grid")
        exact = whole.astype(np.int64)
        scale = self.scale_steps
        stream = key.stream(
            *("release", experiment, number, sender, draw, repr(self.grid), str(scale)), exact
        )
        noisy: np.ndarray = exact + discrete_laplace(stream, scale, len(exact))
        return noisy * self.grid
