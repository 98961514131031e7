"""Aggregation: the brute-force mean, bit for bit, whatever the files look like."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from conftest import run
from fedtools.files.updates import Refusal, UpdateWriter, read_updates
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtools.files.errors import UserError
from fedtools.files.states import load_state, save_state, spec_of
from fedtools.server import aggregate
from fedtools.server.aggregate import check_min_clients, mean

BASE = "0" * 64
SHAPES = {
    "empty": ((0, 3), "float32"),
    "long": ((3, aggregate._CHUNK // 2 + 1), "float32"),
    "row": ((aggregate._LONG,), "float32"),
    "scalar": ((), "float32"),
    "one": ((1,), "float64"),
    "pair": ((2,), "float32"),
    "matrix": ((7, 11), "float32"),
    "double": ((5,), "float64"),
}


def random_states(number: int, spec: dict, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Values of very different sizes, so that another order of summation has other bits."""
    random = np.random.default_rng(seed)
    return {
        f"c{client:03}": {
            name: np.asarray(random.standard_normal(shape) * 10.0 ** random.integers(-12, 12), kind)
            for name, (shape, kind) in spec.items()
        }
        for client in range(number)
    }


def send(folder, states: dict, spec: dict, jobs: list[list[str]]):
    for job, clients in enumerate(jobs, 1):
        with UpdateWriter(folder, job, clients, spec, BASE) as writer:
            for client in clients:
                writer.add(client, states[client], 1, 1, 0.0)
    updates, refusals = read_updates(folder, list(states), spec, BASE)
    assert not refusals
    return updates


def brute_force(states: dict, weights: list[float], spec: dict) -> dict[str, np.ndarray]:
    """One client after the other, in float64, as the docstring promises."""
    scaled = [weight / max(weights) for weight in weights]
    means = {}
    for name, (shape, kind) in spec.items():
        total = np.zeros(shape)
        for tensors, weight in zip(states.values(), scaled, strict=True):
            total = total + tensors[name].astype("float64") * weight
        means[name] = (total / math.fsum(scaled)).astype(kind)
    return means


def cut(clients: list[str], data) -> list[list[str]]:
    """Any division into jobs, in any order, also one that does not keep neighbours together."""
    shuffled = data.draw(st.permutations(clients)) if data.draw(st.booleans()) else clients
    ends = sorted(data.draw(st.sets(st.integers(1, len(clients)), max_size=4)) | {len(clients)})
    return [list(shuffled[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


@given(number=st.integers(1, 7), chunk=st.integers(16, 100), data=st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_the_brute_force_mean_for_any_jobs(tmp_path_factory, number, chunk, data):
    folder = tmp_path_factory.mktemp("round")
    spec = {
        **SHAPES,
        "long": ((3, 67), "float32"),
        "row": ((16,), "float32"),
        "double": ((47,), "float64"),
    }
    states = random_states(number, spec)
    weights = data.draw(
        st.one_of(
            st.just([1] * number),
            st.lists(st.integers(1, 10**6), min_size=number, max_size=number),
            st.lists(st.floats(1e-3, 1e3), min_size=number, max_size=number),
        )
    )
    updates = send(folder, states, spec, cut(list(states), data))
    with pytest.MonkeyPatch.context() as patch:
        # Small tensors then meet every border that large ones meet.
        patch.setattr(aggregate, "_CHUNK", chunk)
        patch.setattr(aggregate, "_LONG", 16)
        assert mean(updates, weights, folder / "mean", spec) == []
    got = load_state(folder / "mean", spec)
    for name, expected in brute_force(states, weights, spec).items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
    save_state(folder / "again", got)
    assert (folder / "again").read_bytes() == (folder / "mean").read_bytes()


def test_large_tensors(tmp_path):
    states = random_states(5, SHAPES)
    updates = send(tmp_path, states, SHAPES, [list(states)[:2], list(states)[2:]])
    for weights in ([1] * 5, [5, 4, 3, 2, 1]):
        mean(updates, weights, tmp_path / "mean", SHAPES)
        got = load_state(tmp_path / "mean", SHAPES)
        for name, expected in brute_force(states, weights, SHAPES).items():
            np.testing.assert_array_equal(got[name], expected, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 127, 128, 129, 1000])
@pytest.mark.parametrize("weighted", [False, True])
def test_short_rows_are_added_in_order(tmp_path, size, weighted):
    spec = {"short": ((size,), "float64")}
    states = random_states(300, spec, seed=size)
    weights = [1 + number * weighted for number in range(300)]
    clients = list(states)
    expected = brute_force(states, weights, spec)["short"]
    for nj in (1, 7):
        folder = tmp_path / str(nj)
        updates = send(folder, states, spec, [clients[job::nj] for job in range(nj)])
        mean(updates, weights, folder / "mean", spec)
        np.testing.assert_array_equal(load_state(folder / "mean")["short"], expected)


@given(scale=st.floats(1e-6, 1e6))
@settings(max_examples=20, deadline=None)
def test_weights_have_any_scale(tmp_path_factory, scale):
    folder = tmp_path_factory.mktemp("round")
    spec = {"a": ((100,), "float32")}
    states = random_states(5, spec)
    updates = send(folder, states, spec, [list(states)])
    for weights in ([1, 2, 3, 4, 5], [1, 1, 1, 1, 1]):
        mean(updates, weights, folder / "one", spec)
        mean(updates, [weight * scale for weight in weights], folder / "other", spec)
        one, other = (load_state(folder / name)["a"] for name in ("one", "other"))
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert np.array_equal(one, other)


def test_any_number_of_threads_gives_the_same(tmp_path, monkeypatch):
    states = random_states(4, SHAPES)
    updates = send(tmp_path, states, SHAPES, [list(states)])
    written = set()
    for threads in (1, 2, 3, 4):
        monkeypatch.setattr(aggregate.os, "sched_getaffinity", lambda _, n=threads: range(n))
        mean(updates, [3, 1, 4, 1], tmp_path / "mean", SHAPES)
        written.add((tmp_path / "mean").read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["scalar", "long", "double"])
def test_what_is_not_finite_is_refused_and_the_rest_summed(tmp_path, bad, name):
    states = random_states(5, SHAPES)
    for client in ("c001", "c003"):
        states[client][name].reshape(-1)[-1:] = bad
    updates = send(tmp_path, states, SHAPES, [list(states)[:2], list(states)[2:]])
    refusals = mean(updates, [1, 2, 3, 4, 5], tmp_path / "mean", SHAPES)
    reason = f"NaN or Inf in tensor {name!r}"
    assert refusals == [Refusal("c001", reason), Refusal("c003", reason)]
    left = {client: states[client] for client in ("c000", "c002", "c004")}
    expected = brute_force(left, [1, 3, 5], SHAPES)
    got = load_state(tmp_path / "mean", SHAPES)
    for each in SHAPES:
        np.testing.assert_array_equal(got[each], expected[each])


def test_infinities_that_cancel_and_weights_of_zero_hide_nothing(tmp_path):
    spec = {"a": ((1,), "float64"), "b": ((1,), "float32")}
    values = {"c0": np.inf, "c1": -np.inf, "c2": 1.0, "c3": np.nan}
    states = {c: {"a": np.array([v]), "b": np.ones(1, "float32")} for c, v in values.items()}
    updates = send(tmp_path, states, spec, [list(states)])
    refusals = mean(updates, [1, 1, 1, 0], tmp_path / "mean", spec)
    assert [refusal.client for refusal in refusals] == ["c0", "c1", "c3"]
    assert load_state(tmp_path / "mean")["a"] == 1.0


def test_doubles_that_overflow_only_together(tmp_path):
    spec = {"a": ((1,), "float64")}
    states = {c: {"a": np.array([v])} for c, v in {"c0": 1.7e308, "c1": 1.7e308, "c2": 2.0}.items()}
    updates = send(tmp_path, states, spec, [list(states)])
    refusals = mean(updates, [1, 1, 1], tmp_path / "mean", spec)
    assert [refusal.client for refusal in refusals] == ["c0", "c1"]
    assert load_state(tmp_path / "mean")["a"] == 2.0


def test_largest_floats_have_a_mean(tmp_path):
    spec = {"a": ((1,), "float32")}
    top = np.finfo("float32").max
    states = {f"c{n}": {"a": np.array([top])} for n in range(7)}
    updates = send(tmp_path, states, spec, [list(states)])
    assert mean(updates, [1, 2, 3, 4, 5, 6, 7], tmp_path / "mean", spec) == []
    assert load_state(tmp_path / "mean")["a"] == top


def test_files_that_change_after_they_were_checked(tmp_path):
    states = random_states(4, SHAPES)
    updates = send(tmp_path, states, SHAPES, [list(states)[:2], list(states)[2:]])
    with open(tmp_path / "update.2.safetensors", "r+b") as file:
        file.truncate(updates[2].offset("scalar"))
    refusals = mean(updates, [1] * 4, tmp_path / "mean", SHAPES)
    assert [refusal.client for refusal in refusals] == ["c002", "c003"]
    (tmp_path / "update.2.safetensors").unlink()
    assert mean(updates, [1] * 4, tmp_path / "mean", SHAPES) == [
        Refusal(client, "update.2.safetensors is cut off or gone") for client in ("c002", "c003")
    ]


def test_nobody_left(tmp_path):
    spec = {"a": ((1,), "float32")}
    states = {c: {"a": np.array([np.nan], "float32")} for c in ("c0", "c1")}
    updates = send(tmp_path, states, spec, [list(states)])
    (tmp_path / "mean").write_text("as before")
    earlier = [Refusal("c2", "was late")]
    with pytest.raises(UserError) as error:
        mean(updates, [1, 1], tmp_path / "mean", spec, refused=earlier)
    assert "0 of 3 updates can be used" in str(error.value)
    assert "c2: was late; c0: NaN or Inf in tensor 'a'; c1: NaN" in str(error.value)
    with pytest.raises(UserError, match="0 of 0"):
        mean([], [], tmp_path / "mean", spec)
    assert (tmp_path / "mean").read_text() == "as before"
    assert not list(tmp_path.glob(".*"))


def test_too_few_left(tmp_path):
    check_min_clients(2, 2, [])
    many = [Refusal(f"c{n}", "late") for n in range(40)]
    with pytest.raises(UserError, match=r"3 of 43 .* min_clients is 4 .*and 30 more"):
        check_min_clients(3, 4, many)
    states = random_states(3, SHAPES)
    states["c001"]["scalar"][...] = np.nan
    updates = send(tmp_path, states, SHAPES, [list(states)])
    with pytest.raises(UserError, match="2 of 3"):
        mean(updates, [1] * 3, tmp_path / "mean", SHAPES, min_clients=3)
    assert len(mean(updates, [1] * 3, tmp_path / "mean", SHAPES, min_clients=2)) == 1


@pytest.mark.parametrize("tensor", [np.ones(2, "int64"), np.ones(2, "bool")])
def test_what_has_no_mean(tmp_path, tensor):
    with pytest.raises(UserError, match=r"'count' is (int64|bool), .*personal or reset"):
        mean([], [], tmp_path / "mean", spec_of({"count": tensor}))


def test_weights_that_weigh_nothing(tmp_path):
    spec = {"a": ((1,), "float32")}
    states = random_states(2, spec)
    updates = send(tmp_path, states, spec, [list(states)])
    with pytest.raises(UserError, match="zero"):
        mean(updates, [0, 0], tmp_path / "mean", spec)
    for weights in ([1], [1, -1], [1, np.nan], [1, np.inf]):
        with pytest.raises(ValueError, match="no weights"):
            mean(updates, weights, tmp_path / "mean", spec)


def test_nothing_shared(tmp_path):
    updates = send(tmp_path, {"c0": {}, "c1": {}}, {}, [["c0", "c1"]])
    assert mean(updates, [1, 1], tmp_path / "mean", {}) == []
    assert load_state(tmp_path / "mean", {}) == {}


def test_memory_stays_under_three_models(tmp_path):
    parameters, clients = 4_000_000, [f"c{n}" for n in range(8)]
    spec = {"a": ((parameters,), "float32")}
    tensors = {"a": np.ones(parameters, "float32")}
    send(tmp_path, dict.fromkeys(clients, tensors), spec, [clients])
    script = f"""
import sys
from tests.bench.bench_aggregate import peak
from fedtools.files.updates import read_updates
from fedtools.server.aggregate import mean
folder, spec = sys.argv[1], {spec}
updates, _ = read_updates(folder, {clients}, spec, "{BASE}")
before = peak()
mean(updates, [1] * 8, folder + "/mean", spec)
print(peak() - before)
"""
    grown = int(run(sys.executable, "-c", script, tmp_path).ok().out)
    assert grown < 3 * 4 * parameters
