"""Banded matrix factorisation, against dense matrices, and against files of an experiment."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import private_world as world
import pytest
import yaml
from commands import inside
from private_world import CLIENTS, STEPS, begin, released, rows_of, vector
from scipy.linalg import toeplitz

from fedtools.core.tables import read_tsv
from fedtools.privacy.banded import UNIT, error_of, estimate, make_coefficients, mixed, norm_of

CLIP, COHORTS, N = 0.05, 3, len(CLIENTS)


def dense(coefficients, rounds: int) -> np.ndarray:
    """Return the lower triangular Toeplitz matrix C of coefficients, (T, T)."""
    column = np.zeros(rounds)
    column[: len(coefficients)] = coefficients
    return np.tril(toeplitz(column))


@pytest.mark.parametrize(("bands", "rounds"), [(1, 7), (3, 7), (7, 7), (5, 40)])
def test_the_error_is_that_of_dense_matrices(bands, rounds):
    coefficients = np.random.default_rng(bands).uniform(0.1, 1, bands)
    sums = np.tril(np.ones((rounds, rounds)))
    noise = sums @ np.linalg.inv(dense(coefficients, rounds))
    expected = np.square(noise).sum() / rounds * np.square(coefficients).sum()
    assert error_of(coefficients, rounds) == pytest.approx(expected, rel=1e-10)


def test_coefficients_are_better_than_independent_noise_and_any_near_them():
    random = np.random.default_rng(1)
    for bands, rounds in ((2, 10), (8, 60), (21, 150)):
        best = np.array(make_coefficients(bands, rounds), float)
        assert best[0] == UNIT and len(best) == bands
        error = error_of(best, rounds)
        assert error < 0.9 * error_of(np.ones(1), rounds)
        root = np.cumprod([1.0, *((2 * at - 1) / (2 * at) for at in range(1, bands))])
        assert error <= error_of(root, rounds)
        for _ in range(100):
            other = best + random.normal(0, 20, bands)
            assert error <= error_of(other, rounds) * (1 + 1e-4)


def test_no_client_moves_the_mixed_sums_by_more_than_the_planned_norm():
    """Try all patterns of turns, and the worst changes for each: all along one direction."""
    for cohorts, rounds in ((2, 6), (3, 8), (4, 10)):
        coefficients = make_coefficients(cohorts, rounds)
        matrix, turns = dense(np.array(coefficients) / UNIT, rounds), -(-rounds // cohorts)
        bound, largest = np.sqrt(turns) * norm_of(coefficients), 0.0
        for first in range(cohorts):
            places = range(first, rounds, cohorts)
            for signs in itertools.product((-1, 1), repeat=len(places)):
                moved = np.zeros(rounds)
                moved[list(places)] = signs
                largest = max(largest, float(np.linalg.norm(matrix @ moved)))
        assert largest <= bound * (1 + 1e-12)
        assert largest > 0.9 * bound
        # With more bands than cohorts, parts of a client's turns overlap, and add up.
        wider = make_coefficients(cohorts + 2, rounds)
        moved = np.zeros(rounds)
        moved[::cohorts] = 1
        found = np.linalg.norm(dense(np.array(wider) / UNIT, rounds) @ moved)
        assert found > np.sqrt(turns) * norm_of(wider)


def test_without_noise_the_estimates_are_the_sums():
    coefficients, random = make_coefficients(4, 12), np.random.default_rng(2)
    exact = random.integers(-STEPS * 1000, STEPS * 1000, (12, 5))
    sums, estimates = np.zeros((3, 5), np.int64), np.zeros((3, 5))
    for total in exact:
        latest = np.concatenate([total[None], sums])
        found = estimate(coefficients, mixed(coefficients, latest), estimates)
        assert np.array_equal(found, total)
        sums, estimates = latest[:-1], np.concatenate([found[None], estimates])[:-1]


# On files.

TURNS = (f"method_conf.cohorts={COHORTS}", "rounds=7")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return world.make_world(tmp_path_factory.mktemp("world"))


def run(path: Path, to: int) -> Path:
    inside("rounds", path, "--to", to).ok()
    return path


def sampled(path: Path) -> list[list[str]]:
    return [one.read_text().split() for one in sorted(path.glob("round_*/clients"))]


def noises(path: Path, rounds: int) -> np.ndarray:
    """Return the noise in each estimate, in steps, (rounds, values)."""
    found = []
    for number in range(1, rounds + 1):
        total = sum((vector(one) for one in rows_of(path, number).values()), np.zeros(1))
        found.append(released(path, number) * (N / COHORTS) * STEPS / CLIP - total)
    return np.array(found)


def test_noise_has_the_planned_covariance_and_clients_take_turns(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp", *TURNS), 7)
    plan = yaml.safe_load((path / "privacy.yaml").read_text())
    assert len(plan["coefficients"]) == COHORTS
    turns = sampled(path)
    assert turns[:3] == turns[3:6] and sorted(itertools.chain(*turns[:3])) == sorted(CLIENTS)
    # Seven rounds of three cohorts: a client takes part three times at most.
    mu = np.sqrt(3) / plan["noise"]
    from scipy.stats import norm

    delta = norm.cdf(mu / 2 - 8 / mu) - np.exp(8) * norm.cdf(-mu / 2 - 8 / mu)
    assert 0.99e-5 < delta <= 1e-5
    coefficients = np.array(plan["coefficients"]) / UNIT
    inverse = np.linalg.inv(dense(coefficients, 7))
    scale = plan["noise"] * np.linalg.norm(coefficients) * STEPS
    # Multiplied by C, estimates' noise is independent again, and of one size.
    found = noises(path, 7)
    white = np.linalg.inv(inverse) @ found / scale
    values = white.shape[1]
    covariance = white @ white.T / values
    assert np.abs(covariance - np.eye(7)).max() < 5 / np.sqrt(values)
    assert not np.abs(0.8**2 * covariance - np.eye(7)).max() < 5 / np.sqrt(values)
    # It partly cancels in what a model has learnt.
    learnt = np.square(found.sum(0)).mean()
    assert learnt < 0.7 * np.square(found).sum(0).mean()


def test_independent_noise_is_one_band(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp", *TURNS, "method_conf.bands=1"), 3)
    plan = yaml.safe_load((path / "privacy.yaml").read_text())
    found = noises(path, 3) / (plan["noise"] * STEPS)
    assert np.abs(np.cov(found) - np.eye(3)).max() < 5 / np.sqrt(found.shape[1])


def test_kills_and_resets_of_turns(root, key, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTOOLS_NONCE", "0123456789abcdef" * 2)
    whole, steps = tmp_path / "whole", tmp_path / "steps"
    run(begin(root, whole, *TURNS), 5)
    begin(root, steps, *TURNS)
    for number in range(1, 6):
        run(steps, number)
    state = "global.safetensors"
    for number in range(1, 7):
        name = f"round_{number:04d}/{state}"
        assert (whole / name).read_bytes() == (steps / name).read_bytes()
    spent = [float(row["spent"]) for row in ledger(whole)]
    inside("reset", whole, "--round", "5").ok()
    run(whole, 5)
    # All turns count once more.
    assert float(ledger(whole)[-1]["spent"]) > 1.3 * spent[-1]
    for file in (whole / "server").rglob("turns.safetensors"):
        file.unlink()
    inside("rounds", whole, "--to", "6").fails(1, "sums of the rounds before round 6 are missing")


def ledger(path: Path) -> list[dict[str, str]]:
    inside("privacy", path).ok()
    return read_tsv(path / "dp.tsv", None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("method_conf.cohorts=1",), "0, or from 2"),
        (("method_conf.cohorts=3", "method_conf.bands=4"), "from 1 to the number of cohorts"),
        (("method_conf.bands=2",), "from 1 to the number of cohorts"),
        (("method_conf.cohorts=3", "clients_per_round=2"), "cohorts exclude"),
        (("method_conf.cohorts=999999999",), "from 2 to 256"),
    ],
)
def test_turns_that_break_the_bound_are_refused(root, key, tmp_path, settings, said):
    world.init(root, tmp_path / "exp", *settings).fails(1, said)
