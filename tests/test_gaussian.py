"""Rounded Gaussian noise: its distribution, and its exactness to the last of 191 bits.

The oracle is the series of the normal distribution (Abramowitz and Stegun, 26.2.11) in decimal
numbers of 150 digits, of which 58 cancel in the farthest tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal, localcontext

import mpmath
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedtools.privacy import gaussian
from fedtools.privacy.gaussian import rounded_gaussian
from fedtools.privacy.key import NoiseKey
from fedtools.privacy.noise import Stream, discrete_laplace

KEY = NoiseKey(bytes(range(32)))
DIGITS = 150
with mpmath.workdps(DIGITS):
    ROOT = Decimal(mpmath.nstr(mpmath.sqrt(2 * mpmath.pi), DIGITS))


def draw(deviation: float, size: int, name: str = "draw") -> np.ndarray:
    return rounded_gaussian(KEY.stream(name), deviation, size)


@pytest.fixture(autouse=True)
def digits():
    with localcontext() as context:
        context.prec = DIGITS
        yield


def density(z: Decimal) -> Decimal:
    return (-z * z / 2).exp() / ROOT


def upper(z: Decimal) -> Decimal:
    """Return P(|Z| > z)."""
    total, term, odd = Decimal(0), z, 1
    while term > Decimal(10) ** -DIGITS:
        total, odd = total + term, odd + 2
        term = term * z * z / odd
    return 1 - 2 * density(z) * total


def inverse(u: Decimal) -> Decimal:
    """Return z with P(|Z| > z) = u, by Newton's method."""
    z = Decimal(stats.norm.isf(float(u) / 2))
    for _ in range(3):
        moved = (upper(z) - u) / (2 * density(z))
        z += moved
    # The next step would be about the square of the last.
    assert abs(moved) < Decimal(10) ** -45
    return z


def rounded(u: Decimal, deviation: float) -> int:
    return int((Decimal(deviation) * inverse(u)).to_integral_value(ROUND_HALF_UP))


class Given(Stream):
    """A stream of given uniform numbers of 191 bits, and signs.

    Between any two is one whose first bits tell that its value is 0, so that no others are drawn.
    """

    def __init__(self, uniform: Sequence[int], signs: Sequence[int]):
        super().__init__(bytes(32))
        self.words = [
            word
            for one, sign in zip(uniform, signs, strict=True)
            for word in (2 * (one >> 128) + sign, 2 * (2**63 - 1))
        ]
        self.rest = [one % 2**128 for one in uniform]

    def take(self, label: bytes, number: int, size: int) -> bytes:
        assert number == 0
        if label == b"unif":
            raw = b"".join(word.to_bytes(8, "little") for word in self.words)
        else:
            raw = b"".join(rest.to_bytes(16, "big") for rest in self.rest)
        assert len(raw) == size, label
        return raw

    def values(self, deviation: float) -> list[int]:
        found = rounded_gaussian(self, deviation, len(self.words))
        assert not found[1::2].any()
        return found[::2].tolist()


def check_tie(deviation: float, steps: int) -> None:
    """Check the four numbers of 191 bits that are nearest to the tail at a half step.

    Other half steps must be farther away, as they are up to 14 deviations.
    """
    tie = upper((steps + Decimal("0.5")) / Decimal(deviation))
    last = int(tie * 2**191)
    uniform = range(last - 2, last + 2)
    expected = [steps + ((2 * one + 1) / Decimal(2**192) < tie) for one in uniform]
    for sign, factor in ((0, 1), (1, -1)):
        given = Given(uniform, [sign] * len(uniform))
        assert given.values(deviation) == [factor * one for one in expected]
    # Both sides of the tie are among the four.
    assert set(expected) == {steps, steps + 1}


# The middle of the distribution, and from 9.2 deviations on, heads whose 63 bits are all 0.
@pytest.mark.parametrize("z", [0.0, 0.001, 0.7, 3.1, 8.3, 9.4, 13.9])
@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.0**20 + 0.3, 2.0**27, 2.0**44])
def test_ties_are_decided_by_all_191_bits(deviation, z):
    check_tie(deviation, int(deviation * z))


@settings(max_examples=40, deadline=None)
@given(exponent=st.floats(-3, 43.9), z=st.floats(0, 13.9))
def test_any_tie_is_decided_by_all_191_bits(exponent, z):
    check_tie(2.0**exponent, int(2.0**exponent * z))


@pytest.mark.parametrize("deviation", [2.0**-10, 0.3, 1.0, 2.0**20 + 0.3, 2.0**44])
def test_farthest_values(deviation):
    """A head whose bits are all 0 has finite values, which its other bits decide."""
    uniform = [0, 1, 2**100 + 3, 2**128 - 1]
    expected = [rounded((2 * one + 1) / Decimal(2**192), deviation) for one in uniform]
    assert Given(uniform, [0] * 4).values(deviation) == expected
    assert expected[0] < 16.3 * deviation + 0.5
    # The largest of all numbers.
    assert gaussian._decide([2**191 - 1, *uniform], deviation) == [0, *expected]


@pytest.mark.parametrize("deviation", [1.0, 2.0**20 + 0.3, 2.0**44])
def test_values_are_exact(deviation):
    """Values lie between those of the least and the greatest rest of the bits, nearly always equal.

    Which coordinates draw a rest is not asked, so a value that is wrongly left to floats is found.
    """
    stream, size = KEY.stream("exact"), 70
    words = np.frombuffer(stream.take(b"unif", 0, 8 * size), "<u8").tolist()
    same = 0
    for word, value in zip(words, rounded_gaussian(stream, deviation, size).tolist(), strict=True):
        ends = (word >> 1) + Decimal(2) ** -129, (word >> 1) + 1 - Decimal(2) ** -129
        high, low = (rounded(end / 2**63, deviation) for end in ends)
        assert low <= value * (-1) ** (word & 1) <= high
        same += low == high
    assert same >= size - 1


def test_bound_on_float_errors():
    """The whole interval of the bits that are not drawn lies within the bound.

    It does so also if the error of ndtri should be the largest that the module assumes.
    """
    near = [1, 2, 3, 2**10, 2**52 + 1, 2**53 - 1, 2**62, 2**62 + 1, 2**63 - 2**10, 2**63 - 1]
    spread = (2.0 ** np.linspace(1, 63, 70, endpoint=False)).astype(np.uint64).tolist()
    heads = [*near, *spread, *np.random.default_rng(1).integers(1, 2**63, 30).tolist()]
    ends = []
    for head in heads:
        low = inverse((head + 1) / Decimal(2**63)) if head + 1 < 2**63 else Decimal(0)
        ends.append((low, inverse(head / Decimal(2**63))))
    for deviation in (2.0**-10, 0.7, 2.0**27, 2.0**44):
        found, error = gaussian._estimate(np.array(heads, np.uint64), deviation)
        for one, bound, (low, high) in zip(found.tolist(), error.tolist(), ends, strict=True):
            one, bound, scale = Decimal(one), Decimal(bound), Decimal(deviation)
            assert one - bound < scale * low * (1 - Decimal(2) ** -48)
            assert one + bound > scale * high * (1 + Decimal(2) ** -48)
        # It is not so wide that the exact path would be the usual one.
        usual = np.array(heads) > 2**55
        assert (error[usual] < 2.0**-43 * deviation).all()


def test_the_assumption_on_ndtri():
    """The module assumes a relative error below 2^-48; here it is below a third of that."""
    points = [*2.0 ** np.linspace(-65, -1, 150, endpoint=False), 0.5 - 2.0**-54, 0.5 - 2.0**-30]
    points += [*np.random.default_rng(2).random(60) / 2, np.exp(-2), np.nextafter(np.exp(-2), 1)]
    for point, found in zip(points, scipy.special.ndtri(points).tolist(), strict=True):
        exact = inverse(2 * Decimal(float(point)))
        assert abs(-Decimal(found) / exact - 1) < Decimal(2) ** -48 / 3, point


@pytest.mark.parametrize("change", [2.0**-49, -(2.0**-49)])
def test_last_digits_of_scipy_change_no_value(change, monkeypatch):
    deviation, size, exact = 2.0**38, 1 << 14, scipy.special.ndtri
    before, words = draw(deviation, size), KEY.stream("draw").take(b"unif", 0, 8 * size)
    monkeypatch.setattr(scipy.special, "ndtri", lambda x: exact(x) * (1 + change))
    assert np.array_equal(draw(deviation, size), before)
    # Without the exact path, they would.
    middle = ((np.frombuffer(words, "<u8") >> np.uint64(1)) + 0.5) * 2.0**-64
    assert (np.rint(-deviation * scipy.special.ndtri(middle)) != np.abs(before)).sum() > 3


def test_digits_of_mpmath_are_not_shared():
    values = draw(2.0**44, 60)
    with mpmath.workdps(3):
        assert np.array_equal(draw(2.0**44, 60), values)
        assert mpmath.mp.dps == 3


def fits(values: np.ndarray, deviation: float) -> float:
    """Return the p-value of rounded Gaussian values; cells beyond 20 expected ones are merged."""
    edge = 0
    while 2 * len(values) * stats.norm.sf((edge + 0.5) / deviation) > 40:
        edge += 1
    borders = np.r_[-np.inf, np.arange(-edge, edge) + 0.5, np.inf]
    expected = np.diff(stats.norm.cdf(borders / deviation)) * len(values)
    counts = np.bincount(np.clip(values, -edge, edge) + edge, minlength=2 * edge + 1)
    return stats.chisquare(counts, expected).pvalue


@pytest.mark.parametrize("deviation", [0.3, 1.0, 3.0])
def test_noise_has_its_distribution(deviation):
    assert fits(draw(deviation, 300000), deviation) > 1e-4
    # The test would detect two percent of deviation.
    assert fits(draw(deviation * 1.02, 300000), deviation) < 1e-4


def test_tiny_deviation_gives_zeros():
    # Half a step is 512 deviations.
    assert not draw(2.0**-10, 100000).any()


def squares(values: np.ndarray) -> float:
    """Return the two-sided p-value of a sum of squares of standard normal values."""
    total = (values**2).sum()
    return 2 * min(stats.chi2.cdf(total, len(values)), stats.chi2.sf(total, len(values)))


def test_large_noise_is_normal():
    size = 200000
    values = draw(2.0**27, size) / 2.0**27
    assert stats.kstest(values, "norm").pvalue > 1e-4
    assert abs(values.mean()) < 4 / np.sqrt(size)
    assert abs(values.var() - 1) < 4 * np.sqrt(2 / size)
    # The normal distribution's fourth moment is 3, and that of its square has variance 96.
    assert abs((values**4).mean() - 3) < 4 * np.sqrt(96 / size)
    # A fifth less noise would be noticed in one release of 1,000 coordinates.
    assert squares(values[:1000]) > 1e-4
    assert squares(0.8 * values[:1000]) < 1e-6


@pytest.mark.parametrize("deviation", [2.0**27, 2.0**35 + 0.1])
def test_low_bits_are_uniform(deviation):
    values = draw(deviation, 200000)
    for modulus in (2, 8, 10):
        assert stats.chisquare(np.bincount(values % modulus, minlength=modulus)).pvalue > 1e-4
    # The parity does not tell the sign, nor the size.
    even = values % 2 == 0
    table = [[(even & part).sum(), (~even & part).sum()] for part in (values > 0, values <= 0)]
    assert stats.chi2_contingency(table).pvalue > 1e-4
    assert stats.ks_2samp(np.abs(values[even]), np.abs(values[~even])).pvalue > 1e-4


def test_a_smaller_size_has_the_first_values():
    # A thousand of them go to the exact path.
    deviation, chunk = 2.0**38 + 0.5, gaussian._CHUNK
    whole = draw(deviation, 2 * chunk + 5)
    assert whole.dtype == np.int64
    for size in (0, 1, 1000, chunk - 1, chunk, chunk + 1, 2 * chunk):
        assert np.array_equal(draw(deviation, size), whole[:size])


def test_streams_and_chunks_have_no_correlation():
    chunk = gaussian._CHUNK
    size = 2 * chunk + 77
    one = draw(50.0, size)
    others = {
        "stream": draw(50.0, size, "other"),
        "key": rounded_gaussian(NoiseKey(bytes(32)).stream("draw"), 50.0, size),
        "the next value": np.roll(one, 1),
        "the next chunk": np.roll(one, chunk),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(size), name
        assert abs(np.corrcoef(np.abs(one), np.abs(other))[0, 1]) < 4 / np.sqrt(size), name
    # Nor do chunks share the bits that few values need, too few for a correlation.
    taken = []

    class Recorded(Stream):
        def take(self, label: bytes, number: int, size: int) -> bytes:
            taken.append((label, number))
            return super().take(label, number, size)

    rounded_gaussian(Recorded(bytes(32)), 50.0, size)
    assert len(set(taken)) == len(taken) == 6
    # Nor is Laplace noise correlated, should it be drawn from the same stream.
    laplace = discrete_laplace(KEY.stream("draw"), 50, size)
    assert abs(stats.spearmanr(one, laplace).statistic) < 4 / np.sqrt(size)


def test_noise_is_the_same_everywhere():
    # A change of these values would draw a second noise for resumed experiments.
    assert draw(5.5, 8).tolist() == [4, -2, 14, 3, 15, 2, 9, 2]
    assert draw(2.0**44, 2).tolist() == [13195134081606, -6951409710956]
    assert draw(5.5, 40000)[gaussian._CHUNK :][:8].tolist() == [-2, -3, 5, -9, 1, 0, -7, -2]


@pytest.mark.parametrize(
    "deviation", [0.0, -1.0, 2.0**-11, 2.0**44 * 1.001, float("inf"), float("nan")]
)
def test_deviations_out_of_range(deviation):
    with pytest.raises(ValueError, match="a deviation of"):
        draw(deviation, 1)
