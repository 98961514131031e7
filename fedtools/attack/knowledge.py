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

import numpy as np

from fedtools.attack.cohort import Block

IGNORANT, LAZY, SEMI = "ignorant", "lazy-informed", "semi-informed"
ATTACKERS = (IGNORANT, LAZY, SEMI)
# Values of the columns for the defence and the attacker where there is no defence.
NO_DEFENCE = "none"
ANY = "-"


def enrols_defended(attacker: str) -> bool:
    """Return whether the models that an attacker enrols are defended."""
    return attacker != IGNORANT


def learns_defended(attacker: str) -> bool:
    """Return whether the models that an attacker learns from are defended."""
    return attacker not in (IGNORANT, LAZY)


def in_versions(some: Sequence[Block], count: int, attacker: str) -> list[Block]:
    """Return pairs and cohorts as an attacker has them, with each model in two versions.

    If enrolled models are undefended and tested ones defended, each pair of two models occurs in
    both directions.

    Args:
        some: blocks of models 0 to count - 1.
        count: number of models; model i is undefended at i, and defended at count + i.
        attacker: one of `ATTACKERS`; its rows are enrolled, its columns what clients sent.
    """
    enrolled, learnt = (count * knows(attacker) for knows in (enrols_defended, learns_defended))
    found = []
    for rows, columns, cohort in some:
        sides = [(rows, columns)]
        if not enrolled and not np.array_equal(rows, columns):
            sides.append((columns, rows))
        found += [Block(one + enrolled, other + count, cohort + learnt) for one, other in sides]
    return found


def seen_by(attacker: str, scores: np.ndarray) -> np.ndarray:
    """Return scores of the models that an attacker enrols (rows) with those sent (columns).

    Args:
        scores: scores of all pairs of models in two versions, numbered as in `in_versions`.
    """
    count = len(scores) // 2
    begin = count * enrols_defended(attacker)
    return scores[begin : begin + count, count:]


def share_updates(
    attacker: str, names: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> np.ndarray:
    """Return which pairs of averaged models share an update: (enrolled, tested), bool.

    A real attacker enrols models from elsewhere, which do not contain the update under test. Here
    it enrols models of the same round, and an update averaged into the tested model, or into both
    sides, would make two speakers seem one. Such pairs are not trials. A mean may still contain
    updates of people whose other models are enrolled, as it would in a real attack.

    Args:
        names: names of the models.
        groups: model -> the models whose mean was sent in its place, including itself; a model
            without an entry was sent alone.
    """
    every = dict.fromkeys([*names, *(one for members in groups.values() for one in members)])
    place = {name: index for index, name in enumerate(every)}
    alone = np.eye(len(names), len(every))
    sent = alone.copy()
    for row, name in zip(sent, names, strict=True):
        row[[place[one] for one in groups.get(name, [name])]] = 1
    shared: np.ndarray = (sent if enrols_defended(attacker) else alone) @ sent.T > 0
    # A model is never tried with itself.
    np.fill_diagonal(shared, False)
    return shared
