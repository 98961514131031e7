"""What an attacker knows of a defence, as the VoicePrivacy Challenge distinguishes attackers.

    ignorant         enrols with undefended models of the people it looks for, and has learnt from
                     undefended models of other people
    lazy-informed    enrols with defended models, and has learnt from undefended ones
    semi-informed    enrols with and has learnt from defended models: it knows the defence, but not
                     the random numbers of the client under attack

What is learnt is all that other people's models are good for: means, norms by a cohort, PLDA,
regressions, classifiers. An attack that enrols nobody, such as that on attributes, has no
lazy-informed attacker, and one that learns nothing no semi-informed one beside it.

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
# The column of a table where there is no defence to be known of.
NO_DEFENCE = "none"
ANY = "-"


def enrols_defended(attacker: str) -> bool:
    """Whether the models that an attacker enrols are defended; of none the defence is none."""
    return attacker != IGNORANT


def learns_defended(attacker: str) -> bool:
    """Whether the models that an attacker learns from are defended."""
    return attacker not in (IGNORANT, LAZY)


def in_versions(some: Sequence[Block], count: int, attacker: str) -> list[Block]:
    """The same pairs and cohorts where each model is there twice, as an attacker has them.

    Where what is enrolled is another version than what was sent, a pair of two models is there both
    ways round.

    Args:
        some: of models 0 to count - 1.
        count: of models; model i is undefended at i, and defended at count + i.
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
    """Scores of what an attacker enrols (rows) with what clients sent (columns).

    Args:
        scores: of all pairs of models in versions, as `in_versions` numbers them.
    """
    count = len(scores) // 2
    begin = count * enrols_defended(attacker)
    return scores[begin : begin + count, count:]


def share_updates(
    attacker: str, names: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> np.ndarray:
    """Which pairs have one update on both sides: (enrolled, tested), of models that are averaged.

    An attacker enrols with what it has from elsewhere, from which the update in question is not to
    be had. Here it enrols with models of the same round, and one that was averaged into what is
    tested, or into both sides, would make two speakers seem one. Such pairs are no trials; that the
    mean is also of people whose other models are enrolled is as it would be.

    Args:
        names: of the models.
        groups: model -> the models whose mean was sent in its place, itself among them; a model
            that is not there was sent alone.
    """
    every = dict.fromkeys([*names, *(one for members in groups.values() for one in members)])
    place = {name: index for index, name in enumerate(every)}
    alone = np.eye(len(names), len(every))
    sent = alone.copy()
    for row, name in zip(sent, names, strict=True):
        row[[place[one] for one in groups.get(name, [name])]] = 1
    shared: np.ndarray = (sent if enrols_defended(attacker) else alone) @ sent.T > 0
    # A model with itself is in no trial.
    np.fill_diagonal(shared, False)
    return shared
