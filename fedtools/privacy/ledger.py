"""The ledger of differential privacy: what was released, and what it costs whom.

    dp.tsv    release  released  mechanism  unit  trust  cap  sensitivity  scale  composition
              epsilon_word  epsilon_utterance  epsilon_user  delta

A row for each release, and one for all of them, `total`. Each epsilon is a bound for leaving out
one word of one utterance, one utterance, or one user, from the data of the experiment. It is of
what those see who are not trusted: with `trust: server`, of what the server makes of the sum; with
`trust: client`, of the messages too.

Bounds of other levels than the unit's follow from what one of them holds:

- With unit "utterance" or "user" a vector beyond its bound is scaled as a whole, so one word less,
  or one utterance less, lets the rest grow: the bound of what lies within a unit is twice the
  unit's own.
- With unit "word" an utterance costs as many words as it has, and a user with unit "word" or
  "utterance" as many of them as there are. These numbers are the data's, so the ledger itself is
  for who runs the experiment, not for publication, unless the unit is "user".

Experiments on the same data add up: ten values of epsilon tried on them cost their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtools.files.tables import write_tsv
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.options import CLIENT, CUMULATIVE, LAPLACE, PAPER, SERVER, USER, UTTERANCE
from fedtools.privacy.plan import Plan

COLUMNS = (
    *("release", "released", "mechanism", "unit", "trust", "cap", "sensitivity", "scale"),
    *("composition", "epsilon_word", "epsilon_utterance", "epsilon_user", "delta"),
)
FILE = "dp.tsv"
TOTAL = "total"


@dataclass(frozen=True)
class Numbers:
    """How much of everything there is, before any bound.

    Attributes:
        utterances: (releases, users): new utterances, whose counts a release is the first to have.
        words: (releases, users): their words, each once for an utterance.
        mass: (releases, users): their weighted counts.
        widest: most words of one utterance.
        heaviest_word: largest weighted count of a word in one utterance.
        heaviest_utterance: largest weighted count of all words of an utterance.
    """

    utterances: np.ndarray
    words: np.ndarray
    mass: np.ndarray
    widest: int
    heaviest_word: float
    heaviest_utterance: float

    @classmethod
    def of(cls, rounds: Sequence[Sequence[Utterances]]) -> Numbers:
        """From the new utterances of every user in every round, in the same order of users."""
        everything = [one for users in rounds for one in users]
        widths = [np.bincount(one.utterance).max(initial=0) for one in everything]
        sums = [np.bincount(one.utterance, one.weight).max(initial=0) for one in everything]
        return cls(
            np.array([[one.number for one in users] for users in rounds]),
            np.array([[len(one.word) for one in users] for users in rounds]),
            np.array([[float(one.weight.sum()) for one in users] for users in rounds]),
            int(max(widths, default=0)),
            float(max((one.weight.max(initial=0) for one in everything), default=0)),
            float(max(sums, default=0)),
        )


def ledger_rows(plan: Plan, numbers: Numbers) -> list[dict[str, str]]:
    """The rows of the ledger, from nothing but the plan and the numbers; see the module.

    Raises:
        ValueError: if the numbers are not of as many releases as were planned.
    """
    if len(numbers.utterances) != plan.releases:
        raise ValueError(f"{len(numbers.utterances)} releases, planned were {plan.releases}")
    mechanism, releases = plan.options.mechanism, plan.releases
    if mechanism == LAPLACE:
        each, total = _laplace(plan, numbers)
        sensitivity, joint = (times * plan.steps * plan.grid for times in (plan.single, plan.joint))
        scale = plan.scale
    else:
        each, total = _paper(plan, numbers) if mechanism == PAPER else _nothing(releases)
        sensitivity = joint = 1.0 if mechanism == PAPER else float("inf")
        scale = 1 / plan.options.epsilon if mechanism == PAPER else 0.0
    rows = []
    for name, epsilons in [*enumerate(each, 1), (TOTAL, total)]:
        changed = joint if name == TOTAL else sensitivity
        words = _composition(plan) if name == TOTAL else "one release"
        values = (name, *_what(plan), f"{changed:.9g}", f"{scale:.9g}", words)
        rows.append(dict(zip(COLUMNS, map(str, (*values, *_texts(epsilons), 0)), strict=True)))
    return rows


# Epsilon for a word of an utterance, for an utterance, and for a user.
_Epsilons = tuple[float, float, float]


def _laplace(plan: Plan, numbers: Numbers) -> tuple[list[_Epsilons], _Epsilons]:
    """Of each release, and of all: what is left out, in caps, times the epsilon of a cap."""
    releases, cumulative = plan.releases, plan.options.release == CUMULATIVE
    one = plan.options.epsilon / plan.joint
    if plan.options.unit == USER:
        times = releases if cumulative else 1
        each = [(2 * one, 2 * one, one)] * releases
        return each, (2 * one * times, 2 * one * times, one * times)
    if plan.options.unit == UTTERANCE:
        inside, amounts = (2, 1), numbers.utterances
        word = releases if cumulative else 1
    else:
        inside, amounts = (1, numbers.widest), numbers.words
        word = plan.joint
    # An utterance less moves others between even groups, whatever the unit is.
    single, joint = (plan.moved(together) for together in (False, True))
    users = _per_release(plan, amounts)
    each = [(inside[0] * one, inside[1] * single * one, float(user) * one) for user in users.max(1)]
    user = float(users.sum(0).max()) * one
    return each, (inside[0] * word * one, inside[1] * joint * one, user)


def _per_release(plan: Plan, amounts: np.ndarray) -> np.ndarray:
    """What each user has in each release, (releases, users), if `amounts` are new in each."""
    amounts = amounts if amounts.shape[1] else np.zeros((plan.releases, 1))
    again = plan.options.release == CUMULATIVE or plan.options.mechanism == PAPER
    return np.cumsum(amounts, axis=0) if again else amounts


def _paper(plan: Plan, numbers: Numbers) -> tuple[list[_Epsilons], _Epsilons]:
    """What the paper's noise is worth for these data; nothing bounds what others would have."""
    if plan.options.trust == CLIENT:
        # The server gets q_i and c_i as they are.
        return _nothing(plan.releases)
    epsilon, moved = plan.options.epsilon, 2 if plan.even_groups else 1
    word, utterance = numbers.heaviest_word * epsilon, numbers.heaviest_utterance * epsilon * moved
    users = _per_release(plan, numbers.mass)
    each = [(word, utterance, float(user) * epsilon) for user in users.max(1)]
    user = float(users.sum(0).max()) * epsilon
    return each, (word * plan.releases, utterance * plan.releases, user)


def _nothing(releases: int) -> tuple[list[_Epsilons], _Epsilons]:
    infinite = (float("inf"),) * 3
    return [infinite] * releases, infinite


def _what(plan: Plan) -> tuple[str, str, str, str, str]:
    """What is released, mechanism, unit, trust and cap."""
    options = plan.options
    if options.mechanism == PAPER:
        return "marginal of equation 8", PAPER, "-", options.trust, "-"
    kind = "cumulative counts" if options.release == CUMULATIVE else "counts of increments"
    if options.mechanism == LAPLACE:
        what = f"{kind}, {'summed' if options.trust == SERVER else 'by client'}"
        return what, LAPLACE, options.unit, options.trust, f"{options.cap:.9g}"
    return f"{kind}, without noise", options.mechanism, "-", options.trust, "-"


def _composition(plan: Plan) -> str:
    options, releases = plan.options, plan.releases
    if options.mechanism == PAPER:
        return f"sequential, {releases} releases; of these data alone, no bound is enforced"
    if options.mechanism != LAPLACE:
        return "-"
    if options.unit == UTTERANCE and plan.even_groups:
        return f"even groups, {releases} releases: each may change by two utterances"
    if options.release == CUMULATIVE:
        return f"sequential, {releases} releases"
    if options.unit == USER:
        return "one bound over all releases"
    return "parallel: each utterance is in one release"


def _texts(epsilons: _Epsilons) -> list[str]:
    return [f"{value:.6g}" for value in epsilons]


def write_ledger(path: Path, plan: Plan, numbers: Numbers) -> None:
    """Write `ledger_rows` as a tab-separated table."""
    write_tsv(path, COLUMNS, ledger_rows(plan, numbers))
