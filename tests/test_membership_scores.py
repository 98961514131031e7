"""Scores of membership on simulated losses, whose areas and rates are known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logit
from scipy.stats import binomtest, gmean, norm
from sklearn.metrics import roc_auc_score

from fedtools.attack.membership.attack import RATES, area, judge
from fedtools.attack.membership.scores import Seen, blind, offline, online, rmia, scores_of

COUNT, MODELS = 4000, 100
SPREAD, GAIN = 0.7, 1.2


def told(scores: np.ndarray, members: np.ndarray, clients: np.ndarray | None = None) -> dict:
    """Return the figures of trials as numbers; by default, each is of another speaker's client."""
    clients = np.zeros(len(scores), int) if clients is None else clients
    found = judge(scores, members, clients, clients, 50, 0)
    return {name: float("nan") if one == "-" else float(one) for name, one in found.items()}


def simulated(seed: int, gain: float = GAIN, models: int = MODELS, own: bool = False):
    """Simulate utterances of very different scores, raised by `gain` in models trained on them.

    Returns:
        the victim's scores, those of models with and without, who is a member, and the deviations.
    """
    random = np.random.default_rng(seed)
    members = np.arange(COUNT) % 2 == 0
    levels = random.normal(0, 20, COUNT)
    spread = random.uniform(0.2, 2, COUNT) if own else np.full(COUNT, SPREAD)
    draw = levels[:, None] + spread[:, None] * random.normal(size=(COUNT, 2 * models + 1))
    victim = draw[:, 0] + gain * members
    return victim, draw[:, 1 : models + 1] + gain, draw[:, models + 1 :], members, spread


# Three standard deviations of a share of one half, in draws of as many trials.
NEAR = 100 * 3 * 0.5 / np.sqrt(COUNT / 2)


def test_lira_reaches_what_the_gaussians_allow():
    victim, inside, outside, members, _ = simulated(0)
    assert told(victim, members)["AUC%"] == pytest.approx(50, abs=NEAR)
    separation = GAIN / SPREAD
    for scores in (online(victim, inside, outside), offline(victim, outside)):
        found = told(scores, members)
        assert found["AUC%"] == pytest.approx(100 * norm.cdf(separation / np.sqrt(2)), abs=NEAR)
        for name in ("TPR@1%", "TPR@10%"):
            expected = 100 * norm.cdf(separation - norm.isf(RATES[name]))
            # A threshold at 20 of 2000 non-members is known less precisely.
            assert found[name] == pytest.approx(expected, abs=4 * NEAR)
        # 2000 non-members are not enough for a rate of one in a thousand.
        assert np.isnan(found["TPR@0.1%"])


def test_of_many_models_each_utterance_has_its_own_variance():
    """With a common variance, a TPR is lost: the few with large deviations set the threshold."""
    victim, inside, outside, members, spread = simulated(1, own=True)
    found = told(offline(victim, outside), members)["TPR@1%"]
    # The optimal statistic for known deviations, by the neighbourhood of each utterance.
    ideal = (victim - (outside.mean(1))) / spread
    assert found == pytest.approx(told(ideal, members)["TPR@1%"], abs=4)
    few = told(offline(victim, outside[:, :8]), members)["TPR@1%"]
    assert few < found - 10
    ratios = online(victim, inside, outside)
    expected = norm.logpdf(victim, inside.mean(1), inside.std(1, ddof=1)) - norm.logpdf(
        victim, outside.mean(1), outside.std(1, ddof=1)
    )
    np.testing.assert_allclose(ratios, expected, rtol=1e-9)


def test_without_a_signal_there_is_none():
    victim, inside, outside, members, _ = simulated(2, gain=0.0)
    for scores in (
        online(victim, inside, outside),
        offline(victim, outside),
        rmia(-victim, -outside, np.arange(COUNT) % 5 == 1),
    ):
        assert told(scores, members)["AUC%"] == pytest.approx(50, abs=NEAR)


def test_few_models_with_holes_where_one_had_the_utterance():
    """By hand: 2 of 4 models have each utterance; one variance from both kinds."""
    random = np.random.default_rng(3)
    values, models = random.normal(size=6), random.normal(size=(6, 4))
    had = np.array([random.permutation(4) < 2 for _ in range(6)])
    found = online(values, np.where(had, models, np.nan), np.where(had, np.nan, models))
    pairs = [(models[i][had[i]], models[i][~had[i]]) for i in range(6)]
    variance = sum(((one - one.mean()) ** 2).sum() for pair in pairs for one in pair) / 12
    for value, score, (one, other) in zip(values, found, pairs, strict=True):
        expected = ((value - other.mean()) ** 2 - (value - one.mean()) ** 2) / (2 * variance)
        assert score == pytest.approx(expected)


def test_rmia_counts_what_an_utterance_dominates():
    random = np.random.default_rng(4)
    losses, outside = random.gamma(2, 2, 9), random.gamma(2, 2, (9, 3))
    outside[0, 1] = np.nan
    population = np.arange(9) >= 5
    found = rmia(losses, outside, population)
    # The geometric mean of probabilities.
    ratio = [
        np.exp(-one) / gmean(np.exp(-some), nan_policy="omit")
        for one, some in zip(losses, outside, strict=True)
    ]
    for index in range(9):
        won = [ratio[index] / ratio[other] >= 1 - 1e-12 for other in np.flatnonzero(population)]
        assert found[index] == pytest.approx(np.mean(won))


def test_rmia_is_not_decided_by_one_reference():
    """Transcripts of 20 to 60 nats, and eight references that differ by some: nearly LiRA's area.

    The mean of probabilities is that of the best reference, and loses half of what is to be found.
    """
    random = np.random.default_rng(8)
    members = np.arange(COUNT) % 2 == 0
    level = random.uniform(20, 60, COUNT)
    outside = level[:, None] + random.normal(0, 4, (COUNT, 8))
    losses = level + random.normal(0, 4, COUNT) - 4 * members
    population = np.zeros(COUNT, bool)
    population[1::4] = True
    tried = ~population
    found = told(rmia(losses, outside, population)[tried], members[tried])["AUC%"]
    # A difference of normal distributions, of a loss and of a mean of eight.
    expected = 100 * norm.cdf(4 / (4 * np.sqrt(1 + 1 / 8)) / np.sqrt(2))
    assert found == pytest.approx(expected, abs=NEAR)


def test_lira_scales_losses_as_the_paper_and_centres_on_the_population():
    """By hand: log p - log(1 - p) of losses, one variance, and the client's own threshold."""
    random = np.random.default_rng(9)
    count, population = 30, np.arange(30) >= 18
    start = random.uniform(0.01, 3, count)
    victim, cohort = (
        np.stack([random.uniform(0.01, 3, size), random.uniform(-1, 1, size)], -1)
        for size in (count, (count, 5))
    )
    nothing = np.zeros((count, 0, 2))
    found = dict(scores_of(Seen(start, victim, cohort, nothing, nothing, population)))
    own, others = logit(np.exp(-victim[:, 0])), logit(np.exp(-cohort[:, :, 0]))
    middles = others.mean(1)
    raw = (own - middles) / np.sqrt(((others - middles[:, None]) ** 2).sum() / (count * 4))
    for key, scores in (
        (("LiRA offline", "loss", "round"), raw),
        (("threshold", "loss", "-"), start - victim[:, 0]),
        (("threshold", "gradient", "-"), victim[:, 1]),
    ):
        known = scores[population]
        expected = (scores - known.mean()) / known.std(ddof=1)
        np.testing.assert_allclose(found[key], expected, rtol=1e-9)


def test_intervals_weigh_clients_by_their_pairs():
    """Speakers of 4 or 80 trials: explicit draws, in which a speaker's pairs are repeated."""
    random = np.random.default_rng(10)
    sizes = [4] * 6 + [80] * 6
    clients = np.repeat(np.arange(12), sizes)
    members = np.arange(len(clients)) % 2 == 0
    # Small clients are told apart, large ones are not.
    scores = random.normal(size=len(clients)) + 6 * members * (clients < 6)
    found = judge(scores, members, clients, clients, 2000, 0)
    won, pairs = [], []
    for one in range(12):
        own, other = (scores[(clients == one) & kind] for kind in (members, ~members))
        won.append((own[:, None] > other).sum())
        pairs.append(len(own) * len(other))
    drawn = []
    for _ in range(2000):
        some = random.integers(12, size=12)
        drawn.append(100 * np.sum(np.take(won, some)) / np.sum(np.take(pairs, some)))
    low, high = np.percentile(drawn, [2.5, 97.5])
    exact = binomtest(round(sum(won) / sum(pairs) * 252), 252).proportion_ci(0.95)
    low, high = min(low, 100 * exact.low), max(high, 100 * exact.high)
    assert (float(found["low"]), float(found["high"])) == pytest.approx((low, high), abs=1.5)


def test_a_perfect_area_has_an_interval():
    """Of 60 members and as many others: Clopper and Pearson's for no error."""
    clients, members = np.repeat(np.arange(12), 10), np.arange(120) % 2 == 0
    found = judge(members + 0.0, members, clients, clients, 100, 0)
    assert (found["AUC%"], found["high"]) == ("100.00", "100.00")
    assert float(found["low"]) == pytest.approx(100 * 0.025 ** (1 / 60), abs=0.006)


def seen_of(random: np.random.Generator, models: int, count: int = 400) -> dict[str, np.ndarray]:
    """Simulate losses of one client's utterances that depend on their speaker alone.

    The first half is of the client's speaker, known to it and its kin: their loss falls by 4. The
    last quarter of the rest is the population.
    """
    voice = 4.0 * (np.arange(count) < count // 2)
    start = random.uniform(20, 60, count)

    def under(known: bool) -> np.ndarray:
        losses = start - voice * known + random.normal(0, 0.5, count)
        return np.stack([losses, 0.1 * voice * known + random.normal(0, 0.05, count)], 1)

    own, one = (np.stack([under(known) for _ in range(models)], 1) for known in (True, False))
    population = np.arange(count) >= count * 7 // 8
    nothing = np.zeros((count, 0, 2))
    return {"start": start, "victim": under(True), "cohort": one, "outside": own,
            "inside": nothing, "population": population}  # fmt: skip


def test_a_speaker_is_no_member():
    """Utterances of a similar speaker fool thresholds and other clients' models, not kin."""
    seen = seen_of(np.random.default_rng(5), 20)
    tried = ~seen["population"]
    members = (np.arange(400) < 200)[tried]
    found = {key: told(scores[tried], members)["AUC%"] for key, scores in scores_of(Seen(**seen))}
    assert len(found) == 8
    for (attack, _, references), value in found.items():
        if references == "speaker":
            # Three standard deviations of the area of 200 and 150 trials.
            assert value == pytest.approx(50, abs=10), attack
        else:
            assert value > 95, attack


def test_thresholds_are_of_each_client():
    """Clients with higher losses throughout are no longer separated from the other clients."""
    random = np.random.default_rng(6)
    scores, members, clients, plain = [], [], [], []
    for client in range(20):
        seen = seen_of(random, 8)
        gain = np.where(np.arange(400) % 2, 1.0, 0.0)
        seen["victim"][:, 0] += 30 * client - gain
        tried = np.arange(400) < 200
        (_, one), *_ = scores_of(Seen(**seen))
        scores.append(one[tried])
        plain.append((seen["start"] - seen["victim"][:, 0])[tried])
        members.append(gain[tried] > 0)
        clients.append(np.full(200, client))
    members, clients = np.concatenate(members), np.concatenate(clients)
    found = told(np.concatenate(scores), members, clients)
    raw = told(np.concatenate(plain), members, clients)
    expected = 100 * norm.cdf(1 / (0.5 * np.sqrt(2)))
    # Pairs are of one client in either case.
    assert found["AUC%"] == pytest.approx(expected, abs=2)
    assert raw["AUC%"] == pytest.approx(found["AUC%"])
    assert raw["TPR@10%"] < 15
    assert found["TPR@10%"] > 55
    assert found["low"] < found["AUC%"] < found["high"]


@pytest.mark.parametrize(
    ("others", "told_of"), [(99, []), (100, ["TPR@10%"]), (1000, ["TPR@1%", "TPR@10%"])]
)
def test_rates_want_ten_false_positives(others, told_of):
    members = np.arange(others + 5) < 5
    found = judge(np.arange(others + 5.0)[::-1], members, *[np.zeros(others + 5, int)] * 2, 20, 0)
    assert [name for name in RATES if found[name] != "-"] == told_of
    assert all(found[name] == "100.00" for name in told_of)
    # With one speaker, the interval is the exact one of one trial: 0.975 = 1 - 0.025.
    assert (found["AUC%"], found["low"], found["high"]) == ("100.00", "2.50", "100.00")


def test_audio_tells_what_differs_in_audio():
    random = np.random.default_rng(7)
    clients, labels = np.repeat(np.arange(20), 20), np.arange(400) % 2 == 0
    features = random.normal(size=(400, 12)) + 5 * random.normal(size=(20, 12))[clients]
    nothing = told(blind(features, labels, clients, clients % 5), labels, clients)
    assert nothing["AUC%"] == pytest.approx(50, abs=10)
    features[:, 3] += 1.5 * labels
    found = told(blind(features, labels, clients, clients % 5), labels, clients)
    assert found["AUC%"] > 70


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_the_area_counts_pairs(items):
    """It equals a comparison of all pairs, ties counting half, and scikit-learn's area."""
    scores, members = (np.array(column) for column in zip(*items, strict=True))
    pairs = [
        (scores[i] > scores[k]) + 0.5 * (scores[i] == scores[k])
        for i in np.flatnonzero(members)
        for k in np.flatnonzero(~members)
    ]
    found = area(scores, members)
    if not pairs:
        assert np.isnan(found)
        return
    assert found == pytest.approx(100 * np.mean(pairs))
    assert found == pytest.approx(100 * roc_auc_score(members, scores))
