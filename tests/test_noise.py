"""Noise of differential privacy: its distribution, its exactness, and its key."""

from __future__ import annotations

import os
import threading
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from fedtools.core.errors import UserError
from fedtools.privacy import noise
from fedtools.privacy.key import NoiseKey, key_path, make_key, open_key, read_key
from fedtools.privacy.options import Privacy
from fedtools.privacy.plan import Plan

KEY = NoiseKey(bytes(range(32)))


def plan_of(releases: int, **options) -> Plan:
    return Plan(Privacy(**{"mechanism": "laplace", **options}), releases, False)


def draw(scale: float, size: int, name: str = "draw") -> np.ndarray:
    return noise.discrete_laplace(KEY.stream(name), Fraction(scale), size)


def fits(values: np.ndarray, scale: float) -> float:
    """Return the p-value of discrete Laplace values; cells beyond 20 expected ones are merged."""
    edge = 0
    q = np.exp(-1 / scale)
    while len(values) * q ** (edge + 1) / (1 + q) > 20:
        edge += 1
    cells = np.arange(-edge, edge + 1)
    expected = (1 - q) / (1 + q) * q ** np.abs(cells)
    expected[[0, -1]] = q**edge / (1 + q)
    counts = np.bincount(np.clip(values, -edge, edge) + edge, minlength=len(cells))
    return stats.chisquare(counts, expected * len(values)).pvalue


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.5, 40.0])
def test_noise_has_its_distribution(scale):
    assert fits(draw(scale, 300000), scale) > 1e-3
    # The test would detect half a percent of scale.
    assert fits(draw(scale * 1.03, 300000), scale) < 1e-3


@pytest.mark.parametrize("epsilon", [0.1, 2.0])
@pytest.mark.parametrize("cap", [1.0, 20.0, 0.3])
def test_noise_of_a_release_has_mean_and_variance_of_theory(epsilon, cap):
    plan = plan_of(10, release="cumulative", epsilon=epsilon, cap=cap)
    noisy = plan.release(np.zeros(200000), KEY, experiment="e", number=3, sender="")
    scale = 10 * cap / epsilon
    assert plan.scale == pytest.approx(scale, rel=1e-6)
    assert abs(noisy.mean()) < 4 * np.sqrt(2) * scale / np.sqrt(len(noisy))
    # The variance of a variance: the kurtosis of Laplace's distribution is 6.
    assert abs(noisy.var() / (2 * scale**2) - 1) < 4 * np.sqrt(5 / len(noisy))
    assert stats.kstest(noisy, "laplace", (0, scale)).pvalue > 1e-3


def test_noise_is_opendps():
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l1_distance(T="i64")
    for scale in (1.5, 12.0):
        theirs = np.array(dp.m.make_laplace(*space, scale=scale)([0] * 100000))
        ours = draw(scale, 100000)
        low, high = np.quantile(theirs, [0.001, 0.999]).astype(int)
        cells = [np.bincount(np.clip(v, low, high) - low) for v in (ours, theirs)]
        # Theirs cannot be seeded: a false alarm in a million runs.
        assert stats.chi2_contingency(cells).pvalue > 1e-6
    # Their accountant's epsilon for our scale and sensitivity, in steps, equals ours.
    for options in ({}, {"release": "cumulative"}, {"unit": "user", "cap": 300.0}):
        plan = plan_of(7, epsilon=0.4, **options)
        theirs = dp.m.make_laplace(*space, scale=float(plan.scale_steps)).map(plan.steps)
        assert theirs * plan.joint == pytest.approx(0.4, rel=1e-9)
        assert theirs * plan.joint >= 0.4


def test_coins_make_the_distribution_to_the_last_digit():
    """P(X = x) from the coins' own probabilities equals its formula in 60 digits."""
    mpmath.mp.dps = 60
    for scale in (Fraction(1, 3), Fraction(7), Fraction(2**36)):
        coins = [mpmath.mpf(coin) / 2**136 for coin in noise._coins(scale)]
        q = mpmath.exp(-mpmath.mpf(scale.denominator) / scale.numerator)
        for x in (0, 1, 2, 3, 17, 1000, 2**20 + 5, 2**38 - 1):
            if x and not (x - 1) >> (len(coins) - 1):
                found = coins[0] / 2
                for place, coin in enumerate(coins[1:]):
                    found *= coin if (x - 1) >> place & 1 else 1 - coin
            else:
                found = 0 if x else 1 - coins[0]
            assert abs(found - (1 - q) / (1 + q) * q**x) < mpmath.mpf(2) ** -129


def test_ties_are_decided_by_all_136_bits():
    """Tosses equal comparisons of whole numbers, also when nearly all bytes of a coin are tied."""
    half = 1 << 135
    coins = (half, half + 3, half + (5 << 64), (7 << 128) + 1, (1 << 136) - 1, 0)
    tails = [0, 1, 2, 3, 4, (5 << 64) - 1, 5 << 64, (5 << 64) + 1, (1 << 128) - 2, (1 << 128) - 1]

    class Tails(noise.Stream):
        def take(self, label: bytes, number: int, size: int) -> bytes:
            assert label == b"tail"
            raw = b"".join(tail.to_bytes(16, "big") for tail in tails) * len(coins)
            assert len(raw) == size
            return raw

    planes = np.array([[coin >> 128] * len(tails) for coin in coins], np.uint8)
    tossed = noise._toss(Tails(bytes(32)), 0, planes, coins)
    for one, coin in zip(tossed, coins, strict=True):
        assert one.tolist() == [((coin >> 128) << 128) + tail < coin for tail in tails]


def test_noise_of_words_rounds_and_chunks_has_no_correlation():
    plan = plan_of(1)
    size = 2 * noise._CHUNK + 77
    zero = np.zeros(size)
    one = plan.release(zero, KEY, experiment="e", number=1, sender="")
    others = {
        "round": plan.release(zero, KEY, experiment="e", number=2, sender=""),
        "client": plan.release(zero, KEY, experiment="e", number=1, sender="c"),
        "experiment": plan.release(zero, KEY, experiment="f", number=1, sender=""),
        "key": plan.release(zero, NoiseKey(bytes(32)), experiment="e", number=1, sender=""),
        "epsilon": plan_of(1, epsilon=1.1).release(zero, KEY, experiment="e", number=1, sender=""),
        "the next word": np.roll(one, 1),
        "the next chunk": np.roll(one, noise._CHUNK),
    }
    for name, other in others.items():
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(size), name
    again = plan.release(zero, NoiseKey(bytes(range(32))), experiment="e", number=1, sender="")
    assert np.array_equal(one, again)


def test_other_counts_never_meet_the_same_noise():
    """Otherwise the difference of two releases, as of a rerun on other data, would reveal them."""
    plan = plan_of(1)
    counts = np.zeros(2000), np.r_[1.0, np.zeros(1999)]
    one, two = (plan.release(c, KEY, experiment="e", number=1, sender="") for c in counts)
    assert (one[1:] == two[1:]).mean() < 0.01
    # Another epsilon must not scale the same noise either.
    finer = plan_of(1, epsilon=2.0).release(counts[0], KEY, experiment="e", number=1, sender="")
    assert abs(np.corrcoef(np.sign(one), np.sign(finer))[0, 1]) < 0.1


def test_noise_is_the_same_everywhere():
    # A change of these values would draw a second noise for resumed experiments.
    assert draw(5.5, 8).tolist() == [1, 5, 6, -3, 1, -3, 5, 0]
    assert draw(5.5, 50000)[noise._CHUNK :][:8].tolist() == [12, -4, 11, -3, 2, -7, 3, 2]


# Keys.


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Make an experiment, and separate user settings."""
    (tmp_path / "exp").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delenv("FEDTOOLS_NOISE_KEY", raising=False)
    return tmp_path


def test_a_key_is_made_once_for_its_owner_alone(home):
    old = os.umask(0)
    try:
        key = open_key(home / "exp")
    finally:
        os.umask(old)
    path = home / "settings/fedtools/noise.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert open_key(home / "exp").name == key.name
    secret = path.read_text().strip()
    assert len(bytes.fromhex(secret)) == 32
    # The secret is neither in the experiment, nor in tracebacks or logs.
    left = "".join(one.read_text() for one in (home / "exp").iterdir())
    assert key.name in left
    for text in (left, repr(key), str(vars(KEY.stream("a")))):
        assert secret not in text and secret[:16] not in text


def test_of_several_jobs_one_makes_the_key(home):
    path, names = home / "a/key", []
    jobs = [
        threading.Thread(target=lambda: (make_key(path), names.append(read_key(path).name)))
        for _ in range(8)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(names) == 8 and len(set(names)) == 1
    # No half a key is left beside it.
    assert {one.name for one in path.parent.iterdir()} <= {"key", ".locks"}


def test_where_the_key_is(home, monkeypatch):
    settings = home / "settings/fedtools/noise.key"
    assert key_path() == settings
    monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(home / "variable"))
    assert key_path() == home / "variable"
    assert key_path(home / "option") == home / "option"
    open_key(home / "exp", home / "option")
    assert (home / "option").exists() and not (home / "variable").exists()
    monkeypatch.delenv("FEDTOOLS_NOISE_KEY")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(home))
    assert key_path() == home / ".config/fedtools/noise.key"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_key_that_others_can_read_or_write_is_refused(home, mode):
    path = home / "key"
    make_key(path)
    path.chmod(mode)
    with pytest.raises(UserError, match=rf"other users can access.*{mode:o}.*chmod 600 {path}"):
        open_key(home / "exp", path)


def test_a_key_inside_the_experiment_is_refused(home):
    inside = home / "exp/clients/key"
    (home / "link").symlink_to(home / "exp")
    for path in (inside, home / "link/key", home / "exp/../exp/key"):
        with pytest.raises(UserError, match=r"inside the exp.*method_conf.noise_key or \$FEDT"):
            open_key(home / "exp", path)
    with pytest.raises(UserError, match="inside the experiment"):
        open_key(home / "link", home / "exp/key")
    assert list((home / "exp").iterdir()) == []
    # A path outside must not lead to a key inside either.
    make_key(home / "exp/key")
    (home / "key").symlink_to(home / "exp/key")
    with pytest.raises(UserError, match="inside the experiment"):
        open_key(home / "exp", home / "key")


def test_an_experiment_keeps_its_key(home):
    """With another key, a rerun would release the same counts under a second noise."""
    open_key(home / "exp", home / "one")
    make_key(home / "two")
    with pytest.raises(UserError, match=r"not the noise key that .*exp began with"):
        open_key(home / "exp", home / "two")
    # A missing key is not replaced.
    (home / "one").unlink()
    with pytest.raises(UserError, match="put the noise key back"):
        open_key(home / "exp", home / "one")
    assert not (home / "one").exists()


@pytest.mark.parametrize(
    "text",
    ["", "00" * 31, "hunter2", "é" * 64, "0" * 2000],
    ids=["empty", "short", "word", "no hex", "long"],
)
def test_what_is_no_key(home, text):
    path = home / "key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UserError) as said:
        open_key(home / "exp", path)
    assert str(path) in str(said.value) and "hunter2" not in str(said.value)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="not a regular file"):
        open_key(home / "exp", path)


def test_a_key_of_another_user_is_refused(home, monkeypatch):
    make_key(home / "key")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(UserError, match="another user's"):
        open_key(home / "exp", home / "key")


def test_parts_of_a_purpose_are_not_mixed_up():
    array = np.arange(3)
    texts = [("ab",), ("asb",), ("a", "b"), ("b", "a"), ("a", "b", "")]
    parts = [*texts, (1,), ("1",), (b"1",), (array,), (array.tobytes(),), (array[:2],), ()]
    seen = {KEY.stream(*one).take(b"head", 0, 16) for one in parts}
    stream = KEY.stream()
    seen |= {stream.take(b"tail", 0, 16), stream.take(b"head", 1, 16)}
    assert len(seen) == len(parts) + 2
    with pytest.raises(TypeError):
        KEY.stream(1.0)
