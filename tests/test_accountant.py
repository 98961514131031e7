"""Epsilon of Gaussian noise: against 50 digits, convolutions, integrals, bounds and simulations."""

from __future__ import annotations

import ast
import re
import sys
import time
from dataclasses import replace
from decimal import Decimal
from importlib.util import find_spec

import mpmath
import numpy as np
import pytest
from conftest import ROOT, run
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from scipy.integrate import quad
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr
from scipy.stats import binom, norm

from fedtools.core.errors import INSTALL_PRIVACY, UserError
from fedtools.privacy.accountant import (
    Gaussian,
    accountant_of,
    delta_of,
    epsilon_of,
    noise_for,
)

WHY = "dp-accounting is not installed (pip install '.[privacy]')"
needs_dp_accounting = pytest.mark.skipif(find_spec("dp_accounting") is None, reason=WHY)

# 64 of 1398 clients in a round.
SHARE = 64 / 1398
# A secret sample, with little, some and much noise; a large share; a person of three clients.
SAMPLED = [
    Gaussian(0.6, 150, SHARE),
    Gaussian(1.0, 150, SHARE),
    Gaussian(2.0, 150, SHARE),
    Gaussian(3.0, 20, 0.9),
]
PERSON = Gaussian(3.0, 10, 0.4, clients=3)
ALL = [Gaussian(3.0, 20), Gaussian(1.0, 1), Gaussian(20.0, 150, clients=2)]


def balle_wang(mu: float, epsilon: float) -> mpmath.mpf:
    """Return theorem 8's delta, in 50 digits after what cancels."""
    with mpmath.workdps(60 + int(epsilon)):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
        first = mpmath.ncdf(mu / 2 - epsilon / mu)
        return first - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


class Convolved:
    """An accountant: losses of all rounds on a grid, whose transforms are multiplied.

    Args:
        mechanisms: releases; several clients of a person are a binomial mixture.
        step: of the grid of losses, to whose points they are rounded.
    """

    def __init__(self, mechanisms: list[Gaussian], step: float = 1e-3, points: int = 1 << 16):
        ways = [self.ways(one) for one in mechanisms]
        self.both = []
        for each in zip(*ways, strict=True):
            total, product = 0.0, np.ones(points // 2 + 1, complex)
            for one, (losses, mass) in zip(mechanisms, each, strict=True):
                total += one.rounds * (losses @ mass)
                index = np.rint(losses / step).astype(int) % points
                product *= np.fft.rfft(np.bincount(index, mass, points)) ** one.rounds
            # Losses come back modulo the grid's length, and are within half of it of their mean.
            places = np.arange(points) - points // 2 + round(total / step)
            self.both.append((places * step, np.fft.irfft(product, points)[places % points]))

    @staticmethod
    def ways(one: Gaussian) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the losses and their probabilities of removing and of adding the person."""
        numbers = np.arange(one.clients + 1)
        chances = binom.pmf(numbers, one.clients, one.share)
        edges = np.linspace(-10 * one.noise, one.clients + 10 * one.noise, 40001)
        x = (edges[1:] + edges[:-1])[:, None] / 2
        with np.errstate(divide="ignore"):
            powers = np.log(chances) + (2 * x - numbers) * numbers / (2 * one.noise**2)
        loss = logsumexp(powers, 1)
        absent = np.diff(ndtr(edges / one.noise))
        present = np.diff(ndtr((edges[:, None] - numbers) / one.noise) @ chances)
        return [(loss, present), (-loss, absent)]

    def delta(self, epsilon: float) -> float:
        return max(
            float(mass[losses > epsilon] @ -np.expm1(epsilon - losses[losses > epsilon]))
            for losses, mass in self.both
        )

    def epsilon(self, delta: float) -> float:
        low, high = 0.0, 2000.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle) > delta else (low, middle)
        return high


def renyi(mechanisms: list[Gaussian], delta: float) -> float:
    """Return a bound: Renyi divergences of whole orders, and the conversion of epsilon.

    Mironov, Talwar and Zhang, Renyi differential privacy of the sampled Gaussian mechanism, 2019,
    section 3.3; Canonne, Kamath and Steinke, The discrete Gaussian, 2020, proposition 12.
    """
    found = []
    for order in (*range(2, 65), 96, 128, 192):
        k = np.arange(order + 1)
        binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        total = 0.0
        for one in mechanisms:
            if one.share == 1:
                total += order * one.rounds * (one.clients / one.noise) ** 2 / 2
                continue
            chance = k * np.log(one.share) + (order - k) * np.log1p(-one.share)
            moment = logsumexp(binomial + chance + (k * k - k) / (2 * one.noise**2))
            total += one.rounds * moment / (order - 1)
        more = np.log1p(-1 / order) - (np.log(delta) + np.log(order)) / (order - 1)
        found.append(total + more)
    return min(found)


# ------------------------------------------------------------------------- everybody takes part


@pytest.mark.parametrize("rounds", [1, 150, 10000])
@pytest.mark.parametrize("noise", [0.05, 0.7, 30.0, 2000.0])
@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-12])
def test_epsilon_is_that_of_50_digits(noise, rounds, delta):
    one = Gaussian(noise, rounds)
    mu = mpmath.sqrt(rounds) / mpmath.mpf(noise)
    epsilon = epsilon_of([one], delta)
    if not epsilon:
        assert balle_wang(mu, 0) <= delta * (1 + 1e-9)
        return
    if epsilon < 3000:
        assert balle_wang(mu, epsilon * (1 - 1e-9)) > delta > balle_wang(mu, epsilon * (1 + 1e-9))
        assert delta_of([one], epsilon) == pytest.approx(delta, rel=1e-9)
    else:
        # Here epsilon is mu^2 / 2 + t mu, where t is the quantile of about delta.
        assert epsilon == pytest.approx(float(mu**2 / 2 - norm.ppf(delta) * mu), rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("mu", [1e-3, 0.2, 1.0, 7.0, 40.0, 60.0])
def test_delta_is_that_of_50_digits(mu, epsilon):
    exact = balle_wang(mu, epsilon)
    if exact > 1e-12:
        assert delta_of([Gaussian(1 / mu, 1)], epsilon) == pytest.approx(float(exact), rel=1e-9)
    else:
        assert delta_of([Gaussian(1 / mu, 1)], epsilon) <= 1e-12


def test_extreme_values_neither_overflow_nor_cancel():
    """Epsilons about 1000, at a delta of 1e-12, and much noise."""
    exact = balle_wang(38.5, 1000)
    assert 1e-12 < exact < 1e-9
    assert delta_of([Gaussian(1 / 38.5, 1)], 1000) == pytest.approx(float(exact), rel=1e-9)
    assert delta_of([Gaussian(1e-6, 1)], 1000) == 1
    assert delta_of([Gaussian(1e9, 1)], 1) == epsilon_of([Gaussian(1e9, 1)], 1e-5) == 0
    assert delta_of([], 1) == epsilon_of([], 1e-5) == 0


@pytest.mark.parametrize("rounds", [1, 150])
def test_known_costs_of_persons_and_repeats(rounds):
    """Figures of a derivation apart from this code, in the digits that were given."""
    eight, one = (Gaussian(noise_for(epsilon, 1e-5, rounds), rounds) for epsilon in (8, 1))
    assert epsilon_of([replace(eight, clients=2)], 1e-5) == pytest.approx(19.1, abs=0.05)
    assert epsilon_of([replace(one, clients=2)], 1e-5) == pytest.approx(2.15, abs=0.005)
    assert epsilon_of([eight] * 3, 1e-5) == pytest.approx(15.9, abs=0.05)
    assert epsilon_of([eight] * 2, 1e-5) == pytest.approx(12.3, abs=0.05)


def test_two_unequal_experiments_are_an_integral():
    """Delta of both is the mean of the second's delta at what the first's loss leaves."""
    first, second = Gaussian(2.5, 2), Gaussian(1.5, 3)
    mu, other = 2**0.5 / 2.5, 3**0.5 / 1.5

    def at(loss: float) -> float:
        left = 0.9 - loss
        rest = ndtr(other / 2 - left / other)
        rest -= np.exp(left + log_ndtr(-other / 2 - left / other))
        return norm.pdf(loss, mu**2 / 2, mu) * rest

    integral = quad(at, mu**2 / 2 - 12 * mu, mu**2 / 2 + 12 * mu, epsabs=1e-13, limit=200)[0]
    assert integral > 0.1
    assert delta_of([first, second], 0.9) == pytest.approx(integral, rel=1e-8)


# ------------------------------------------------------------------------- both ways


@pytest.mark.parametrize(
    "one", [*ALL, *(pytest.param(p, marks=needs_dp_accounting) for p in [*SAMPLED, PERSON])]
)
def test_epsilon_is_that_of_a_convolution(one):
    delta = 1e-5
    if one.share == 1:
        # Rounds of all clients, one by one: nothing of the closed form is in it.
        one = replace(one, noise=one.noise / one.clients, clients=1)
    theirs = Convolved([one])
    epsilon = epsilon_of([one], delta)
    assert epsilon == pytest.approx(theirs.epsilon(delta), rel=1e-3)
    assert epsilon > (1 - 1e-4) * theirs.epsilon(delta)
    assert delta_of([one], epsilon) == pytest.approx(delta, rel=1e-3)
    assert delta_of([one], epsilon / 2) == pytest.approx(theirs.delta(epsilon / 2), rel=5e-3)


@needs_dp_accounting
def test_a_person_in_a_sample_costs_less_than_any_group():
    """Vadhan's lemma 2.2: a step for each client, whose deltas grow, at three times epsilon."""
    one = replace(PERSON, clients=1)
    # Epsilon of one client at the delta that makes 1e-5 for three.
    low, high = 0.0, 30.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        enough = np.exp(middle * np.arange(3)).sum() * delta_of([one], middle) <= 1e-5
        low, high = (low, middle) if enough else (middle, high)
    assert 2 * epsilon_of([one], 1e-5) < epsilon_of([PERSON], 1e-5) < 3 * high
    assert epsilon_of([PERSON], 1e-5) < epsilon_of([replace(PERSON, share=1)], 1e-5)


@pytest.mark.parametrize(
    "several",
    [
        *([one] for one in ALL),
        *(pytest.param([one], marks=needs_dp_accounting) for one in SAMPLED),
        pytest.param([SAMPLED[1], ALL[0], SAMPLED[0]], marks=needs_dp_accounting),
    ],
)
def test_renyi_differential_privacy_is_a_bound_above(several):
    for delta in (1e-3, 1e-8):
        bound, epsilon = renyi(several, delta), epsilon_of(several, delta)
        assert epsilon < bound < 1.35 * epsilon


@needs_dp_accounting
def test_epsilon_of_unequal_experiments_is_that_of_a_convolution():
    """A sample, everybody, another sample, and everybody again."""
    several = [Gaussian(1.5, 40, 0.1), Gaussian(5.0, 10), SAMPLED[3], Gaussian(8.0, 20)]
    theirs = Convolved(several)
    assert epsilon_of(several, 1e-5) == pytest.approx(theirs.epsilon(1e-5), rel=1e-3)
    assert epsilon_of(several[::-1], 1e-5) == pytest.approx(theirs.epsilon(1e-5), rel=1e-3)


@needs_dp_accounting
@pytest.mark.parametrize("epsilon", [0.2, 2.0])
def test_a_sample_and_everybody_are_an_integral(epsilon):
    """One round of each: the mean over the sample's sum of what is left for the other."""
    sample, everybody = Gaussian(0.8, 1, 0.3), Gaussian(1.25, 1)
    mu = 1 / 1.25

    def delta(remove: bool) -> float:
        def at(x: float) -> float:
            loss = np.log1p(0.3 * np.expm1((2 * x - 1) / (2 * 0.8**2)))
            density = norm.pdf(x, 0, 0.8) * np.exp(loss if remove else 0)
            left = epsilon - (loss if remove else -loss)
            rest = ndtr(mu / 2 - left / mu) - np.exp(left + log_ndtr(-mu / 2 - left / mu))
            return density * rest

        return quad(at, -9, 10, epsabs=1e-13, limit=400, points=(-1, 0, 1, 2))[0]

    exact = max(delta(True), delta(False))
    assert exact > 1e-3
    assert delta_of([sample, everybody], epsilon) == pytest.approx(exact, rel=1e-3)


@needs_dp_accounting
def test_extreme_values_of_a_sample_have_bounds():
    """Where exp(epsilon) is no number, and where delta is less than rounding errors."""
    one = Gaussian(0.3, 115, 0.9)
    exact = Convolved([one], 1e-2, 1 << 17).epsilon(1e-5)
    assert 700 < exact < 740
    assert epsilon_of([one], 1e-5) == pytest.approx(exact, rel=1e-4)
    assert delta_of([SAMPLED[3]], 60) == 1e-12


# ------------------------------------------------------------------------- properties

NOISE = st.floats(-2, 5).map(np.exp).map(float)
ROUNDS = st.integers(1, 5000)
DELTA = st.floats(-12, -0.3).map(lambda power: 10.0**power)


@given(NOISE, ROUNDS, DELTA, st.floats(1.001, 3), st.integers(1, 50))
@settings(max_examples=60)
def test_epsilon_is_monotone(noise, rounds, delta, more, extra):
    one = Gaussian(noise, rounds)
    epsilon = epsilon_of([one], delta)
    others = {
        "less noise": [replace(one, noise=noise / more)],
        "more rounds": [replace(one, rounds=rounds + extra)],
        "more experiments": [one, Gaussian(noise * more, extra)],
        "more clients": [replace(one, clients=2)],
    }
    for name, changed in others.items():
        larger = epsilon_of(changed, delta)
        assert larger > epsilon or not epsilon, name
        assert larger >= epsilon, name
    assert epsilon_of([one], delta / more) >= epsilon


@needs_dp_accounting
@given(
    *(st.floats(1, 3), st.integers(2, 40), st.floats(0.1, 0.6)),
    *(st.sampled_from([1e-3, 1e-6, 1e-10]), st.floats(1.01, 1.5)),
)
@settings(max_examples=3)
def test_epsilon_of_a_sample_is_monotone(noise, rounds, share, delta, more):
    one = Gaussian(noise, rounds, share)
    epsilon = epsilon_of([one], delta)
    assert epsilon > 0
    assert epsilon_of([replace(one, noise=noise / more)], delta) > epsilon
    assert epsilon_of([replace(one, rounds=rounds + 1)], delta) > epsilon
    assert epsilon_of([replace(one, share=share * more)], delta) > epsilon
    assert epsilon_of([one, Gaussian(noise * 5, rounds)], delta) > epsilon
    assert epsilon_of([replace(one, share=1)], delta) > epsilon


def one_less(noise: float) -> float:
    """Return the number of five digits before a noise multiplier, which has five digits."""
    sign, digits, exponent = Decimal(repr(noise)).normalize().as_tuple()
    assert not sign
    assert len(digits) <= 5, noise
    number = int("".join(map(str, digits))) * 10 ** (5 - len(digits))
    exponent -= 5 - len(digits)
    # Below a power of ten, digits are finer.
    number, exponent = (100000, exponent - 1) if number == 10000 else (number, exponent)
    return float(f"{number - 1}e{exponent}")


@given(st.floats(-6, 6).map(np.exp).map(float), ROUNDS, DELTA, st.booleans())
@settings(max_examples=40)
def test_noise_is_the_least_of_five_digits(epsilon, rounds, delta, spent):
    already = [Gaussian(noise_for(epsilon * 0.6, delta, 7), 7)] if spent else []
    noise = noise_for(epsilon, delta, rounds, already=already)
    assert epsilon_of([*already, Gaussian(noise, rounds)], delta) <= epsilon
    assert epsilon_of([*already, Gaussian(one_less(noise), rounds)], delta) > epsilon
    assert epsilon_of([*already, Gaussian(0.999 * noise, rounds)], delta) > epsilon


@needs_dp_accounting
@pytest.mark.parametrize(
    ("epsilon", "rounds", "share", "already"),
    [
        (1.0, 150, SHARE, []),
        (4.0, 20, 0.3, [Gaussian(3.0, 30, 0.2), Gaussian(10.0, 5)]),
        (3.0, 10, 1.0, [Gaussian(3.0, 50, 0.2)]),
    ],
)
def test_noise_of_a_sample_is_the_least_of_five_digits(epsilon, rounds, share, already):
    begun = time.process_time()
    noise = noise_for(epsilon, 1e-5, rounds, share, already)
    # It takes 1 or 2 s; the rest is for a busy machine.
    assert time.process_time() - begun < 10
    assert epsilon_of([*already, Gaussian(noise, rounds, share)], 1e-5) <= epsilon
    assert epsilon_of([*already, Gaussian(one_less(noise), rounds, share)], 1e-5) > epsilon
    assert epsilon_of([*already, Gaussian(0.999 * noise, rounds, share)], 1e-5) > epsilon


# ------------------------------------------------------------------------- simulation


def estimated(noise: float, one: Gaussian, epsilon: float) -> tuple[float, float]:
    """Return delta and its standard error, of sums that were drawn with and without a client.

    A reader knows all other clients, subtracts them, and applies the best test: a threshold on the
    likelihood ratio of all rounds together. The largest norm of a vector is 1.
    """
    generator = np.random.default_rng(7)
    draws = 200000
    exceed = []
    for sends in (1.0, 0.0):
        loss = np.zeros(draws)
        for _ in range(one.rounds):
            joined = generator.random(draws) < one.share
            own = joined * sends + generator.normal(0, noise, draws)
            loss += np.log1p(one.share * np.expm1((2 * own - 1) / (2 * noise**2)))
        exceed.append((loss > epsilon).mean())
    (present, absent), factor = exceed, np.exp(epsilon)
    variance = present * (1 - present) + factor**2 * absent * (1 - absent)
    return present - factor * absent, np.sqrt(variance / draws)


@pytest.mark.parametrize("share", [1.0, pytest.param(0.3, marks=needs_dp_accounting)])
def test_drawn_sums_have_the_delta_that_was_asked_for(share):
    rounds, epsilon, delta = 3, 1.0, 0.05
    noise = noise_for(epsilon, delta, rounds, share)
    one = Gaussian(noise, rounds, share)
    found, error = estimated(noise, one, epsilon)
    assert error < 0.002
    assert abs(found - delta) < 4 * error
    # Noise of four fifths is noticed.
    found, error = estimated(0.8 * noise, one, epsilon)
    assert found > delta + 8 * error


# ------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"noise": 0.0}, "noise multiplier of 0"),
        ({"noise": -1.0}, "noise multiplier"),
        ({"noise": float("nan")}, "noise multiplier of nan"),
        ({"noise": float("inf")}, "noise multiplier of inf"),
        ({"rounds": 0}, "0 rounds"),
        ({"clients": 0}, "0 clients"),
        ({"share": 0.0}, "share of 0"),
        ({"share": 1.1}, "share of 1.1"),
        ({"share": float("nan")}, "share of nan"),
    ],
)
def test_values_out_of_range_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(Gaussian(1.0, 1), **changed)


def test_epsilon_and_delta_out_of_range_are_refused():
    one = [Gaussian(1.0, 1)]
    for delta in (0.0, 1.0, -1e-5, float("nan")):
        with pytest.raises(ValueError, match="a delta of"):
            epsilon_of(one, delta)
        with pytest.raises(ValueError, match="a delta of"):
            noise_for(1.0, delta, 10)
    for epsilon in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="an epsilon of"):
            delta_of(one, epsilon)
        with pytest.raises(ValueError, match="an epsilon of"):
            noise_for(epsilon, 1e-5, 10)
    with pytest.raises(ValueError, match="an epsilon of 0"):
        noise_for(0, 1e-5, 10)
    with pytest.raises(ValueError, match="a delta of 1e-13"):
        epsilon_of([Gaussian(1.0, 1, 0.5)], 1e-13)
    assert epsilon_of(one, 1e-13) > 0
    with pytest.raises(ValueError, match="0 rounds"):
        noise_for(1.0, 1e-5, 0)


def test_what_is_spent_and_left_is_told():
    spent = [Gaussian(noise_for(2.0, 1e-5, 30), 30)]
    with pytest.raises(UserError, match=r"spent epsilon 1\.9999\d of 1 .* left, 0, .* 40 rounds"):
        noise_for(1.0, 1e-5, 40, already=spent)
    # So little is left that no noise within reason keeps it.
    total = epsilon_of(spent, 1e-5) * (1 + 1e-14)
    with pytest.raises(UserError, match=r"left, \d\.?\d*e-1\d, is too little .* larger epsilon"):
        noise_for(total, 1e-5, 40, already=spent)
    assert noise_for(2.1, 1e-5, 40, already=spent) > noise_for(2.1, 1e-5, 40)


def test_without_dp_accounting_it_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    # As in no other test: distributions are kept.
    sampled = [Gaussian(1.2345, 3, 0.12345)]
    calls = (
        lambda: epsilon_of(sampled, 1e-5),
        lambda: delta_of(sampled, 1.0),
        lambda: noise_for(1.0, 1e-5, 3, 0.12345),
        lambda: accountant_of(sampled),
    )
    for call in calls:
        with pytest.raises(UserError, match=r"needs dp-accounting; .*\.\[privacy\]") as error:
            call()
        assert "\n" not in str(error.value)
    everybody = [Gaussian(1.2345, 3)]
    assert delta_of(everybody, epsilon_of(everybody, 1e-5)) == pytest.approx(1e-5)
    assert accountant_of(everybody) == "closed form of Gaussian noise (Balle and Wang, 2018)"


def test_what_is_to_be_installed_is_the_extra_that_is_tested():
    """One range in the message and in setup.py, which has the pinned version."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "extras_require":
            extras = ast.literal_eval(node.value)
    (needed,) = extras["privacy"]
    assert f"pip install '{needed}'" in INSTALL_PRIVACY
    assert needed in extras["test"]
    pins = (ROOT / "tests/requirements.txt").read_text()
    pinned = re.search(r"^dp-accounting==(.+)$", pins, re.MULTILINE)[1]
    assert Requirement(needed).specifier.contains(pinned)


@needs_dp_accounting
def test_the_accountant_has_its_version():
    found = accountant_of([Gaussian(1.0, 1), Gaussian(1.0, 1, 0.5)])
    assert re.fullmatch(r"privacy loss distributions, dp-accounting 0\.6\.\d+", found)


def test_the_module_is_imported_without_heavy_packages():
    line = "import sys, fedtools.privacy.accountant; print(sorted(sys.modules))"
    loaded = ast.literal_eval(run(sys.executable, "-c", line, cold=True).ok().out)
    assert not {"torch", "scipy", "numpy", "dp_accounting"} & set(loaded)
