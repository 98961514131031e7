"""Time shifts and noise: random draws, and their application."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from augmented import SAMPLES, by_hand
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.audio.augment import Augment, Plan, apply, plan
from fedtools.core.config import from_mapping
from fedtools.core.errors import UserError

NOISE = 100_000
OFF = Augment(0, 0.0, 0.0)
FIELDS = [field.name for field in dataclasses.fields(Plan)]
SIZE = st.integers(1, 80)
STEPS = st.integers(0, 12)
BATCH = st.integers(1, 40)


def same(one: Plan, two: Plan, *fields: str) -> bool:
    return all(np.array_equal(getattr(one, f), getattr(two, f)) for f in fields or FIELDS)


@given(SIZE, STEPS, BATCH, st.integers(0, 5))
def test_clips_run_through_shuffles_without_a_clip_twice_in_a_batch(size, steps, batch, seed):
    drawn = plan(seed, 1, "c", size, steps, batch, NOISE, Augment())
    width = min(size, batch)
    for field in FIELDS:
        assert getattr(drawn, field).shape == (steps, width)
    for row in drawn.clips:
        assert len(set(row)) == width
    # Each pass is a permutation: no clip is ever two uses ahead of another.
    stream = drawn.clips.reshape(-1).tolist()
    for begin in range(0, len(stream), size):
        part = stream[begin : begin + size]
        assert len(set(part)) == len(part) and all(0 <= clip < size for clip in part)


@given(SIZE, st.integers(1, 12), BATCH)
def test_a_plan_is_a_function_of_its_key(size, steps, batch):
    key = (3, 7, "client", size, steps, batch, NOISE, Augment())
    first = plan(*key)
    np.random.default_rng().random(100)
    plan(3, 7, "another", size, steps, batch, NOISE, Augment())
    assert same(plan(*key), first)
    for other in [(4, 7, "client"), (3, 8, "client"), (3, 7, "another")]:
        assert not same(plan(*other, *key[3:]), first, "shift", "noise_start", "volume")


def test_batches_are_random_even_across_shuffles():
    """Over many rounds, all clips and all pairs of clips are equally frequent in batches."""
    uses = np.zeros((4, 5))
    pairs: Counter[tuple[int, ...]] = Counter()
    for round in range(3000):
        clips = plan(0, round, "c", 5, 4, 3, 0, OFF).clips
        for step, row in enumerate(clips):
            uses[step, row] += 1
            pairs[tuple(sorted(row))] += 1
    # 3000 draws of 3 in 5: 1800 +- 27.
    assert np.abs(uses - 1800).max() < 140
    # Ten sets of three, 12000 batches: 1200 +- 33.
    assert len(pairs) == 10 and max(abs(n - 1200) for n in pairs.values()) < 160


def test_the_draws_are_googles():
    drawn = plan(0, 1, "c", 50, 1000, 32, NOISE, Augment())
    count = drawn.shift.size
    assert drawn.shift.min() == -1600 and drawn.shift.max() == 1600
    assert abs(drawn.shift.mean()) < 30 and abs(drawn.shift.std() - 3201 / 12**0.5) < 20
    noisy = drawn.noise_start >= 0
    assert abs(noisy.sum() / count - 0.8) < 0.01
    assert set(drawn.noise_start[~noisy]) == {-1} and not drawn.volume[~noisy].any()
    starts = drawn.noise_start[noisy]
    assert 0 <= starts.min() < 100 and NOISE - SAMPLES - 100 < starts.max() <= NOISE - SAMPLES
    volume = drawn.volume[noisy]
    assert volume.dtype == np.float32 and 0 <= volume.min() < 0.001 and 0.099 < volume.max() <= 0.1
    assert abs(volume.mean() - 0.05) < 0.001
    together = np.corrcoef([drawn.shift[noisy], starts, volume])
    assert np.abs(together - np.eye(3)).max() < 0.03


def test_switching_one_off_leaves_the_others():
    full = plan(1, 2, "c", 40, 9, 32, NOISE, Augment())
    still = plan(1, 2, "c", 40, 9, 32, NOISE, Augment(time_shift_ms=0))
    assert not still.shift.any() and same(still, full, "clips", "noise_start", "volume")
    for options, noise in [
        (Augment(noise_volume=0.0), NOISE),
        (Augment(noise_probability=0.0), NOISE),
        (Augment(), 0),
    ]:
        quiet = plan(1, 2, "c", 40, 9, 32, noise, options)
        assert same(quiet, full, "clips", "shift")
        assert (quiet.noise_start == -1).all() and not quiet.volume.any()


def test_noise_may_begin_wherever_a_clip_of_it_is_left():
    always = Augment(noise_probability=1.0)
    for left in (0, 1, 2):
        drawn = plan(0, 0, "c", 9, 9, 9, SAMPLES + left, always)
        assert set(drawn.noise_start.flat) == set(range(left + 1))


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(-SAMPLES, SAMPLES), st.integers(-1, 4000), st.floats(0, 1, width=32)),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 1000),
)
def test_clips_are_shifted_and_noise_is_added(drawn, seed):
    random = np.random.default_rng(seed)
    waves = random.integers(-32768, 32768, (len(drawn), SAMPLES), np.int16)
    noise = random.integers(-32768, 32768, 20_000, np.int16)
    shift, start, volume = (np.array(values) for values in zip(*drawn, strict=True))
    tensors = map(torch.from_numpy, (waves, shift, start, volume.astype(np.float32), noise))
    found = apply(*tensors)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, by_hand(waves, shift, start, volume, noise), atol=0.01)


def test_clients_by_clips_at_once():
    random = np.random.default_rng(0)
    waves = torch.from_numpy(random.integers(-9000, 9000, (3, 4, SAMPLES), np.int16))
    noise = torch.from_numpy(random.integers(-9000, 9000, NOISE, np.int16))
    plans = [plan(0, 0, name, 4, 1, 4, NOISE, Augment()) for name in "abc"]
    shift, start, volume = (
        torch.from_numpy(np.stack([getattr(drawn, field)[0] for drawn in plans]))
        for field in FIELDS[1:]
    )
    before = waves.clone()
    together = apply(waves, shift, start, volume, noise)
    assert together.shape == (3, 4, SAMPLES) and torch.equal(waves, before)
    for client in range(3):
        for clip in range(4):
            at = client, clip
            alone = apply(waves[at], shift[at], start[at], volume[at], noise)
            assert torch.equal(alone, together[at])


@given(st.integers(1, 5), st.booleans())
def test_no_shift_and_no_volume_is_the_identity(count, with_noise):
    waves = np.random.default_rng(count).integers(-32768, 32768, (count, SAMPLES), np.int16)
    drawn = plan(0, 0, "c", count, 1, count, NOISE, OFF)
    noise = np.full(NOISE if with_noise else 0, 30_000, np.int16)
    rest = (drawn.shift[0], drawn.noise_start[0], drawn.volume[0], noise)
    found = apply(torch.from_numpy(waves), *map(torch.from_numpy, rest))
    assert np.array_equal(found, waves)
    # A start with volume 0 adds nothing either.
    rest = (drawn.shift[0], np.zeros(count, np.int64), drawn.volume[0], noise)
    found = apply(torch.from_numpy(waves), *map(torch.from_numpy, rest))
    assert np.array_equal(found, waves)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time_shift_ms": 1001}, "'time_shift_ms' is 1001: input should be"),
        ({"time_shift_ms": -1}, "'time_shift_ms' is -1: input should be"),
        ({"noise_volume": 1.5}, "'noise_volume' is 1.5: input should be"),
        ({"noise_probability": -0.1}, "'noise_probability' is -0.1: input should be"),
        ({"noise_probability": float("nan")}, "'noise_probability' is nan"),
        ({"noise": 1}, "unknown option 'noise'"),
    ],
)
def test_bad_options_are_one_line(options, said):
    with pytest.raises(UserError, match=said):
        from_mapping(Augment, options, "kws.yaml")
