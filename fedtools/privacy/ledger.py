"""The ledger of differential privacy: all releases, and their epsilons.

    dp.tsv    release  released  mechanism  unit  trust  cap  sensitivity  scale  composition
              epsilon_word  epsilon_utterance  epsilon_user  delta

It has one row per release and a row `total`; a release repeated after a reset is named `2.2`, the
second draw of round 2. The epsilons are bounds for removing one word of one utterance, one
utterance, or one user from the data of the experiment. They hold for what untrusted parties see:
with `trust: server` the server's release of the sum; with `trust: client` also the messages. The
set of participants is assumed to be public, since messages reveal whether a client is missing.

Bounds for other levels than the unit follow from the unit's bound:

- With unit "utterance" or "user" a vector that exceeds its bound is scaled as a whole, so removing
  one word or utterance of it lets the rest grow: the bound for a part of a unit is twice the
  unit's own.
- With unit "word" an utterance costs one epsilon per word, and with unit "word" or "utterance" a
  user costs one per word or utterance. These numbers depend on the data, so the ledger itself is
  not for publication unless the unit is "user".

A repeated draw costs again. All rounds' first draws are bounded together, then their second draws,
and so on; these bounds add up.

Experiments on the same data add up, such as trials of ten epsilons or of three seeds; see `Spent`
and `together`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedtools.core.tables import write_tsv
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.options import CLIENT, CUMULATIVE, LAPLACE, PAPER, SERVER, USER, UTTERANCE
from fedtools.privacy.plan import Plan

# Epsilon per word of an utterance, per utterance, and per user.
LEVELS = ("epsilon_word", "epsilon_utterance", "epsilon_user")
COLUMNS = (
    *("release", "released", "mechanism", "unit", "trust", "cap", "sensitivity", "scale"),
    *("composition", *LEVELS, "delta"),
)
FILE = "dp.tsv"
TOTAL = "total"


class Amount(NamedTuple):
    """Amount of a client's new data in a round, before bounding; all 0 if it does not take part.

    Attributes:
        utterances: number of utterances that enter a release for the first time in this round.
        words: number of their words, counting each word once per utterance.
        mass: sum of all weighted counts.
        widest: largest number of words of one utterance.
        heaviest_word: largest weighted count of a word in one utterance.
        heaviest_utterance: largest sum of weighted counts of one utterance.
    """

    utterances: int = 0
    words: int = 0
    mass: float = 0.0
    widest: int = 0
    heaviest_word: float = 0.0
    heaviest_utterance: float = 0.0

    @classmethod
    def of(cls, new: Utterances) -> Amount:
        """Compute the amount of the utterances passed to `Plan.bound`."""
        return cls(
            new.number,
            len(new.word),
            float(new.weight.sum()),
            int(np.bincount(new.utterance).max(initial=0)),
            float(new.weight.max(initial=0)),
            float(np.bincount(new.utterance, new.weight).max(initial=0)),
        )


# Amounts by round and user, with users in the same order in every round.
Amounts = Sequence[Sequence[Amount]]


def ledger_rows(
    plan: Plan, amounts: Amounts, draws: Sequence[int] | None = None
) -> list[dict[str, str]]:
    """Compute the rows of the ledger; see the module docstring.

    Args:
        plan: the plan of the experiment.
        amounts: amounts by round and user; those of rounds without a release are ignored.
        draws: the number of draws of each round, (rounds,); by default one each.

    Raises:
        ValueError: if the number of amounts or draws is not that of planned releases.
    """
    draws = [1] * plan.releases if draws is None else draws
    if not len(amounts) == len(draws) == plan.releases:
        raise ValueError(f"{len(amounts)} releases instead of {plan.releases}")
    mechanism, releases = plan.options.mechanism, plan.releases
    if mechanism == LAPLACE:
        each, total = _laplace(plan, amounts)
        sensitivity, joint = (times * plan.steps * plan.grid for times in (plan.single, plan.joint))
        scale = plan.scale
    else:
        each, total = _paper(plan, amounts) if mechanism == PAPER else _nothing(releases)
        sensitivity = joint = 1.0 if mechanism == PAPER else float("inf")
        scale = 1 / plan.options.epsilon if mechanism == PAPER else 0.0
    found: list[tuple[str | int, float, _Epsilons, str]] = [
        (f"{number}.{at}" if at > 1 else number, sensitivity, epsilons, "one release")
        for number, (count, epsilons) in enumerate(zip(draws, each, strict=True), 1)
        for at in range(1, count + 1)
    ]
    words = _composition(plan)
    if more := sum(count - 1 for count in draws if count):
        words += f"; {more} drawn again"
    found.append((TOTAL, max(1, *draws) * joint, _of_draws(each, total, draws), words))
    rows = []
    for name, changed, epsilons, how in found:
        values = (name, *_what(plan), f"{changed:.9g}", f"{scale:.9g}", how)
        rows.append(dict(zip(COLUMNS, map(str, (*values, *_texts(epsilons), 0)), strict=True)))
    return rows


# One epsilon for each of `LEVELS`.
_Epsilons = tuple[float, float, float]


def _of_draws(each: Sequence[_Epsilons], total: _Epsilons, draws: Sequence[int]) -> _Epsilons:
    """Return the epsilon of all draws, where `total` bounds the epsilon of one draw per round.

    `total` bounds all first draws together, all second draws together, and so on.
    """
    spent = np.zeros(3)
    for at in range(max(draws)):
        again = [one for one, count in zip(each, draws, strict=True) if count > at]
        spent += np.minimum(total, np.sum(again, 0))
    word, utterance, user = spent.tolist()
    return word, utterance, user


def _laplace(plan: Plan, amounts: Amounts) -> tuple[list[_Epsilons], _Epsilons]:
    """Return epsilon per release and in total: the change in caps times the epsilon per cap."""
    releases, cumulative = plan.releases, plan.options.release == CUMULATIVE
    one = plan.options.epsilon / plan.joint
    if plan.options.unit == USER:
        times = releases if cumulative else 1
        each = [(2 * one, 2 * one, one)] * releases
        return each, (2 * one * times, 2 * one * times, one * times)
    inside: tuple[float, float]
    if plan.options.unit == UTTERANCE:
        inside, counted = (2, 1), "utterances"
        word = releases if cumulative else 1
    else:
        inside, counted = (1, _largest(amounts, "widest")), "words"
        word = plan.joint
    # Removing an utterance moves others between even groups, whatever the unit.
    single, joint = (plan.moved(together) for together in (False, True))
    users = _per_release(plan, amounts, counted)
    each = [(inside[0] * one, inside[1] * single * one, float(user) * one) for user in users.max(1)]
    user = float(users.sum(0).max()) * one
    return each, (inside[0] * word * one, inside[1] * joint * one, user)


def _per_release(plan: Plan, amounts: Amounts, name: str) -> np.ndarray:
    """Return the amount `name` of each user in each release, (releases, users), users >= 1."""
    new = np.array([[getattr(one, name) for one in users] or [0] for users in amounts])
    again = plan.options.release == CUMULATIVE or plan.options.mechanism == PAPER
    return np.cumsum(new, axis=0) if again else new


def _largest(amounts: Amounts, name: str) -> float:
    return max((getattr(one, name) for users in amounts for one in users), default=0)


def _paper(plan: Plan, amounts: Amounts) -> tuple[list[_Epsilons], _Epsilons]:
    """Return the epsilons of the paper's noise for these data; other data have no bound."""
    if plan.options.trust == CLIENT:
        # Clients send q_i and c_i without noise.
        return _nothing(plan.releases)
    epsilon, moved = plan.options.epsilon, 2 if plan.even_groups else 1
    word = _largest(amounts, "heaviest_word") * epsilon
    utterance = _largest(amounts, "heaviest_utterance") * epsilon * moved
    users = _per_release(plan, amounts, "mass")
    each = [(word, utterance, float(user) * epsilon) for user in users.max(1)]
    user = float(users.sum(0).max()) * epsilon
    return each, (word * plan.releases, utterance * plan.releases, user)


def _nothing(releases: int) -> tuple[list[_Epsilons], _Epsilons]:
    infinite = (float("inf"),) * 3
    return [infinite] * releases, infinite


def _what(plan: Plan) -> tuple[str, str, str, str, str]:
    """Return the columns released, mechanism, unit, trust and cap."""
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


class Spent(NamedTuple):
    """Total epsilons of an experiment, and the owners of its data.

    Attributes:
        epsilons: the last row of its ledger: epsilon per word, utterance and user.
        owners: utterance -> client.
    """

    epsilons: _Epsilons
    owners: Mapping[str, str]


def together(experiments: Sequence[Spent]) -> _Epsilons:
    """Return the total epsilons over experiments of the word, utterance and user that lose most.

    Utterances of the same name in several experiments are one utterance, whose epsilons add up. All
    clients that share a name or an utterance in any experiment are one user, whose epsilons add up:
    where clients are meetings in one experiment and speakers in another, a user is a meeting with
    all its speakers. Experiments on other users' data add nothing.
    """
    sets: dict[str, set[int]] = {}
    for at, one in enumerate(experiments):
        for name in one.owners:
            sets.setdefault(name, set()).add(at)
    shared = {frozenset(one) for one in sets.values()}
    word, utterance = (
        max((sum(experiments[at].epsilons[level] for at in one) for one in shared), default=0.0)
        for level in (0, 1)
    )
    users = (
        sum(count * experiments[at].epsilons[2] for at, count in one.items())
        for one in _people(experiments)
    )
    return word, utterance, max(users, default=0.0)


def _people(experiments: Sequence[Spent]) -> Iterable[Counter[int]]:
    """Return for each user its number of clients by experiment; see `together`."""
    above: dict[tuple[str, str], tuple[str, str]] = {}

    def first(one: tuple[str, str]) -> tuple[str, str]:
        while (next_ := above.setdefault(one, one)) != one:
            above[one] = one = above.setdefault(next_, next_)
        return one

    for one in experiments:
        for utterance, client in one.owners.items():
            above[first(("utterance", utterance))] = first(("client", client))
    found: dict[tuple[str, str], Counter[int]] = {}
    for at, one in enumerate(experiments):
        for client in set(one.owners.values()):
            found.setdefault(first(("client", client)), Counter())[at] += 1
    return found.values()


def write_ledger(path: Path, plan: Plan, amounts: Amounts) -> None:
    """Write `ledger_rows` as a tab-separated table."""
    write_tsv(path, COLUMNS, ledger_rows(plan, amounts))
