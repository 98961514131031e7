"""Attackers by what they know of a defence, as in the VoicePrivacy Challenge.

    ignorant         enrols with undefended models of the people it looks for, and has learnt from
                     undefended models of other people
    lazy-informed    enrols with defended models, and has learnt from undefended ones
    semi-informed    enrols with and has learnt from defended models: it knows the defence, but not
                     the random numbers of the client under attack

Attackers learn means, cohort normalisation, PLDA, regressions and classifiers from other people's
models. An attack without enrolment, such as the one on attributes, has no lazy-informed attacker,
and an attack without learning has no semi-informed attacker.

B. Srivastava, N. Vauquier, M. Sahidullah, A. Bellet, M. Tommasi, E. Vincent: Evaluating voice
conversion-based privacy protection against informed attackers, ICASSP 2020. N. Tomashenko et al.:
The VoicePrivacy 2022 Challenge evaluation plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

IGNORANT, LAZY, SEMI = "ignorant", "lazy-informed", "semi-informed"
# Values of the columns for the defence and the attacker where there is no defence.
NO_DEFENCE = "none"
ANY = "-"


class Block(NamedTuple):
    """Pairs that are scored with one cohort; all three are indices of models."""

    rows: np.ndarray
    columns: np.ndarray
    cohort: np.ndarray


class Attacker(NamedTuple):
    """Name of an attacker, and whether the models that it enrols and learns from are defended."""

    name: str
    enrols: bool
    learns: bool


_EVERYBODY = (
    Attacker(IGNORANT, False, False), Attacker(LAZY, True, False), Attacker(SEMI, True, True)
)  # fmt: skip
ATTACKERS = tuple(one.name for one in _EVERYBODY)


def attackers(defended: bool, *, enrols: bool = True, learns: bool = True) -> Sequence[Attacker]:
    """Return the attackers between whom an attack differs; without a defence, there is one.

    Args:
        defended: whether clients applied a defence.
        enrols, learns: whether the attack enrols models, and whether it learns from models.
    """
    if not defended:
        return (Attacker(ANY, True, True),)
    # Without enrolment, what is learnt from alone counts; without learning, what is enrolled.
    return [
        one
        for one in _EVERYBODY
        if (enrols or one.enrols == one.learns) and (learns or not one.learns)
    ]


@dataclass(frozen=True)
class Versions:
    """Models with and without a defence, by number, as attackers compare and learn from them.

    Of n models, the undefended one of model i is i, and the one that was sent n + i; without a
    defence, i is both. A real attacker has enrolled, and has learnt from, models from elsewhere.
    Here they are of the same round, where a mean may contain an update of the model that it is
    compared with, which would make two speakers seem one. Such pairs are not trials, and nothing is
    learnt from them. A mean may still contain updates of people whose other models are enrolled,
    as it would in a real attack.

    Attributes:
        names: names of the models, in order.
        defended: whether there are two versions.
        groups: model -> the models whose mean was sent in its place, including itself; a model
            without an entry was sent alone.
    """

    names: Sequence[str]
    defended: bool
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def number(self, defended: bool) -> np.ndarray:
        """Return the numbers of all models in one version."""
        count = len(self.names)
        return np.arange(count) + count * (self.defended and defended)

    @cached_property
    def shared(self) -> np.ndarray:
        """Return which versions of two models share an update, (versions, versions)."""
        sent = [self.groups.get(name, [name]) for name in self.names]
        every = [*([[name] for name in self.names] if self.defended else []), *sent]
        names = dict.fromkeys(name for members in every for name in members)
        place = {name: index for index, name in enumerate(names)}
        within = np.zeros((len(every), len(place)))
        for row, members in zip(within, every, strict=True):
            row[[place[one] for one in members]] = 1
        found: np.ndarray = within @ within.T > 0
        # A model is never compared with itself.
        own = np.tile(np.eye(len(self.names), dtype=bool), (1 + self.defended,) * 2)
        return found & ~own

    def blocks(self, some: Sequence[Block], attacker: Attacker) -> list[Block]:
        """Return pairs and cohorts as an attacker has them.

        If enrolled models are undefended and tested ones defended, each pair of two models occurs
        in both directions.

        Args:
            some: blocks of models 0 to n - 1.
            attacker: its rows are enrolled, its columns what clients sent.
        """
        enrolled, sent, learnt = map(self.number, (attacker.enrols, True, attacker.learns))
        found = []
        for rows, columns, cohort in some:
            sides = [(rows, columns)]
            if enrolled[0] != sent[0] and not np.array_equal(rows, columns):
                sides.append((columns, rows))
            found += [Block(enrolled[one], sent[other], learnt[cohort]) for one, other in sides]
        return found

    def seen(self, scores: np.ndarray, attacker: Attacker) -> np.ndarray:
        """Return scores of models that an attacker enrols (rows) with those sent (columns).

        Args:
            scores: of all pairs of versions, or of all enrolled and sent models.

        Returns:
            (models, models), NaN for pairs that share an update.
        """
        pairs = np.ix_(self.number(attacker.enrols), self.number(True))
        if len(scores) > len(self.names):
            scores = scores[pairs]
        return np.where(self.shared[pairs], np.nan, scores)
