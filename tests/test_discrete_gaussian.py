"""Discrete Gaussian noise of clients: its distribution, its exactness, and epsilon of its sums.

Oracles: sums over all whole numbers; the normal distribution's tail in mpmath, in 150 digits; a
replay of the stream by a reader that decides everything exactly; convolutions and Renyi divergences
by brute force; samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedtools.core.errors import UserError
from fedtools.privacy import accountant
from fedtools.privacy import discrete_gaussian as module
from fedtools.privacy.accountant import Gaussian
from fedtools.privacy.discrete_gaussian import discrete_gaussian
from fedtools.privacy.distributed import (
    Distributed,
    bound_on_tau,
    epsilon_of_rho,
    rho_for,
    share_for,
)
from fedtools.privacy.gaussian import rounded_gaussian
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.noise import Stream

WHY = "dp-accounting is not installed (pip install '.[privacy]')"
KEY = NoiseKey(bytes(range(32)))
CHUNK = module._CHUNK


def draw(deviation: float, size: int, name: str = "draw") -> np.ndarray:
    return discrete_gaussian(KEY.stream(name), deviation, size)


def masses(deviation: float, edge: int) -> np.ndarray:
    """Return the probabilities of -edge, ..., edge; edge is so large that others are nothing."""
    weights = np.exp(-np.square(np.arange(-edge, edge + 1) / deviation) / 2)
    return weights / weights.sum()


@cache
def chance(value: int, deviation: float) -> mpmath.mpf:
    """Return the exact probability of rejection.

    It is one minus the ratio of wanted and proposed probability, in units of its value at 0.
    """
    with mpmath.workdps(150):
        scale = 1 / (mpmath.mpf(deviation) * mpmath.sqrt(2))

        def ratio(k: int) -> mpmath.mpf:
            proposed = mpmath.erfc((k - 0.5) * scale) - mpmath.erfc((k + 0.5) * scale)
            return mpmath.exp(-((k * scale) ** 2)) / proposed

        return 1 - ratio(value) / ratio(0)


# ------------------------------------------------------------------------- distribution


def fits(values: np.ndarray, deviation: float, cells: int = 60) -> float:
    """Return the p-value of values in cells of nearly equal probability, or of one value each."""
    edge = int(14 * deviation)
    whole = masses(deviation, edge)
    cumulated = whole.cumsum()
    borders = np.unique(np.searchsorted(cumulated, np.arange(1, cells) / cells))
    # The farthest cells have at least ten values.
    least, most = np.searchsorted(cumulated, [10 / len(values), 1 - 10 / len(values)])
    borders = np.unique(np.r_[least, borders, most - 1])
    expected = np.diff(np.r_[0, cumulated[borders], 1]) * len(values)
    places = np.searchsorted(borders - edge, values)
    counts = np.bincount(places, minlength=len(borders) + 1)
    return stats.chisquare(counts, expected).pvalue


@pytest.mark.parametrize("deviation", [3.0, 3.5, 20.0, 1e5])
def test_noise_has_its_distribution(deviation):
    size = 200000
    values = draw(deviation, size)
    assert values.dtype == np.int64
    assert fits(values, deviation) > 1e-4
    assert fits(draw(deviation * 1.025, size), deviation) < 1e-4
    scaled = values / deviation
    assert abs(scaled.mean()) < 4 / np.sqrt(size)
    assert abs(scaled.var() - 1) < 4 * np.sqrt(2 / size)
    assert abs((scaled**4).mean() - 3) < 4 * np.sqrt(96 / size)
    if deviation > 10:
        for modulus in (2, 8, 10):
            counts = np.bincount(values % modulus, minlength=modulus)
            assert stats.chisquare(counts).pvalue > 1e-4


def test_it_is_not_the_rounded_gaussian():
    """The mean log ratio of both distributions tells them apart: skipping rejections is noticed."""
    deviation, size, edge = 3.0, 10**6, 42
    wanted = masses(deviation, edge)
    proposed = np.diff(stats.norm.cdf((np.arange(-edge, edge + 2) - 0.5) / deviation))
    inner = slice(edge - 24, edge + 25)
    score = np.log(proposed[inner] / wanted[inner])
    mean = (wanted[inner] * score).sum()
    error = np.sqrt((wanted[inner] * (score - mean) ** 2).sum() / size)
    found = {}
    for draw_ones in (discrete_gaussian, rounded_gaussian):
        values = draw_ones(KEY.stream("apart"), deviation, size)
        assert np.abs(values).max() <= 24
        found[draw_ones] = (score[values + 24].mean() - mean) / error
    assert abs(found[discrete_gaussian]) < 3
    assert found[rounded_gaussian] > 5


def test_a_sum_of_shares_is_one_discrete_gaussian():
    shares = [draw(3.0, 200000, f"client {one}") for one in range(4)]
    total = sum(shares)
    assert fits(total, 6.0) > 1e-4
    assert fits(sum(shares[:3]), 6.0) < 1e-20
    assert abs(total.var() / 36 - 1) < 4 * np.sqrt(2 / len(total))


# ------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("deviation", [3.0, 3.7, 20.0, 1e5, 2.0**44])
def test_chances_of_rejection(deviation):
    """In float64 up to 2^-45, to 60 digits, and below the bound that spares computing them."""
    farthest = int(16.3 * deviation) + 1
    spread = np.unique(np.linspace(1, farthest, 40).astype(np.int64))
    values = np.unique(np.r_[1, 2, spread])
    squares = np.square(values / deviation / deviation)
    found = module._chances(squares, deviation)
    first, *others = module._coefficients(deviation)
    for value, square, one in zip(values.tolist(), squares.tolist(), found.tolist(), strict=True):
        with mpmath.workdps(150):
            exact = chance(value, deviation)
            assert abs(one / exact - 1) < mpmath.ldexp(1, -45)
            given = module._chance(
                (value / module._context().mpf(deviation) ** 2) ** 2, first, others
            )
            assert abs(mpmath.mpf(given) / exact - 1) < mpmath.ldexp(1, -194)
            bound = (value / mpmath.mpf(deviation) ** 2) ** 2 / 24
            assert 0 < exact < bound
        assert abs(24 * float(bound) / square - 1) < 2.0**-50
    # Most of what is proposed is accepted.
    assert masses(3.0, 42) @ [float(chance(abs(k), 3.0)) for k in range(-42, 43)] < 0.005


class Given(Stream):
    """A stream of given uniform numbers of 192 bits.

    Between any two is one whose first bits tell that it is accepted, so that no others are drawn.
    """

    def __init__(self, uniform: Sequence[int]):
        super().__init__(bytes(32))
        self.heads = [head for one in uniform for head in (one >> 128, 2**64 - 1)]
        self.rest = [one % 2**128 for one in uniform]

    def take(self, label: bytes, number: int, size: int) -> bytes:
        assert number == 7
        if label == b"keep":
            raw = b"".join(head.to_bytes(8, "little") for head in self.heads)
        else:
            raw = b"".join(rest.to_bytes(16, "big") for rest in self.rest)
        assert len(raw) == size, label
        return raw


def check_tie(deviation: float, value: int) -> None:
    """Check the four numbers of 192 bits that are nearest to the chance of a rejection."""
    with mpmath.workdps(150):
        exact = chance(abs(value), deviation)
        last = int(exact * 2**192)
        uniform = [one for one in range(last - 2, last + 2) if one >= 0]
        expected = [mpmath.ldexp(2 * one + 1, -193) >= exact for one in uniform]
    assert set(expected) == {False, True}
    values = np.array([one for _ in uniform for one in (value, -value)])
    kept = module._accept(Given(uniform), 7, deviation, values)
    assert kept[::2].tolist() == expected
    assert kept[1::2].all()


@pytest.mark.parametrize("z", [0.4, 1.0, 5.1, 16.2])
@pytest.mark.parametrize("deviation", [3.0, 20.3, 1e5, 2.0**44])
def test_ties_are_decided_by_all_192_bits(deviation, z):
    check_tie(deviation, int(deviation * z))
    check_tie(deviation, -int(deviation * z))


@settings(max_examples=12, deadline=None)
@given(exponent=st.floats(1.6, 43.9), z=st.floats(0.5, 16))
def test_any_tie_is_decided_by_all_192_bits(exponent, z):
    check_tie(2.0**exponent, int(2.0**exponent * z))


def test_zero_is_never_rejected():
    assert module._accept(Zeros(bytes(32)), 0, 3.0, np.array([0, 1, 0])).tolist() == [
        True,
        False,
        True,
    ]


class Zeros(Stream):
    def take(self, label: bytes, number: int, size: int) -> bytes:
        return bytes(size)


@cache
def limit(value: int, deviation: float) -> int:
    """Return the first 64 bits of a chance of rejection; a tie of 0 is not asked for."""
    return int(chance(value, deviation) * 2**64) if value else -1


def replay(stream: Stream, deviation: float, size: int) -> tuple[np.ndarray, list[int]]:
    """Read the values off a stream as documented; return them, and the number drawn in each turn.

    Numbers whose first 64 bits do not decide do not occur.
    """
    values, left, turns = np.zeros(size, np.int64), list(range(size)), []
    while left:
        own = Stream(stream.take(b"disc", len(turns), 32))
        turns.append(len(left))
        proposed = rounded_gaussian(own, deviation, len(left)).tolist()
        again = []
        for start in range(0, len(left), CHUNK):
            part = slice(start, start + CHUNK)
            raw = own.take(b"keep", start // CHUNK, 8 * len(left[part]))
            for place, value, head in zip(
                left[part], proposed[part], np.frombuffer(raw, "<u8").tolist(), strict=True
            ):
                assert head != limit(abs(value), deviation)
                if head < limit(abs(value), deviation):
                    again.append(place)
                    continue
                values[place] = value
        left = again
    return values, turns


def test_values_are_those_of_an_exact_reader():
    values, turns = replay(KEY.stream("draw"), 3.0, 200000)
    # A value was rejected twice.
    assert len(turns) == 3
    assert 800 < turns[1] < 1100
    assert np.array_equal(draw(3.0, 200000), values)


def test_the_exact_path_gives_the_same_values(monkeypatch):
    values, words = draw(3.0, 40000), []

    class Recorded(Stream):
        def take(self, label: bytes, number: int, size: int) -> bytes:
            if label == b"last":
                words.append(size // 16)
            return super().take(label, number, size)

    monkeypatch.setattr(module, "Stream", Recorded)
    assert np.array_equal(draw(3.0, 40000), values)
    assert not sum(words)
    # No bits but the last decide then.
    monkeypatch.setattr(module, "_ERROR", 1.0)
    with mpmath.workdps(3):
        assert np.array_equal(draw(3.0, 40000), values)
        assert mpmath.mp.dps == 3
    assert sum(words) > 100
    # The other path matters: with an error of floats that is larger than stated, it is noticed.
    monkeypatch.setattr(module, "_ERROR", 2.0**-44)
    monkeypatch.setattr(module, "_chances", lambda squares, deviation: squares / 24 * 0.9)
    assert not np.array_equal(draw(3.0, 40000), values)


# ------------------------------------------------------------------------- streams


def test_a_smaller_size_has_the_first_values():
    whole = draw(3.0, 2 * CHUNK + 5)
    for size in (0, 1, 1000, 1001, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK):
        assert np.array_equal(draw(3.0, size), whole[:size])


def test_streams_and_chunks_have_no_correlation(monkeypatch):
    size = 2 * CHUNK + 77
    one = draw(3.0, size)
    others = {
        "stream": draw(3.0, size, "other"),
        "key": discrete_gaussian(NoiseKey(bytes(32)).stream("draw"), 3.0, size),
        "the next value": np.roll(one, 1),
        "the next chunk": np.roll(one, CHUNK),
        "rounded": rounded_gaussian(KEY.stream("draw"), 3.0, size),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(size), name
        assert abs(np.corrcoef(np.abs(one), np.abs(other))[0, 1]) < 4 / np.sqrt(size), name
    # No bytes are used twice.
    taken = []

    class Recorded(Stream):
        def take(self, label: bytes, number: int, size: int) -> bytes:
            taken.append((self._secret, label, number))
            return super().take(label, number, size)

    monkeypatch.setattr(module, "Stream", Recorded)
    discrete_gaussian(Recorded(bytes(32)), 3.0, size)
    assert len(set(taken)) == len(taken)
    assert {label for _, label, _ in taken} == {b"disc", b"unif", b"rest", b"keep", b"last"}


def test_noise_is_the_same_everywhere():
    # A change of these values would draw a second noise for resumed experiments.
    assert draw(5.5, 8).tolist() == [-10, 0, 0, -3, 2, 6, 4, 1]
    assert draw(2.0**44, 2).tolist() == [-33472117845440, 586691417559]
    assert draw(3.0, 40000)[CHUNK:][:8].tolist() == [-1, -2, -4, 1, 2, -1, 4, 2]


@pytest.mark.parametrize(
    "deviation", [0.0, -5.0, 2.99, 2.0**44 * 1.001, float("inf"), float("nan")]
)
def test_deviations_out_of_range(deviation):
    with pytest.raises(ValueError, match="a deviation of"):
        draw(deviation, 1)
    with pytest.raises(ValueError, match="a share with a deviation of"):
        Distributed(deviation, 2, 1.0, 1, 1)


# ------------------------------------------------------------------------- accounting


def shares(deviation: float, least: int) -> np.ndarray:
    """Return the probabilities of a sum of shares, by convolution; all terms are positive."""
    one = masses(deviation, int(14 * deviation))
    total = one
    for _ in range(least - 1):
        total = np.convolve(total, one)
    return total


@pytest.mark.parametrize("least", [2, 3, 5])
def test_a_sum_of_shares_is_as_near_a_gaussian_as_tau_says(least):
    deviation = 2**0.5
    total = shares(deviation, least)
    exact = masses(deviation * least**0.5, len(total) // 2)
    inner = slice(len(total) // 2 - 12, len(total) // 2 + 13)
    found = np.abs(np.log(total[inner] / exact[inner])).max()
    tau = bound_on_tau(deviation, least)
    assert found < tau / 2
    if least == 2:
        # The cosine of Poisson's formula attains 2 of 5; more shares are nearer than tau says.
        assert found == pytest.approx(0.4 * tau / 2, rel=0.01)


@pytest.mark.parametrize("least", [2, 7, 100])
@pytest.mark.parametrize("values", [1, 10**6, 10**80])
def test_rho_is_that_of_the_theorem(least, values):
    """The second bound of theorem 1, with its tau, in 60 digits."""
    one = Distributed(3.0, least, 40.0, values, 12)
    with mpmath.workdps(60):
        powers = (-2 * (3 * mpmath.pi) ** 2 * k / (k + 1) for k in range(1, least))
        tau = 10 * mpmath.fsum(mpmath.exp(power) for power in powers)
        exact = 6 * (40 / (mpmath.sqrt(least) * 3) + tau * mpmath.sqrt(values)) ** 2
    assert one.rho > exact * (1 - 1e-14)
    if least == 2 or values < 10**80:
        assert one.rho == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(("least", "moved"), [(1, (2,)), (2, (5, -3)), (3, (1, 1, 7))])
def test_rho_bounds_renyi_divergences(least, moved):
    """All rounds of vectors of some coordinates, by sums over all values."""
    one = Distributed(3.0, least, float(np.linalg.norm(moved)), len(moved), 4)
    total = shares(3.0, least)
    for order in (1.01, 2.0, 7.0):
        found = 0.0
        for step in moved:
            near, far = (total[step:], total[:-step]) if step > 0 else (total[:step], total[-step:])
            inner = (near > 1e-290) & (far > 1e-290)
            powers = order * np.log(near[inner]) + (1 - order) * np.log(far[inner])
            found += 4 * np.log(np.exp(powers).sum()) / (order - 1)
        assert found < order * one.rho * (1 + 1e-9)
        assert found > order * one.rho * (1 - 1e-3)


def least_log_delta(rho: float, epsilon: float) -> float:
    """Return the logarithm of corollary 13's delta, by a search of a grid of orders."""
    more = np.geomspace(1e-6, 1e12, 100001)
    alpha = 1 + more
    return float((more * (alpha * rho - epsilon) - np.log(more) - alpha * np.log1p(1 / more)).min())


@pytest.mark.parametrize("rho", [1e-4, 0.03, 1.3, 40.0, 2000.0])
@pytest.mark.parametrize("delta", [0.1, 1e-5, 1e-12])
def test_epsilon_is_corollary_13(rho, delta):
    epsilon = epsilon_of_rho(rho, delta)
    if epsilon:
        assert least_log_delta(rho, epsilon) == pytest.approx(np.log(delta), abs=1e-5)
    else:
        assert rho == 1e-4
        assert delta == 0.1
        assert least_log_delta(rho, 1e-9) < np.log(delta)
    # More than what one Gaussian release loses, and less than the plain conversion.
    exact = accountant.epsilon_of([Gaussian((2 * rho) ** -0.5, 1)], delta)
    assert exact <= epsilon < rho + 2 * np.sqrt(rho * np.log(1 / delta))
    if delta < 0.1:
        assert epsilon < 1.35 * exact


@pytest.mark.skipif(find_spec("dp_accounting") is None, reason=WHY)
@pytest.mark.parametrize("rho", [0.01, 1.3, 40.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12])
def test_epsilon_is_that_of_dp_accounting(rho, delta):
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    theirs = RdpAccountant(1 + np.geomspace(0.02, 1000, 5000))
    theirs.compose(dp_accounting.ZCDpEvent(rho / 4), 4)
    epsilon = epsilon_of_rho(rho, delta)
    assert epsilon == pytest.approx(theirs.get_epsilon(delta), rel=1e-6)
    assert epsilon_of_rho(rho_for(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-12)


EPSILON = st.floats(-5, 6).map(np.exp).map(float)
DELTA = st.floats(-14, -0.1).map(lambda power: 10.0**power)
NORM = st.floats(0, 18).map(np.exp).map(float)


@given(EPSILON, DELTA)
@settings(max_examples=25)
def test_rho_for_is_the_inverse(epsilon, delta):
    rho = rho_for(epsilon, delta)
    assert epsilon_of_rho(rho, delta) <= epsilon
    assert epsilon_of_rho(rho * (1 + 1e-9), delta) > epsilon
    assert least_log_delta(rho, epsilon) <= np.log(delta) + 1e-5


@given(EPSILON, DELTA, st.integers(1, 2000), NORM, st.integers(1, 300), st.integers(1, 10**8))
@settings(max_examples=60)
def test_a_share_is_the_least_that_keeps_epsilon(epsilon, delta, rounds, norm, least, values):
    share = share_for(epsilon, delta, rounds, norm, least, values)
    one = Distributed(share, least, norm, values, rounds)
    assert epsilon_of_rho(one.rho, delta) <= epsilon
    closed = norm * np.sqrt(rounds / (2 * least * rho_for(epsilon, delta)))
    assert share == pytest.approx(max(closed, 3.0), rel=1e-9)
    if share > 3:
        less = replace(one, share_deviation=share * (1 - 1e-9)) if share > 3.1 else None
        assert less is None or epsilon_of_rho(less.rho, delta) > epsilon


@given(
    *(st.floats(1.2, 20).map(np.exp).map(float), st.integers(1, 300), NORM),
    *(st.integers(1, 10**8), st.integers(1, 2000), DELTA, st.floats(1.001, 3)),
)
@settings(max_examples=60)
def test_epsilon_is_monotone(share, least, norm, values, rounds, delta, more):
    one = Distributed(share, least, norm, values, rounds)
    epsilon = epsilon_of_rho(one.rho, delta)
    others = {
        "more noise": replace(one, share_deviation=share * more),
        "more clients": replace(one, least=least + 1),
        "a smaller norm": replace(one, norm=norm / more),
    }
    for name, changed in others.items():
        smaller = epsilon_of_rho(changed.rho, delta)
        assert smaller < epsilon or not epsilon, name
    assert epsilon_of_rho(replace(one, rounds=rounds + 1).rho, delta) >= epsilon
    assert replace(one, rounds=2 * rounds).rho == pytest.approx(2 * one.rho, rel=1e-12)
    assert replace(one, values=2 * values).rho >= one.rho
    assert epsilon_of_rho(one.rho, delta / more) >= epsilon


def test_values_out_of_range_are_refused():
    one = Distributed(5.0, 2, 10.0, 3, 4)
    for changed in ({"least": 0}, {"values": 0}, {"rounds": 0}):
        with pytest.raises(ValueError, match=r"\d clients, \d values, \d rounds"):
            replace(one, **changed)
    for norm in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a norm of"):
            replace(one, norm=norm)
    for delta in (0.0, 1.0, -1.0, float("nan")):
        for call in (epsilon_of_rho, rho_for):
            with pytest.raises(ValueError, match="a delta of"):
                call(1.0, delta)
    for rho in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a rho of"):
            epsilon_of_rho(rho, 1e-5)
    for epsilon in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="an epsilon of"):
            rho_for(epsilon, 1e-5)
    assert epsilon_of_rho(0.0, 1e-5) == 0
    with pytest.raises(UserError, match=r"epsilon 1e-06 at delta 1e-05 needs more .* smaller norm"):
        share_for(1e-6, 1e-5, 1000, 2.0**26, 3, 10)


# ------------------------------------------------------------------------- simulation


def estimated(share: float, epsilon: float, least: int, moved: np.ndarray, rounds: int):
    """Return delta and its standard error, of sums that were drawn with and without a client.

    A reader knows all other clients, and applies the best test: a threshold on the likelihood ratio
    of all rounds together, which is that of a discrete Gaussian (or as good as).
    """
    draws, variance = 40000, least * share**2
    size = draws * rounds * len(moved)
    exceed = []
    for number in (0, 1):
        noise = sum(draw(share, size, f"{number} {one}") for one in range(least))
        total = noise.reshape(draws, rounds, len(moved)) + (1 - number) * moved
        losses = ((2 * total - moved) * moved).sum((1, 2)) / (2 * variance)
        exceed.append((losses > epsilon).mean())
    (present, absent), factor = exceed, np.exp(epsilon)
    spread = present * (1 - present) + factor**2 * absent * (1 - absent)
    return present - factor * absent, np.sqrt(spread / draws)


def test_drawn_sums_keep_epsilon():
    least, rounds, moved, epsilon, delta = 2, 2, np.array([5, -2]), 0.8, 0.02
    share = share_for(epsilon, delta, rounds, float(np.linalg.norm(moved)), least, len(moved))
    assert share > 6
    found, error = estimated(share, epsilon, least, moved, rounds)
    assert error < delta / 8
    assert found < delta + 3 * error
    # And not for want of a test: it nearly attains what one Gaussian loses.
    mu = np.linalg.norm(moved) * np.sqrt(rounds / least) / share
    exact = accountant.delta_of([Gaussian(1 / mu, 1)], epsilon)
    assert delta / 4 < exact < delta
    assert abs(found - exact) < 4 * error
    # One share missing is noticed.
    found, error = estimated(share, epsilon, least - 1, moved, rounds)
    assert found > delta + 5 * error
