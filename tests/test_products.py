"""Aggregation of adapters, against dense products and numpy's SVD."""

from __future__ import annotations

import numpy as np
import pytest
from test_aggregate import send
from torch import nn

from fedtools.exchange.states import load_state, save_state
from fedtools.models.adapt.adaptation import Adapt
from fedtools.models.adapt.adapters import adapt
from fedtools.server.aggregate import Bound
from fedtools.server.products import Adapters, combine_models, nearest

INPUTS, OUTPUTS, RANK, CLIENTS = 9, 7, 2, 5
SPEC = {
    "head.weight": ((3,), "float32"),
    "low.lora_a": ((RANK, INPUTS), "float32"),
    "low.lora_b": ((OUTPUTS, RANK), "float32"),
    # A layer whose A is not sent has no product at the server.
    "half.lora_b": ((OUTPUTS, RANK), "float32"),
}
WEIGHTS = [3.0, 1.0, 4.0, 1.0, 5.0]


@pytest.fixture
def states() -> dict[str, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    return {
        f"c{k}": {name: random.normal(size=shape).astype(kind) for name, (shape, kind) in s}
        for k in range(CLIENTS)
        for s in [SPEC.items()]
    }


def combined(folder, states, how, weights=WEIGHTS, jobs=None, before=None, ratio=0.0):
    """Return the next state, and the refused clients."""
    folder.mkdir()
    zeros = {name: np.zeros(shape, kind) for name, (shape, kind) in SPEC.items()}
    start = zeros | {"low.lora_delta": np.zeros((OUTPUTS, INPUTS), "f4")} | (before or {})
    save_state(folder / "start", start)
    messages = send(folder, states, SPEC, jobs or [list(states)])
    adapters = Adapters(how, folder / "start", "round 1")
    bound = Bound(folder / "start", ratio)
    refused = combine_models(messages, weights, folder / "mean", SPEC, adapters, bound=bound)
    return load_state(folder / "mean"), refused


def product(state) -> np.ndarray:
    return state["low.lora_b"].astype("f8") @ state["low.lora_a"].astype("f8")


def dense_mean(states, weights=WEIGHTS) -> np.ndarray:
    products = [product(state) for state in states.values()]
    return np.average(products, axis=0, weights=weights)


def mean_of(states, name, weights=WEIGHTS) -> np.ndarray:
    return np.average([one[name].astype("f8") for one in states.values()], axis=0, weights=weights)


def test_the_mean_of_factors_is_not_the_mean(tmp_path, states):
    found, _ = combined(tmp_path / "r", states, "mean")
    for name in SPEC:
        np.testing.assert_allclose(found[name], mean_of(states, name), rtol=1e-6)
    assert np.abs(product(found) - dense_mean(states)).max() > 0.1


def test_with_one_a_the_mean_of_b_is_exact(tmp_path, states):
    for state in states.values():
        state["low.lora_a"] = states["c0"]["low.lora_a"]
    found, _ = combined(tmp_path / "r", states, "fixed_a")
    np.testing.assert_allclose(product(found), dense_mean(states), rtol=0, atol=1e-6)


def test_svd_is_the_nearest_of_its_rank(tmp_path, states, capsys):
    found, _ = combined(tmp_path / "r", states, "svd")
    dense = dense_mean(states)
    left, values, right = np.linalg.svd(dense)
    nearest = left[:, :RANK] * values[:RANK] @ right[:RANK]
    np.testing.assert_allclose(product(found), nearest, rtol=0, atol=1e-5)
    rows = found["low.lora_a"]
    np.testing.assert_allclose(rows @ rows.T, np.eye(RANK) / 3, atol=1e-6)
    assert all(row[np.abs(row).argmax()] > 0 for row in rows)
    share = 100 * np.square(values[RANK:]).sum() / np.square(values).sum()
    assert 1 < share < 99
    said = f"round 1: {share:.2f} % of the mean of the adapters is lost\n"
    assert capsys.readouterr().err == said
    for name in ("head.weight", "half.lora_b"):
        np.testing.assert_allclose(found[name], mean_of(states, name), rtol=1e-6)
    assert found.keys() == SPEC.keys()


def test_what_has_the_rank_is_kept_by_svd(tmp_path, states, capsys):
    one = {"c0": states["c0"]}
    found, _ = combined(tmp_path / "r", one, "svd", [2.0])
    np.testing.assert_allclose(product(found), product(one["c0"]), rtol=0, atol=1e-5)
    assert "0.00 % of the mean of the adapters is lost" in capsys.readouterr().err


def test_a_layer_can_be_narrower_than_the_rank():
    matrix = np.random.default_rng(2).normal(size=(3, 5))
    down, up = nearest(matrix, 4)
    assert down.shape == (4, 5) and up.shape == (3, 4)
    np.testing.assert_allclose(up @ down, matrix, atol=1e-12)


def test_adapters_that_do_nothing_can_be_trained_after_svd(tmp_path, states):
    for state in states.values():
        state["low.lora_b"] = np.zeros((OUTPUTS, RANK), "f4")
    found, _ = combined(tmp_path / "r", states, "svd")
    assert not found["low.lora_b"].any()
    # In a product of zeros, neither factor would ever have a gradient.
    assert np.linalg.matrix_rank(found["low.lora_a"]) == RANK


def test_the_residual_loses_nothing_round_after_round(tmp_path, states, capsys):
    before = np.random.default_rng(1).normal(size=(OUTPUTS, INPUTS)).astype("f4")
    given = {"low.lora_delta": before}
    found, _ = combined(tmp_path / "r", states, "residual", before=given)
    dense = dense_mean(states)
    whole = product(found) + found["low.lora_delta"]
    np.testing.assert_allclose(whole, before + dense, rtol=0, atol=1e-6)
    for name in SPEC:
        np.testing.assert_allclose(found[name], mean_of(states, name), rtol=1e-6)
    share = 100 * np.square(dense - product(found)).sum() / np.square(dense).sum()
    said = f"round 1: {share:.2f} % of the mean of the adapters is added to the base\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("how", ["svd", "residual"])
def test_jobs_and_the_scale_of_weights_change_no_bit(tmp_path, states, how):
    jobs = [["c3"], ["c1", "c0"], ["c4", "c2"]]
    one, _ = combined(tmp_path / "one", states, how)
    other, _ = combined(tmp_path / "other", states, how, [2 * x for x in WEIGHTS], jobs)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("how", ["svd", "residual"])
def test_who_is_refused_is_in_no_product(tmp_path, states, how):
    states["c1"]["low.lora_b"][0, 0] = np.nan
    # Each factor is finite, and the product overflows single precision.
    states["c2"]["low.lora_a"] *= np.float32(1e30)
    states["c2"]["low.lora_b"] *= np.float32(1e30)
    left = {name: states[name] for name in ("c0", "c3", "c4")}
    found, refused = combined(tmp_path / "r", states, how)
    assert [(one.client, one.reason) for one in refused] == [
        ("c1", "NaN or Inf in tensor 'low.lora_b'"),
        ("c2", "product too large in adapter 'low'"),
    ]
    alone, _ = combined(tmp_path / "alone", left, how, [3.0, 1.0, 5.0])
    for name, value in alone.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_rows_of_a_are_as_long_as_at_the_start():
    model = nn.Sequential(nn.Linear(2000, 3))
    adapt(model, Adapt(rank=8), None)
    drawn = model[0].lora_a.detach().numpy()
    down, _ = nearest(np.random.default_rng(0).normal(size=(9, 12)), 8)
    lengths = np.linalg.norm(drawn, axis=1), np.linalg.norm(down, axis=1)
    np.testing.assert_allclose(*lengths, rtol=0.05)


def test_a_learning_rate_at_which_the_factors_converge_does_not_diverge_after_svd():
    """One client with gradient descent towards a matrix of rank 2, at two thirds of the limit."""
    random = np.random.default_rng(4)
    goal = 0.002 * random.normal(size=(7, 2)) @ random.normal(size=(2, 400))
    start = random.uniform(-1 / 20, 1 / 20, (2, 400)), np.zeros((7, 2))
    # For A as it is drawn, B converges at rates up to 2 / |A|^2, of which rows have 1/3.
    rate = 0.66 * 2 * 3
    left = {}
    for how in ("mean", "svd"):
        down, up = start
        for _ in range(10):
            for _ in range(20):
                error = up @ down - goal
                down, up = down - rate * up.T @ error, up - rate * error @ down.T
            if how == "svd":
                down, up = nearest(up @ down, 2)
        left[how] = np.linalg.norm(up @ down - goal) / np.linalg.norm(goal)
    assert left["mean"] < 0.1 and left["svd"] < 0.1


@pytest.mark.parametrize("how", ["mean", "svd", "residual"])
def test_factors_within_their_bound_make_no_product_far_from_it(tmp_path, how):
    """Both factors of one client are ten times as far from the start as the others'."""
    random, states = np.random.default_rng(3), {}
    before = {
        name: random.normal(size=SPEC[name][0]).astype("f4")
        for name in ("low.lora_a", "low.lora_b")
    }
    for k in range(CLIENTS):
        states[f"c{k}"] = {name: np.zeros(shape, kind) for name, (shape, kind) in SPEC.items()}
        for name, value in before.items():
            length = 40.0 if k == 2 else 4.0
            states[f"c{k}"][name] = value + length * random.normal(size=value.shape).astype("f4")
    changes = [np.linalg.norm(product(one) - product(before)) for one in states.values()]
    assert changes[2] > 20 * np.median(changes)
    _, refused = combined(tmp_path / "r", states, how, before=before, ratio=20.0)
    (refusal,) = refused
    assert refusal.client == "c2" and "products of norm" in refusal.reason
    assert f"{changes[2]:.3g}, over 20 x the median" in refusal.reason
    _, refused = combined(tmp_path / "free", states, how, before=before)
    assert refused == []
