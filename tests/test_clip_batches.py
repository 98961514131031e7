"""Clips as network inputs: Kaldi's features of packed clips, and independent random draws."""

from __future__ import annotations

from pathlib import Path

import keyword_world
import keywords
import numpy as np
import pytest
import torch
from augmented import by_hand
from conftest import inside
from kaldi_mfcc import kaldi_mfcc

from fedtools.audio.augment import Augment, Plan, plan
from fedtools.audio.front_end import ScaledMfcc
from fedtools.data.clips import Clips
from fedtools.federation.federation import Federation
from fedtools.tasks.kws.clips import ClipFeatures

COUNTS = {"ann": [3, 1, 0, 1], "bob": [0, 0, 2, 0], "eve": [1, 1, 1, 0]}
LABELS = [0, 0, 0, 1, 3, 2, 2, 0, 1, 2]
ROWS = [slice(0, 5), slice(5, 7), slice(7, 10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return keywords.pack(tmp_path_factory.mktemp("clips") / "train", COUNTS, length=16000)


def heard(wave: np.ndarray) -> np.ndarray:
    """Return Kaldi's MFCC, normalised by shared constants to about zero mean and unit variance."""
    mfcc = kaldi_mfcc(wave.astype(np.float32), 40, 30, 10, 16_000)
    mfcc[:, 0] -= 100
    return mfcc / 16


def test_what_is_measured_is_the_clips_as_they_are(folder):
    waves = np.load(folder / "clips.npy")
    clips = ClipFeatures(Clips.read(folder), ScaledMfcc(), torch.device("cpu"))
    for rows in (slice(0, 10), slice(3, 6)):
        expected = np.stack([heard(wave) for wave in waves[rows]])
        np.testing.assert_allclose(clips.plain(rows).numpy(), expected, atol=2e-4)


def test_what_is_trained_on_is_shifted_and_noisy(folder):
    """Of three clients, two have fewer clips than a batch: labels and means are per client."""
    waves, noise = np.load(folder / "clips.npy"), np.load(folder / "noise.npy")
    clips = ClipFeatures(Clips.read(folder), ScaledMfcc(), torch.device("cpu"))
    options = Augment(time_shift_ms=100, noise_volume=0.5, noise_probability=0.8)
    plans = [
        plan(0, 1, name, rows.stop - rows.start, 3, 4, len(noise), options)
        for name, rows in zip(COUNTS, ROWS, strict=True)
    ]
    for step in range(3):
        batch = clips.batch(ROWS, plans, step)
        assert batch.labels.shape == (3, 4) and batch.valid.sum(1).tolist() == [4, 2, 3]
        for client, (rows, one) in enumerate(zip(ROWS, plans, strict=True)):
            size = one.clips.shape[1]
            index = rows.start + one.clips[step]
            moved = by_hand(
                waves[index].astype(float),
                one.shift[step],
                one.noise_start[step],
                one.volume[step],
                noise.astype(float),
            )
            expected = np.stack([heard(wave) for wave in moved])
            np.testing.assert_allclose(batch.mfcc[client, :size].numpy(), expected, atol=2e-4)
            assert batch.labels[client, :size].tolist() == [LABELS[at] for at in index]
            values = torch.arange(12.0).view(3, 4)
            mean = values[client, :size].mean()
            torch.testing.assert_close(batch.mean(values)[client], mean)


@pytest.mark.parametrize("room", [1 << 30, 0])
def test_what_is_kept_of_unaugmented_clips_is_theirs(folder, room, monkeypatch):
    """Batches as they are, with augmented ones between them, which nothing is to be kept of."""
    monkeypatch.setattr("fedtools.tasks.kws.clips._KEPT_BYTES", room)
    waves = np.load(folder / "clips.npy").astype(float)
    clips = ClipFeatures(Clips.read(folder), ScaledMfcc(), torch.device("cpu"))
    computed, front = [], ScaledMfcc.forward
    monkeypatch.setattr(
        ScaledMfcc,
        "forward",
        lambda self, waves: (computed.append(len(waves)), front(self, waves))[1],
    )
    for round in range(3):
        computed.clear()
        for options in (Augment(0, 0, 0), Augment(100, 0.5, 1.0)):
            plans = [
                plan(0, round, name, rows.stop - rows.start, 2, 2, 32_000, options)
                for name, rows in zip(COUNTS, ROWS, strict=True)
            ]
            for step in range(2):
                found = clips.batch(ROWS, plans, step).mfcc
                for client, (rows, one) in enumerate(zip(ROWS, plans, strict=True)):
                    wanted = np.stack([heard(waves[rows.start + at]) for at in one.clips[step]])
                    same = np.abs(found[client].numpy() - wanted).max() < 2e-4
                    assert same == (options.time_shift_ms == 0)
    # In the last round, what is augmented: two steps of three clients' two clips.
    assert (sum(computed) <= 12) == bool(room)


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> Path:
    """Return two clients with as many clips of each class, and a round of each of two seeds."""
    root = tmp_path_factory.mktemp("twins")
    for split in ("train", "test"):
        keywords.pack(root / split, {"ann": [3] * 4, "bob": [3] * 4})
    keywords.config_file(root / "config.yaml", **keyword_world.CONFIG | {"clients_per_round": 2})
    return root


def begin(world: Path, path: Path, seed: int, *settings: str) -> Path:
    data = ("--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}")
    words = ("init", path, "--config", world / "config.yaml", "--method", "fedavg", *data)
    inside(*words, "--seed", seed, *(f"--set={setting}" for setting in settings)).ok()
    return path


def plans_of(path: Path, clients: list[str], number: int, purpose: str) -> list[Plan]:
    place = Federation(path).client(clients, number)
    return place.source.batches(None, 5, purpose)._plans


def test_draws_are_of_a_seed_a_round_a_client_and_a_purpose(twins, tmp_path):
    found = {}
    for seed in (0, 1):
        path = begin(twins, tmp_path / str(seed), seed)
        inside("rounds", path, "--to", "1").ok()
        for number in (1, 2):
            for purpose in ("train", "private"):
                for clients in (["ann", "bob"], ["bob"]):
                    for name, one in zip(
                        clients, plans_of(path, clients, number, purpose), strict=True
                    ):
                        key = seed, number, purpose, name
                        drawn = [getattr(one, part).tobytes() for part in vars(one)]
                        # A client's draws do not depend on the other clients.
                        assert found.setdefault(key, drawn) == drawn
    assert len(found) == 16
    for part in range(4):
        assert len({drawn[part] for drawn in found.values()}) == 16


def test_augmentation_is_as_configured(twins, tmp_path):
    loud = "training.augment={time_shift_ms: 5, noise_volume: 0.9, noise_probability: 1.0}"
    (one,) = plans_of(begin(twins, tmp_path / "loud", 0, loud), ["ann"], 1, "train")
    assert 0 < np.abs(one.shift).max() <= 80
    assert (one.noise_start >= 0).all() and 0.5 < one.volume.max() <= 0.9
    off = "training.augment={time_shift_ms: 0, noise_volume: 0.0}"
    (one,) = plans_of(begin(twins, tmp_path / "off", 0, off), ["ann"], 1, "train")
    assert not one.shift.any() and (one.noise_start == -1).all() and not one.volume.any()
