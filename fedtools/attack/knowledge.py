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

from collections.abc import Sequence

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

    Args:
        some: of models 0 to count - 1.
        count: of models; model i is undefended at i, and defended at count + i.
        attacker: one of `ATTACKERS`; its rows are enrolled, its columns what clients sent.
    """
    enrolled, learnt = (count * knows(attacker) for knows in (enrols_defended, learns_defended))
    return [
        Block(rows + enrolled, columns + count, cohort + learnt) for rows, columns, cohort in some
    ]
