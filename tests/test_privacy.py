"""Differential privacy of word counts: the audit, bounds, marginals, options and the ledger."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedtools.core.config import from_mapping
from fedtools.core.errors import UserError
from fedtools.methods.fmp import FMP
from fedtools.privacy.bounds import Utterances
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.ledger import COLUMNS, Amount, ledger_rows, write_ledger
from fedtools.privacy.marginals import PAPER_WARNING, mend, paper_release, project
from fedtools.privacy.options import Privacy
from fedtools.privacy.plan import Plan

KEY = NoiseKey(bytes(range(32)))
UNITS = ("word", "utterance", "user")
RELEASES = ("increments", "cumulative")
# A world: for each round, for each user, its new utterances as {word: weighted count}.
World = list[list[list[dict[int, float]]]]


def plan_of(releases: int, even_groups: bool = False, **options) -> Plan:
    return Plan(Privacy(**{"mechanism": "laplace", **options}), releases, even_groups)


def exact_counts(plan: Plan, world: World, size: int) -> np.ndarray:
    """Return releases without noise, (releases, size): the sum over users."""
    found = np.zeros((plan.releases, size))
    for user in range(len(world[0])):
        spent = 0
        for at, users in enumerate(world):
            counts, spent = plan.bound(Utterances.of(users[user], size), spent)
            found[at] += counts
    adds_up = plan.options.release == "cumulative" or plan.options.mechanism == "paper"
    return np.cumsum(found, axis=0) if adds_up else found


# The audit.


def observe(plan: Plan, counts: np.ndarray, trials: int, name: str) -> np.ndarray:
    """Return noisy counts, (trials, releases, size): each copy of the vocabulary is a trial."""
    releases, size = counts.shape
    seen = np.empty((trials, releases, size))
    for at in range(releases):
        wide = np.tile(counts[at], trials)
        noisy = plan.release(wide, KEY, experiment=name, number=at + 1, sender="")
        seen[:, at] = noisy.reshape(trials, size)
    return seen


def audited(one: np.ndarray, two: np.ndarray, error: float = 1e-4) -> float:
    """Return a lower bound of epsilon, from a statistic of many releases of two adjacent data sets.

    Events are "at least a threshold" and "at most a threshold". The first half of the trials
    chooses the event, the second half bounds its two probabilities (Clopper and Pearson).
    """
    best = (-np.inf, 0.0, 1, one, two)
    for sign in (1, -1):
        for first, second in ((one, two), (two, one)):
            values = sign * first[::2], sign * second[::2]
            for level in np.quantile(np.concatenate(values), np.linspace(0.02, 0.98, 49)):
                bound = log_ratio(*((value >= level).mean() for value in values), len(values[0]))
                best = max(best, (bound, level, sign, first, second), key=lambda found: found[0])
    _, level, sign, first, second = best
    shares = [(sign * value[1::2] >= level).mean() for value in (first, second)]
    return log_ratio(*shares, len(first[1::2]), error)


def log_ratio(one: float, two: float, trials: int, error: float = 1e-4) -> float:
    """Return a lower bound of the log ratio of two probabilities, from shares of trials."""
    hits = round(one * trials), round(two * trials)
    if not hits[0]:
        return -np.inf
    low = stats.beta.ppf(error / 2, hits[0], trials - hits[0] + 1)
    high = stats.beta.ppf(1 - error / 2, hits[1] + 1, trials - hits[1]) if two < 1 else 1.0
    return float(np.log(low / high))


def audit(plan: Plan, one: World, two: World, size: int, trials: int = 60000) -> float:
    """Return the audited epsilon of all releases; the statistic is the log-likelihood ratio."""
    counts = exact_counts(plan, one, size), exact_counts(plan, two, size)
    seen = (observe(plan, counts[side], trials, f"world {side}") for side in (0, 1))
    ratios = [(np.abs(noisy - counts[1]) - np.abs(noisy - counts[0])).sum((1, 2)) for noisy in seen]
    return audited(*ratios)


class Half(Plan):
    """A mechanism with half of the required noise."""

    @property
    def scale_steps(self) -> Fraction:
        return super().scale_steps / 2


REST = [{0: 3.0, 1: 1.0}, {2: 0.7}]
# Removing the last one of each gives an adjacent world; both rounds have something to compose.
ADJACENT: dict[str, tuple[World, World]] = {
    "word": ([[[{0: 1.0, 1: 50.0}]], [REST]], [[[{0: 1.0}]], [REST]]),
    "utterance": ([[[*REST, {1: 30.0, 2: 9.0}]], [REST]], [[REST], [REST]]),
    "user": ([[REST, [{1: 90.0}]], [REST, [{0: 8.0}]]], [[REST, []], [REST, []]]),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("unit", UNITS)
def test_the_audit_finds_epsilon_and_no_more(unit, release):
    options = {"unit": unit, "release": release, "cap": 4.0, "epsilon": 1.0}
    one, two = ADJACENT[unit]
    found = audit(plan_of(2, **options), one, two, 3)
    # Well above 0; otherwise the audit itself could detect nothing.
    assert 0.6 < found <= 1.0
    half = Half(Privacy(mechanism="laplace", **options), 2, False)
    assert audit(half, one, two, 3) > 1.5


def test_the_audit_fails_cumulative_counts_that_are_not_composed():
    class Parallel(Plan):
        @property
        def scale_steps(self) -> Fraction:
            return super().scale_steps / self.releases

    one, two = ADJACENT["utterance"]
    plan = Parallel(Privacy(mechanism="laplace", release="cumulative", cap=4.0), 2, False)
    assert audit(plan, one, two, 3) > 1.5


def test_even_groups_cost_more_than_one_utterance():
    # A sixth utterance at the end gives the first of five groups two, and moves all others.
    one, two = (
        [[[{int(word): 5.0} for word in part]] for part in np.array_split(range(number), 5)]
        for number in (5, 6)
    )
    assert audit(plan_of(5, cap=5.0), one, two, 6, 20000) > 2.0
    assert 0.2 < audit(plan_of(5, True, cap=5.0), one, two, 6, 20000) <= 1.0


def test_what_lies_within_a_unit_may_cost_twice_the_units_epsilon():
    # Without its long utterance, the user's whole bound is spent on another word.
    one, two = [[[{0: 1000.0}, {1: 4.0}]]], [[[{1: 4.0}]]]
    plan = plan_of(1, unit="user", cap=4.0)
    assert 1.2 < audit(plan, one, two, 2) <= 2.0
    for row in ledger_rows(plan, amounts_of(one, 2)):
        assert [row[f"epsilon_{level}"] for level in UNITS] == ["2", "2", "1"]


def paper_seen(counts: np.ndarray, epsilon: float, name: str, rounds: int = 1) -> np.ndarray:
    """Return the evidence of the paper's releases about word 0, (1200,), summed over the rounds."""
    totals = np.array([counts.sum()])
    seen = [
        paper_release(
            counts[None] / totals, totals, epsilon, KEY, experiment=f"{name} {trial}", number=at
        )[0]
        for trial in range(1200)
        for at in range(rounds)
    ]
    return np.reshape(seen, (-1, rounds)).sum(1)


# A word occurs once in all 20 hypotheses of an utterance, with the paper's sigma.
KERNEL = float(np.exp(-(np.arange(20.0) ** 2) / (2 * 5.0**2)).sum())


@pytest.mark.parametrize(
    ("count", "rounds", "holds"),
    [(1.0, 1, True), (5.0, 1, False), (KERNEL, 1, False), (1.0, 4, False)],
    ids=["one word, 1-best, one release", "a word five times", "20-best", "four releases"],
)
def test_the_audit_of_the_papers_mechanism(count, rounds, holds):
    # Without the utterance the word does not occur; the other counts are large and known.
    others = np.array([0.0, 4000.0, 3000.0, 2000.0])
    adjacent = others + np.array([count, 0, 0, 0])
    found = audited(*(paper_seen(one, 1.0, f"{one[0]}", rounds) for one in (adjacent, others)))
    assert (found <= 1.0) == holds


# Bounds: sensitivities by brute force.


@st.composite
def worlds(draw) -> tuple[World, int]:
    """Return a world of up to 3 rounds, 2 users and 4 words, and the vocabulary's size."""
    weights = st.sampled_from([0.25, 1.0, 1.0, 3.0, 7.3, 100.0])
    utterances = st.dictionaries(st.integers(0, 3), weights, max_size=4)
    rounds = draw(st.integers(1, 3))
    some = st.lists(utterances, max_size=4)
    return [[draw(some) for _ in range(2)] for _ in range(rounds)], 4


def without(world: World, at: int, user: int, utterance: int | None, word: int | None) -> World:
    """Copy the world without one word of an utterance, one utterance, or one user."""
    copy = [[[dict(one) for one in new] for new in users] for users in world]
    if utterance is None:
        for users in copy:
            users[user] = []
    elif word is None:
        del copy[at][user][utterance]
    else:
        del copy[at][user][utterance][word]
    return copy


def amounts_of(world: World, size: int) -> list[list[Amount]]:
    return [[Amount.of(Utterances.of(new, size)) for new in users] for users in world]


def regroup(world: World, user: int) -> World:
    """Divide this user's utterances evenly into as many groups as there are rounds."""
    everything = [one for users in world for one in users[user]]
    groups = np.array_split(np.arange(len(everything)), len(world))
    return [
        [[everything[i] for i in group] if at == user else new for at, new in enumerate(users)]
        for users, group in zip(world, groups, strict=True)
    ]


@settings(max_examples=60)
@given(
    made=worlds(),
    unit=st.sampled_from(UNITS),
    release=st.sampled_from(RELEASES),
    even=st.booleans(),
    cap=st.sampled_from([0.7, 4.0, 1000.0]),
    mechanism=st.sampled_from(["laplace", "laplace", "paper"]),
    draws=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_no_unit_changes_more_than_its_sensitivity(
    made, unit, release, even, cap, mechanism, draws
):
    """L1 differences of all releases stay within the plan and the ledger's levels."""
    world, size = made
    if even:
        world = regroup(regroup(world, 0), 1)
    options = {"unit": unit, "release": release, "cap": cap, "mechanism": mechanism}
    plan = plan_of(len(world), even, epsilon=0.5, **options)
    scale = plan.scale if mechanism == "laplace" else 1 / 0.5
    counts = exact_counts(plan, world, size)
    rows = ledger_rows(plan, amounts_of(world, size))
    allowed = {level: [float(row[f"epsilon_{level}"]) for row in rows] for level in UNITS}
    # Once per drawn round.
    draws = draws[: len(world)]
    again = ledger_rows(plan, amounts_of(world, size), draws)
    assert len(again) == sum(draws) + 1

    def check(level: str, other: World) -> None:
        other = regroup(regroup(other, 0), 1) if even else other
        changes = np.abs(counts - exact_counts(plan, other, size)).sum(1)
        for change, epsilon in zip([*changes, changes.sum()], allowed[level], strict=True):
            assert change / scale <= epsilon * (1 + 1e-5)
        change, epsilon = changes @ draws, float(again[-1][f"epsilon_{level}"])
        assert change / scale <= epsilon * (1 + 1e-5)
        if level == unit and mechanism == "laplace":
            # Exactly, without a tolerance: whole steps.
            assert changes.sum() <= plan.joint * plan.steps * plan.grid <= plan.joint * cap
            assert changes.max() <= plan.single * plan.steps * plan.grid

    for user in range(2):
        check("user", without(world, 0, user, None, None))
        for at, users in enumerate(world):
            for number, one in enumerate(users[user]):
                check("utterance", without(world, at, user, number, None))
                for word in one:
                    check("word", without(world, at, user, number, word))


@pytest.mark.parametrize("cut", ["larger groups first", "rounded down"])
def test_one_utterance_moves_others_over_the_borders_of_even_groups(cut):
    """All ways to add one to up to nine utterances; the last of five groups is not released."""

    def groups(utterances: list[int]) -> list[set[int]]:
        number = len(utterances)
        borders = [number * group // 5 for group in range(1, 5)]
        if cut == "larger groups first":
            borders = np.cumsum([len(part) for part in np.array_split(utterances, 5)])[:4]
        return [set(map(int, part)) for part in np.split(np.array(utterances, int), borders)][:4]

    for release in RELEASES:
        plan, single, joint = plan_of(4, True, release=release), 0, 0
        for number, place in ((n, p) for n in range(10) for p in range(n + 1)):
            old = list(range(number))
            one, two = groups(old), groups([*old[:place], -1, *old[place:]])
            if release == "cumulative":
                one, two = (
                    [set().union(*part[: at + 1]) for at in range(4)] for part in (one, two)
                )
            changes = [len(a ^ b) for a, b in zip(one, two, strict=True)]
            single, joint = max(single, *changes), max(joint, sum(changes))
        assert single <= plan.single and joint <= plan.joint
        # No smaller bound covers all such divisions.
        if cut == "rounded down":
            assert (single, joint) == (plan.single, plan.joint)


def test_entries_of_one_word_are_bounded_together():
    # In the form of lists over hypotheses: the same word of the same utterance in many entries.
    many = Utterances.entries([0] * 9 + [1], [2] * 9 + [2], [1.0] * 10, 2, 4)
    counts, _ = plan_of(1, unit="word", cap=2.0).bound(many)
    assert counts.tolist() == [0, 0, 3, 0]


def test_bounds_keep_what_is_within_and_the_shape_of_what_is_not():
    plan = plan_of(1, cap=4.0)
    counts, _ = plan.bound(Utterances.of([{0: 1.25, 1: 0.5}, {2: 30.0, 3: 10.0}, {}], 5))
    assert counts.tolist() == [1.25, 0.5, 3.0, 1.0, 0.0]


def test_a_users_bound_is_for_its_whole_history():
    plan = plan_of(3, unit="user", cap=4.0)
    spent, history = 0, []
    for counts in ({0: 3.0}, {0: 1.0, 1: 3.0}, {0: 50.0}):
        bounded, spent = plan.bound(Utterances.of([counts], 2), spent)
        history.append(bounded.tolist())
    assert history == [[3.0, 0.0], [0.25, 0.75], [0.0, 0.0]]
    assert spent == plan.steps


def test_large_histories_do_not_overflow():
    plan = plan_of(1, unit="user", cap=0.5)
    size = 20000
    counts, spent = plan.bound(Utterances.of([dict.fromkeys(range(size), 1e6)] * 3, size))
    assert 0 <= counts.min() <= counts.max() <= 0.5 / size
    assert spent <= plan.steps
    counts, _ = plan_of(1, cap=1e-3).bound(Utterances.of([dict.fromkeys(range(size), 1e9)], size))
    assert 0 < counts.sum() <= 1e-3


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_no_counts(weight):
    with pytest.raises(ValueError, match="negative or not finite"):
        Utterances.of([{0: weight}], 1)
    with pytest.raises(ValueError, match="word 0 to 1, of 1"):
        Utterances.of([{0: 1.0, 1: 1.0}], 1)


def test_counts_that_were_not_bounded_are_refused():
    plan = plan_of(1, cap=20.0)
    for counts in ([0.1], [-1.0], [np.nan], [1e300]):
        with pytest.raises(ValueError, match="counts"):
            plan.release(np.array(counts), KEY, experiment="e", number=1, sender="")
    with pytest.raises(ValueError, match="not float64"):
        plan.release(np.ones(1, np.float32), KEY, experiment="e", number=1, sender="")


# Marginals.

counts_of = st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=30).map(np.array)


def background_of(size: int) -> np.ndarray:
    weights = 1 / np.arange(1.0, size + 1)
    return weights / weights.sum()


@given(noisy=counts_of, smoothing=st.floats(1e-6, 1))
def test_a_distribution_is_positive_and_adds_up_to_one(noisy, smoothing):
    background = background_of(len(noisy))
    method = FMP(smoothing=smoothing)
    made = method.global_distribution(noisy, background)
    assert (made > 0).all() and made.sum() == pytest.approx(1, abs=1e-12)
    if (noisy <= 0).all():
        assert made == pytest.approx(background)
    # A word with a larger count and no smaller background probability is at least as probable.
    order = np.argsort(noisy)[::-1]
    assert (np.diff(method.global_distribution(noisy[order], background)) <= 1e-12).all()


@given(noisy=counts_of)
def test_projection_is_the_nearest_vector_of_that_sum(noisy):
    made = project(noisy)
    scale = max(float(np.abs(noisy).max()), 1e-300)
    if noisy.sum() <= 0:
        assert not made.any()
        return
    assert (made >= 0).all()
    assert abs(made.sum() - noisy.sum()) <= 1e-9 * scale * len(noisy)
    # The conditions of Karush, Kuhn and Tucker: one number is subtracted from all remaining ones.
    left = made > 0
    taken = (noisy - made)[left]
    assert np.ptp(taken) <= 1e-9 * scale
    assert (noisy[~left] <= taken.max() + 1e-9 * scale).all()


def test_counts_without_noise_are_smoothed_towards_the_background():
    background, counts = background_of(4), np.array([0.0, 6.0, 2.0, 0.0])
    made = FMP(smoothing=0.2).global_distribution(counts, background)
    assert made == pytest.approx(0.1 * counts + 0.2 * background)


def test_projection_keeps_more_of_the_counts_than_clipping():
    """With Zipfian counts of a large vocabulary, clipping makes most of the distribution noise."""
    size = 20000
    counts = np.floor(50000 * background_of(size))
    plan = plan_of(1, cap=10.0)
    noisy = plan.release(counts, KEY, experiment="e", number=1, sender="")
    made = {"project": project(noisy), "clip": np.maximum(noisy, 0)}
    away = {
        name: np.abs(one / one.sum() - counts / counts.sum()).sum() for name, one in made.items()
    }
    assert away["project"] < 0.75 * away["clip"]


def test_the_papers_release_is_equation_8():
    """The noise is found by a second release of counts so large ..."""
    marginals = np.array([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]])
    totals = np.array([3.0e9, 1.0e9])
    made = paper_release(marginals, totals, 0.5, KEY, experiment="e", number=1)
    # ... that it vanishes: the rest is equation 6.
    assert made == pytest.approx(totals @ marginals / totals.sum(), abs=1e-7)
    # With zero counts, noise over its own sum: it sums to 1, and is often negative.
    nothing = [
        paper_release(marginals, np.zeros(2), 0.5, KEY, experiment="e", number=number)
        for number in range(200)
    ]
    assert np.sum(nothing, 1) == pytest.approx(np.ones(200))
    assert (np.array(nothing) < 0).any(1).mean() > 0.5
    for one in (*nothing, np.full(3, np.nan), np.array([np.inf, -1, -1])):
        mended = mend(one, np.full(3, 1 / 3))
        assert (mended >= 0).all() and mended.sum() == pytest.approx(1)


def test_the_papers_noise_has_the_papers_scale():
    # One word with a large count makes the sum known; the others show their noise.
    size, epsilon = 50000, 0.25
    counts = np.r_[1e9, np.zeros(size)]
    seen = paper_release(counts[None] / 1e9, np.array([1e9]), epsilon, KEY, experiment="", number=0)
    assert stats.kstest(seen[1:] * 1e9, "laplace", (0, 1 / epsilon)).pvalue > 1e-3


def test_other_counts_never_meet_the_papers_noise():
    marginal, totals = np.full((1, 200), 1 / 200), (np.array([1e9]), np.array([2e9]))
    noise = [
        paper_release(marginal, total, 1.0, KEY, experiment="e", number=1) * total - total / 200
        for total in totals
    ]
    assert abs(np.corrcoef(*noise)[0, 1]) < 0.3


def test_the_papers_warning_says_what_does_not_hold():
    for said in ("larger epsilon", "every round", "utterance", "N-best", "negative", "q_i and c_i"):
        assert said in PAPER_WARNING
    assert "\n" not in PAPER_WARNING


# Options.


@pytest.mark.parametrize("name", ["epsilon", "cap"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_and_cap_must_be_above_zero(name, value):
    with pytest.raises(UserError, match=rf"^some\.yaml: .*{name}.*(greater than 0|finite)") as said:
        from_mapping(Privacy, {"mechanism": "laplace", name: value}, "some.yaml")
    assert "\n" not in str(said.value)
    with pytest.raises(ValueError, match=name):
        Privacy(**{name: float(value)})
    with pytest.raises(UserError, match=rf"{name} is 1e-300; it must be from 1e-06"):
        from_mapping(Privacy, {name: 1e-300}, "some.yaml")
    # Constructing one directly gives no noise of scale 1 / 0 either.
    if name == "epsilon":
        with pytest.raises(ValueError, match="epsilon"):
            paper_release(np.ones((1, 2)), np.ones(1), value, KEY, experiment="e", number=1)


@pytest.mark.parametrize("cap", [1e-6, 1e9])
@pytest.mark.parametrize("epsilon", [1e-4, 1e9])
def test_the_ends_of_what_options_may_be(epsilon, cap):
    for mechanism in ("laplace", "paper"):
        plan = plan_of(1, epsilon=epsilon, cap=cap, mechanism=mechanism)
        counts, _ = plan.bound(Utterances.of([{0: 1e-7, 1: 3.0, 2: 1e12}], 4))
        noisy = plan.release(counts, KEY, experiment="e", number=1, sender="")
        assert np.isfinite(noisy).all()
    # Noise of such a scale is 0.
    if epsilon == 1e9:
        plan = plan_of(1, epsilon=epsilon, cap=cap)
        assert (plan.release(np.zeros(3), KEY, experiment="e", number=1, sender="") == 0).all()


def test_options_are_checked_by_name():
    with pytest.raises(UserError, match="'epsilom', did you mean 'epsilon'"):
        from_mapping(Privacy, {"epsilom": 1.0}, "some.yaml")
    with pytest.raises(UserError, match="'unit' is 'sentence'"):
        from_mapping(Privacy, {"unit": "sentence"}, "some.yaml")


def test_an_epsilon_too_small_for_exact_noise():
    with pytest.raises(UserError, match="epsilon is 1e-06, too small for 10 releases; use"):
        plan_of(10, release="cumulative", epsilon=1e-6)
    plan_of(10, release="cumulative", epsilon=1e-3)


def test_without_the_mechanism_counts_are_as_they_are():
    plan = Plan(Privacy(), 2, True)
    counts, _ = plan.bound(Utterances.of([{0: 0.1, 1: 700.0}], 3))
    assert counts.tolist() == [0.1, 700.0, 0.0]
    assert plan.release(counts, KEY, experiment="e", number=1, sender="") is counts


# The ledger.


def test_the_ledger_of_increments_and_of_cumulative_counts(tmp_path):
    world = [[[{0: 1.0, 1: 2.0}] * 3, []], [[{2: 1.0}], [{0: 1.0}] * 2]]
    amounts = amounts_of(world, 3)
    plan = plan_of(2, epsilon=0.5, cap=8.0)
    write_ledger(tmp_path / "dp.tsv", plan, amounts)
    header, *lines = (tmp_path / "dp.tsv").read_text().splitlines()
    assert header.split("\t") == list(COLUMNS)
    assert [line.split("\t") for line in lines] == [
        [*"1|counts of increments, summed|laplace|utterance|server|8|8|16".split("|"),
         "one release", "1", "0.5", "1.5", "0"],
        [*"2|counts of increments, summed|laplace|utterance|server|8|8|16".split("|"),
         "one release", "1", "0.5", "1", "0"],
        [*"total|counts of increments, summed|laplace|utterance|server|8|8|16".split("|"),
         "parallel: each utterance is in one release", "1", "0.5", "2", "0"],
    ]  # fmt: skip
    rows = ledger_rows(plan_of(2, epsilon=0.5, cap=8.0, release="cumulative"), amounts)
    assert [row["epsilon_utterance"] for row in rows] == ["0.25", "0.25", "0.5"]
    # Three utterances twice, and one once.
    assert [row["epsilon_user"] for row in rows] == ["0.75", "1", "1.75"]
    assert {row["scale"] for row in rows} == {"32"}
    with pytest.raises(ValueError, match="2 releases instead of 3"):
        ledger_rows(plan_of(3), amounts)


def test_the_ledger_of_what_was_drawn_again():
    """Parallel increments, cumulative counts, a user's bound, and undrawn rounds agree by hand."""
    amounts = amounts_of([[[{0: 1.0}] * 2]] * 3, 3)

    def totals(draws: list[int], **options) -> list[str]:
        rows = ledger_rows(plan_of(3, epsilon=1.5, **options), amounts, draws)
        return [row["epsilon_utterance"] for row in rows if row["release"] == "total"] + [
            row["epsilon_user"] for row in rows if row["release"] == "total"
        ]

    assert totals([1, 1, 1]) == ["1.5", "9"]
    # An utterance is in one round; a user's two of each round are in five releases.
    assert totals([1, 2, 2]) == ["3", "15"]
    assert totals([1, 0, 0]) == ["1.5", "3"] and totals([0, 0, 0]) == ["0", "0"]
    # Of three cumulative releases, each costs 0.5.
    assert totals([1, 2, 2], release="cumulative")[0] == "2.5"
    assert totals([1, 1, 3], unit="user") == ["9", "4.5"]
    rows = ledger_rows(plan_of(3), amounts, [1, 2, 0])
    assert [row["release"] for row in rows] == ["1", "2", "2.2", "total"]
    assert rows[-1]["composition"].endswith("; 1 drawn again")


def test_the_ledger_of_what_does_not_protect():
    world = [[[{0: 1.0, 1: 5.0}]], [[{2: 1.0}] * 2]]
    amounts = amounts_of(world, 3)
    for plan in (
        Plan(Privacy(), 2, False),
        Plan(Privacy(mechanism="paper", trust="client"), 2, False),
    ):
        for row in ledger_rows(plan, amounts):
            assert [row[f"epsilon_{level}"] for level in UNITS] == ["inf"] * 3
    rows = ledger_rows(Plan(Privacy(mechanism="paper", epsilon=0.5), 2, False), amounts)
    assert [[row[f"epsilon_{level}"] for level in UNITS] for row in rows] == [
        ["2.5", "3", "3"],
        ["2.5", "3", "4"],
        ["5", "6", "7"],
    ]
    assert "no bound is enforced" in rows[-1]["composition"]


def test_the_ledger_of_nobody():
    nothing = Amount.of(Utterances.of([], 3))
    assert nothing == Amount()
    for mechanism in ("none", "laplace", "paper"):
        for unit in UNITS:
            rows = ledger_rows(plan_of(2, mechanism=mechanism, unit=unit), [[nothing]] * 2)
            assert len(rows) == 3 and all(set(row) == set(COLUMNS) for row in rows)
    assert len(ledger_rows(plan_of(2), [[], []])) == 3
