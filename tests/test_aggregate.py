"""Aggregation equals the brute-force mean, bit for bit, for any layout of files."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import replace

import keyword_world
import numpy as np
import pytest
from conftest import inside, ledger, run
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fedtools.core.errors import UserError
from fedtools.exchange.messages import MessageWriter, Payload, Refusal, Report, read_messages
from fedtools.exchange.origin import Origin
from fedtools.exchange.states import load_state, save_state, spec_of
from fedtools.exchange.values import Values
from fedtools.methods.fedavg import FedAvg
from fedtools.server import aggregate
from fedtools.server.aggregate import Bound, check_min_clients, combine
from fedtools.server.shares import client_weights

ORIGIN = Origin("f" * 64, 1, "0" * 64)
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
    """Return values of very different sizes, so that another order of summation changes bits."""
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
        with MessageWriter(folder, job, clients, Payload(spec), ORIGIN) as writer:
            for client in clients:
                tensors = {name: value[None] for name, value in states[client].items()}
                writer.send([Report(client, 1, 1)], tensors)
    messages, refusals = read_messages(folder, jobs, list(states), Payload(spec), ORIGIN)
    assert not refusals
    return messages


def brute_force(states: dict, weights: list[float], spec: dict) -> dict[str, np.ndarray]:
    """Average one client after the other, in float64, as the docstring specifies."""
    scaled = [weight / max(weights) for weight in weights]
    means = {}
    for name, (shape, kind) in spec.items():
        total = np.zeros(shape)
        for tensors, weight in zip(states.values(), scaled, strict=True):
            total = total + tensors[name].astype("float64") * weight
        means[name] = (total / math.fsum(scaled)).astype(kind)
    return means


def cut(clients: list[str], data) -> list[list[str]]:
    """Divide clients into jobs, in any order, which need not keep neighbours together."""
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
    messages = send(folder, states, spec, cut(list(states), data))
    with pytest.MonkeyPatch.context() as patch:
        # So that small tensors cross the same block boundaries as large ones.
        patch.setattr(aggregate, "_CHUNK", chunk)
        patch.setattr(aggregate, "_LONG", 16)
        assert combine(messages, weights, folder / "mean", spec) == []
    got = load_state(folder / "mean", spec)
    for name, expected in brute_force(states, weights, spec).items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
    save_state(folder / "again", got)
    assert (folder / "again").read_bytes() == (folder / "mean").read_bytes()


def test_large_tensors(tmp_path):
    states = random_states(5, SHAPES)
    messages = send(tmp_path, states, SHAPES, [list(states)[:2], list(states)[2:]])
    for weights in ([1] * 5, [5, 4, 3, 2, 1]):
        combine(messages, weights, tmp_path / "mean", SHAPES)
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
        messages = send(folder, states, spec, [clients[job::nj] for job in range(nj)])
        combine(messages, weights, folder / "mean", spec)
        np.testing.assert_array_equal(load_state(folder / "mean")["short"], expected)


@given(scale=st.floats(1e-6, 1e6))
@settings(max_examples=20, deadline=None)
def test_weights_have_any_scale(tmp_path_factory, scale):
    folder = tmp_path_factory.mktemp("round")
    spec = {"a": ((100,), "float32")}
    states = random_states(5, spec)
    messages = send(folder, states, spec, [list(states)])
    for weights in ([1, 2, 3, 4, 5], [1, 1, 1, 1, 1]):
        combine(messages, weights, folder / "one", spec)
        combine(messages, [weight * scale for weight in weights], folder / "other", spec)
        one, other = (load_state(folder / name)["a"] for name in ("one", "other"))
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert np.array_equal(one, other)


def test_any_number_of_threads_gives_the_same(tmp_path, monkeypatch):
    states = random_states(4, SHAPES)
    messages = send(tmp_path, states, SHAPES, [list(states)])
    written = set()
    for threads in (1, 2, 3, 4):
        monkeypatch.setattr(aggregate.os, "sched_getaffinity", lambda _, n=threads: range(n))
        combine(messages, [3, 1, 4, 1], tmp_path / "mean", SHAPES)
        written.add((tmp_path / "mean").read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["scalar", "long", "double"])
def test_what_is_not_finite_is_refused_and_the_rest_summed(tmp_path, bad, name):
    states = random_states(5, SHAPES)
    for client in ("c001", "c003"):
        states[client][name].reshape(-1)[-1:] = bad
    messages = send(tmp_path, states, SHAPES, [list(states)[:2], list(states)[2:]])
    refusals = combine(messages, [1, 2, 3, 4, 5], tmp_path / "mean", SHAPES)
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
    messages = send(tmp_path, states, spec, [list(states)])
    refusals = combine(messages, [1, 1, 1, 0], tmp_path / "mean", spec)
    assert [refusal.client for refusal in refusals] == ["c0", "c1", "c3"]
    assert load_state(tmp_path / "mean")["a"] == 1.0


def test_doubles_that_overflow_only_together(tmp_path):
    spec = {"a": ((1,), "float64")}
    states = {c: {"a": np.array([v])} for c, v in {"c0": 1.7e308, "c1": 1.7e308, "c2": 2.0}.items()}
    messages = send(tmp_path, states, spec, [list(states)])
    refusals = combine(messages, [1, 1, 1], tmp_path / "mean", spec)
    assert [refusal.client for refusal in refusals] == ["c0", "c1"]
    assert load_state(tmp_path / "mean")["a"] == 2.0


def test_largest_floats_have_a_mean(tmp_path):
    spec = {"a": ((1,), "float32")}
    top = np.finfo("float32").max
    states = {f"c{n}": {"a": np.array([top])} for n in range(7)}
    messages = send(tmp_path, states, spec, [list(states)])
    assert combine(messages, [1, 2, 3, 4, 5, 6, 7], tmp_path / "mean", spec) == []
    assert load_state(tmp_path / "mean")["a"] == top


def test_files_that_change_after_they_were_checked(tmp_path):
    states = random_states(4, SHAPES)
    messages = send(tmp_path, states, SHAPES, [list(states)[:2], list(states)[2:]])
    with open(tmp_path / "update.2.safetensors", "r+b") as file:
        file.truncate(messages[2].offset("scalar"))
    path = tmp_path / "update.2.safetensors"
    expected = [
        Refusal(client, "update.2.safetensors is missing or has changed")
        for client in ("c002", "c003")
    ]
    assert combine(messages, [1] * 4, tmp_path / "mean", SHAPES) == expected
    # Another file of the very same bytes, a link to one, and a FIFO that would block.
    path.unlink()
    assert combine(messages, [1] * 4, tmp_path / "mean", SHAPES) == expected
    messages = send(tmp_path, states, SHAPES, [list(states)[:2], list(states)[2:]])
    path.rename(tmp_path / "elsewhere")
    for put in (
        lambda: path.write_bytes((tmp_path / "elsewhere").read_bytes()),
        lambda: path.symlink_to(tmp_path / "elsewhere"),
        lambda: path.hardlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(path),
    ):
        put()
        assert combine(messages, [1] * 4, tmp_path / "mean", SHAPES) == expected
        path.unlink()


def test_nobody_left(tmp_path):
    spec = {"a": ((1,), "float32")}
    states = {c: {"a": np.array([np.nan], "float32")} for c in ("c0", "c1")}
    messages = send(tmp_path, states, spec, [list(states)])
    (tmp_path / "mean").write_text("as before")
    refusals = combine(messages, [1, 1], tmp_path / "mean", spec)
    assert [refusal.client for refusal in refusals] == ["c0", "c1"]
    assert combine(messages, [1, 1], tmp_path / "mean", spec, min_clients=0) == refusals
    with pytest.raises(UserError) as error:
        check_min_clients(0, 1, [Refusal("c2", "was late"), *refusals])
    assert "0 of 3 updates can be used" in str(error.value)
    assert "c2: was late; c0: NaN or Inf in tensor 'a'; c1: NaN" in str(error.value)
    assert combine([], [], tmp_path / "mean", spec) == []
    with pytest.raises(UserError, match="0 of 0"):
        check_min_clients(0, 0, [])
    assert (tmp_path / "mean").read_text() == "as before"
    assert not list(tmp_path.glob(".*"))


def test_too_few_left(tmp_path):
    check_min_clients(2, 2, [])
    many = [Refusal(f"c{n}", "late") for n in range(40)]
    with pytest.raises(UserError, match=r"3 of 43 .* min_clients is 4 .*and 30 more"):
        check_min_clients(3, 4, many)
    states = random_states(3, SHAPES)
    states["c001"]["scalar"][...] = np.nan
    messages = send(tmp_path, states, SHAPES, [list(states)])
    refusals = combine(messages, [1] * 3, tmp_path / "mean", SHAPES, min_clients=3)
    assert [refusal.client for refusal in refusals] == ["c001"]
    assert not (tmp_path / "mean").exists()
    assert combine(messages, [1] * 3, tmp_path / "mean", SHAPES, min_clients=2) == refusals
    assert (tmp_path / "mean").exists()


@pytest.mark.parametrize("tensor", [np.ones(2, "int64"), np.ones(2, "bool")])
def test_what_has_no_mean(tmp_path, tensor):
    with pytest.raises(UserError, match=r"'count' is (int64|bool), .*personal or reset"):
        combine([], [], tmp_path / "mean", spec_of({"count": tensor}))


def test_weights_that_weigh_nothing(tmp_path):
    spec = {"a": ((1,), "float32")}
    states = random_states(2, spec)
    messages = send(tmp_path, states, spec, [list(states)])
    with pytest.raises(UserError, match="zero"):
        combine(messages, [0, 0], tmp_path / "mean", spec)
    for weights in ([1], [1, -1], [1, np.nan], [1, np.inf]):
        with pytest.raises(ValueError, match="no weights"):
            combine(messages, weights, tmp_path / "mean", spec)


def test_nothing_shared(tmp_path):
    messages = send(tmp_path, {"c0": {}, "c1": {}}, {}, [["c0", "c1"]])
    assert combine(messages, [1, 1], tmp_path / "mean", {}) == []
    assert load_state(tmp_path / "mean", {}) == {}


# --- bounds on norms and weights

MODEL = {"bias": ((9,), "float32"), "deep": ((4, 5, 6), "float32"), "double": ((3,), "float64")}


def around(folder, norms, seed=0, spec=MODEL) -> tuple[dict, dict]:
    """Write a base model folder/base, and updates of it with these total norms."""
    random = np.random.default_rng(seed)

    def draw(scale=1.0):
        return {name: scale * random.standard_normal(shape) for name, (shape, _) in spec.items()}

    base = {name: value.astype(spec[name][1]) for name, value in draw(0.1).items()}
    save_state(folder / "base", base)
    states = {}
    for number, norm in enumerate(norms):
        step = draw()
        length = math.sqrt(sum(float((value**2).sum()) for value in step.values()))
        with np.errstate(over="ignore"):
            states[f"c{number:03}"] = {
                name: (base[name].astype("float64") + step[name] * (norm / length)).astype(kind)
                for name, (_, kind) in spec.items()
            }
    return base, states


def split(states, number) -> list[list[str]]:
    """Separate neighbours: deal clients to jobs in turn."""
    return [list(states)[job::number] for job in range(number)]


@pytest.mark.parametrize("factor", [1e6, 1e30, "largest"])
def test_an_update_far_too_long_is_refused_and_the_mean_is_the_others(tmp_path, factor):
    honest = np.random.default_rng(1).uniform(0.5, 2, 20)
    _, states = around(tmp_path, [*honest[:7], honest[7] * 1e6, *honest[8:]])
    if factor != "largest":
        _, states = around(tmp_path, [*honest[:7], honest[7] * factor, *honest[8:]])
    else:
        for value in states["c007"].values():
            value[...] = np.sign(value) * 3.4e38
    weights = [float(1 + number) for number in range(20)]
    assert all(np.isfinite(value).all() for value in states["c007"].values())
    written = set()
    for jobs in (1, 3, 20):
        folder = tmp_path / str(jobs)
        messages = send(folder, states, MODEL, split(states, jobs))
        bound = Bound(tmp_path / "base", 100)
        (refusal,) = combine(messages, weights, folder / "mean", MODEL, bound=bound)
        assert refusal.client == "c007" and "over 100 x the median" in refusal.reason
        written.add((folder / "mean").read_bytes())
    left = {client: value for client, value in states.items() if client != "c007"}
    expected = brute_force(left, weights[:7] + weights[8:], MODEL)
    got = load_state(tmp_path / "1" / "mean", MODEL)
    for name in MODEL:
        np.testing.assert_array_equal(got[name], expected[name])
        oracle = np.average([one[name] for one in left.values()], 0, weights[:7] + weights[8:])
        np.testing.assert_allclose(got[name], oracle, rtol=1e-6, atol=1e-9)
    assert len(written) == 1


@given(
    norms=st.lists(st.floats(0.02, 1.0), min_size=2, max_size=12),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
@settings(max_examples=30, deadline=None)
def test_honest_clients_that_differ_are_all_taken(tmp_path_factory, norms, scale):
    """Norms of honest clients may differ by a factor of 50."""
    folder = tmp_path_factory.mktemp("round")
    spec = {"a": ((40,), "float64")}
    _, states = around(folder, [norm * scale for norm in norms], spec=spec)
    messages = send(folder, states, spec, [list(states)])
    bound = Bound(folder / "base", 100)
    assert combine(messages, [1] * len(norms), folder / "mean", spec, bound=bound) == []
    expected = np.mean([one["a"] for one in states.values()], 0)
    np.testing.assert_allclose(load_state(folder / "mean")["a"], expected, rtol=1e-12)


@given(
    exponents=st.lists(st.integers(-4, 8), min_size=1, max_size=9),
    ratio=st.sampled_from([1.5, 150.0, 2e4]),
    chunk=st.integers(16, 60),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_who_is_refused_is_what_the_definition_says(
    tmp_path_factory, exponents, ratio, chunk, data
):
    """Refusal repeats without the refused clients until none is left to refuse; for any jobs."""
    folder = tmp_path_factory.mktemp("round")
    base, states = around(folder, [3.7 * 10.0**one for one in exponents])
    left = dict(states)
    size = math.sqrt(sum(float((value.astype("f8") ** 2).sum()) for value in base.values()))
    while True:
        lengths = {
            client: math.sqrt(
                sum(
                    float(((one[name].astype("f8") - base[name].astype("f8")) ** 2).sum())
                    for name in MODEL
                )
            )
            for client, one in left.items()
        }
        # The median counts as a twentieth of the model's norm at least.
        median = max(sorted(lengths.values())[(len(lengths) - 1) // 2], size / 20)
        far = {client for client, length in lengths.items() if length > ratio * median}
        if not far:
            break
        left = {client: one for client, one in left.items() if client not in far}
    messages = send(folder, states, MODEL, cut(list(states), data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "_CHUNK", chunk)
        bound = Bound(folder / "base", ratio)
        refusals = combine(messages, [1] * len(states), folder / "mean", MODEL, bound=bound)
    assert {refusal.client for refusal in refusals} == states.keys() - left.keys()
    got, expected = load_state(folder / "mean"), brute_force(left, [1] * len(left), MODEL)
    for name in MODEL:
        np.testing.assert_array_equal(got[name], expected[name])


def test_statistics_have_a_norm_of_their_own(tmp_path):
    """Statistics of raw features change much more than weights and must not hide them."""
    spec = {"weight": ((9,), "float32"), "norm.running_var": ((4,), "float32")}
    random = np.random.default_rng(0)
    base = {name: np.ones(shape, kind) for name, (shape, kind) in spec.items()}
    save_state(tmp_path / "base", base)
    states = {}
    for number in range(9):
        weight = base["weight"] + random.standard_normal(9).astype("float32")
        var = base["norm.running_var"] + (1000 * random.uniform(1, 2, 4)).astype("float32")
        states[f"c{number}"] = {"weight": weight, "norm.running_var": var}
    states["c3"]["weight"][2] = 400
    states["c6"]["norm.running_var"][1] = 1e6
    messages = send(tmp_path, states, spec, split(states, 3))
    bound = Bound(tmp_path / "base", 20)
    refusals = combine(messages, [1] * 9, tmp_path / "mean", spec, bound=bound)
    reasons = {refusal.client: refusal.reason for refusal in refusals}
    assert reasons.keys() == {"c3", "c6"}
    assert reasons["c3"].startswith("an update of norm") and "over 20 x" in reasons["c3"]
    assert reasons["c6"].startswith("statistics of norm") and "over 20 x" in reasons["c6"]


def test_the_bound_of_two_clients_and_of_one(tmp_path):
    """The median of two norms is the shorter one; of one norm, itself."""
    _, states = around(tmp_path, [1, 99, 101])
    bound = Bound(tmp_path / "base", 100)
    for pair, refused in ((("c000", "c001"), []), (("c000", "c002"), ["c002"])):
        folder = tmp_path / pair[1]
        both = {client: states[client] for client in pair}
        messages = send(folder, both, MODEL, [list(pair)])
        refusals = combine(messages, [1, 1], folder / "mean", MODEL, bound=bound)
        assert [refusal.client for refusal in refusals] == refused
        assert combine(messages[1:], [1], folder / "mean", MODEL, bound=bound) == []


def test_clients_who_did_not_move_do_not_lift_the_bound(tmp_path):
    """Clients with nothing to learn do not count: of five, three send unchanged models."""
    _, states = around(tmp_path, [0, 0, 1, 0, 1e9, 1, 1])
    messages = send(tmp_path, states, MODEL, [list(states)])
    bound = Bound(tmp_path / "base", 20)
    refusals = combine(messages, [1] * len(states), tmp_path / "mean", MODEL, bound=bound)
    assert [refusal.client for refusal in refusals] == ["c004"]


def test_liars_who_are_most_of_those_who_move_do_not_lift_the_bound(tmp_path):
    """Of 20, nine did not move and six lie: the median is of all, and so an honest norm."""
    _, states = around(tmp_path, [*[0] * 9, *[1] * 5, *[1e3] * 6])
    messages = send(tmp_path, states, MODEL, [list(states)])
    bound = Bound(tmp_path / "base", 20)
    refusals = combine(messages, [1] * 20, tmp_path / "mean", MODEL, bound=bound)
    assert [refusal.client for refusal in refusals] == [f"c{number:03}" for number in range(14, 20)]


def test_a_liar_among_idle_clients_is_refused(tmp_path):
    """Of 19 who send their model back and one who does not, nobody bounds the one."""
    _, states = around(tmp_path, [*[0] * 19, 1e4])
    messages = send(tmp_path, states, MODEL, [list(states)])
    for ratio, refused in ((20, ["c019"]), (0, [])):
        bound = Bound(tmp_path / "base", ratio)
        found = combine(messages, [1] * 20, tmp_path / "mean", MODEL, bound=bound)
        assert [refusal.client for refusal in found] == refused


@pytest.mark.parametrize("share", [0.0, 1e-3, 0.045])
def test_who_learns_among_clients_that_have_converged_is_not_refused(tmp_path, share):
    """The model's norm bounds its update where the others hardly move, or not at all."""
    base, _ = around(tmp_path, [])
    size = math.sqrt(sum(float(np.square(value, dtype="f8").sum()) for value in base.values()))
    # In the median's place, 2.23 / 0.10 would be over 20.
    for norm, refused in ((0.99, []), (1.01, ["c007"]), (1e4, ["c007"])):
        folder = tmp_path / str(norm)
        folder.mkdir()
        _, states = around(folder, [*[share * size] * 7, norm * size])
        messages = send(folder, states, MODEL, [list(states)])
        bound = Bound(folder / "base", 20)
        found = combine(messages, [1] * 8, folder / "mean", MODEL, bound=bound)
        assert [refusal.client for refusal in found] == refused
        if found:
            limit = f"over 20 x the median, counted as 0.05 of the model's norm: {size / 20:.3g}"
            assert limit in found[0].reason and f"of norm {norm * size:.3g}" in found[0].reason


def test_no_bound_and_a_bound_of_zero(tmp_path):
    _, states = around(tmp_path, [1, 1, 1e9])
    messages = send(tmp_path, states, MODEL, [list(states)])
    for bound in (None, Bound(tmp_path / "base", 0.0)):
        assert combine(messages, [1, 2, 3], tmp_path / "mean", MODEL, bound=bound) == []
        expected = brute_force(states, [1, 2, 3], MODEL)
        np.testing.assert_array_equal(load_state(tmp_path / "mean")["deep"], expected["deep"])


def test_a_poisoned_client_hides_no_other(tmp_path):
    """A NaN, an overflow of the norm, and a bad client visible only without these are found."""
    spec = {"a": ((3,), "float64")}
    _, states = around(tmp_path, [1, 1, 1, 1e4, 1, 1, 1], spec=spec)
    states["c001"]["a"][1] = np.nan
    states["c004"]["a"][2] = 1e200
    messages = send(tmp_path, states, spec, [list(states)])
    bound = Bound(tmp_path / "base", 100)
    refusals = combine(messages, [1] * 7, tmp_path / "mean", spec, bound=bound)
    assert [refusal.client for refusal in refusals] == ["c001", "c003", "c004"]
    left = {client: states[client] for client in ("c000", "c002", "c005", "c006")}
    expected = brute_force(left, [1] * 4, spec)["a"]
    np.testing.assert_array_equal(load_state(tmp_path / "mean")["a"], expected)


def test_one_nan_of_a_stack_costs_its_own_update_alone(tmp_path):
    """Only the client that sends a NaN or whose loss is 1e308 is refused, of 20 in one stack."""
    _, states = around(tmp_path, [1.0] * 20)
    states["c005"]["deep"][2, 2, 2] = np.nan
    clients, payload = list(states), Payload(MODEL)
    with MessageWriter(tmp_path, 1, clients, payload, ORIGIN) as writer:
        reports = [Report(c, 1, 1, 1e308 if c == "c011" else 1.0) for c in clients]
        rows = {name: np.stack([states[c][name] for c in clients]) for name in MODEL}
        writer.send(reports, rows)
    messages, refusals = read_messages(tmp_path, [clients], clients, payload, ORIGIN)
    bound = Bound(tmp_path / "base", 100)
    refusals += combine(messages, [1] * 19, tmp_path / "mean", MODEL, bound=bound)
    assert [refusal.client for refusal in refusals] == ["c011", "c005"]
    left = {client: states[client] for client in clients if client not in ("c005", "c011")}
    expected = brute_force(left, [1] * 18, MODEL)
    for name, value in load_state(tmp_path / "mean").items():
        np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize(("weighting", "most"), [("uniform", 1.1), ("utterances", 10.8)])
def test_what_one_of_twenty_can_do_below_the_bounds(tmp_path, weighting, most):
    """The effect of one liar within the default bounds, in lengths of an honest step."""
    rules = FedAvg(weighting=weighting)
    base = {"a": np.zeros(8)}
    save_state(tmp_path / "base", base)
    spec = spec_of(base)
    honest = np.full(8, 8**-0.5)
    for ratio, refused in ((19.9, []), (20.1, ["c19"])):
        folder = tmp_path / str(ratio)
        states = {f"c{number:02}": {"a": honest} for number in range(19)}
        states["c19"] = {"a": -ratio * honest}
        messages = send(folder, states, spec, split(states, 4))
        messages = [replace(one, utterances=10) for one in messages[:-1]] + [
            replace(messages[-1], utterances=10**6)
        ]
        bound = Bound(tmp_path / "base", rules.max_norm_ratio)
        weights = client_weights(rules, messages)
        refusals = combine(messages, weights, folder / "mean", spec, bound=bound)
        assert [refusal.client for refusal in refusals] == refused
        moved = honest - load_state(folder / "mean")["a"]
        assert np.linalg.norm(moved) <= (0 if refused else most) + 1e-9


@given(counts=st.lists(st.integers(0, 2**40), min_size=1, max_size=30), jobs=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_sums_of_counts_are_exact(tmp_path_factory, counts, jobs):
    folder = tmp_path_factory.mktemp("round")
    spec = {"counts": ((3,), "float64")}
    states = {
        f"c{number:03}": {"counts": np.array([count, 1, 2 * count + 1], "float64")}
        for number, count in enumerate(counts)
    }
    messages = send(folder, states, spec, split(states, jobs))
    ones = [1.0] * len(counts)
    assert combine(messages, ones, folder / "sum", spec, normalise=False) == []
    expected = [sum(counts), len(counts), 2 * sum(counts) + len(counts)]
    assert load_state(folder / "sum")["counts"].tolist() == expected


@given(
    counts=st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 3.5, 12.0, -0.25, 0.1, 90.0]), min_size=5, max_size=5),
        min_size=1,
        max_size=7,
    ),
    chunk=st.integers(1, 6),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_whose_values_are_out_of_bounds(tmp_path_factory, counts, chunk, data):
    """Bounds hold for elements and for a tensor's sum, however jobs divide it."""
    folder = tmp_path_factory.mktemp("round")
    spec = {"counts": ((5,), "float64"), "free": ((2,), "float32")}
    values = {"counts": Values(least=0.0, most=50.0, total=30.0, grid=0.25)}
    states = {
        f"c{number}": {"counts": np.array(own), "free": np.full(2, -90.1, "float32")}
        for number, own in enumerate(counts)
    }
    sound = {
        client: one
        for client, one in states.items()
        if all(0 <= x <= 50 and x * 4 == int(x * 4) for x in one["counts"])
        and math.fsum(one["counts"]) <= 30
    }
    messages = send(folder, states, spec, cut(list(states), data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "_CHUNK", max(2, chunk))
        ones = [1.0] * len(states)
        refusals = combine(messages, ones, folder / "sum", spec, values=values, normalise=False)
    assert {refusal.client for refusal in refusals} == states.keys() - sound.keys()
    assert all(refusal.reason.endswith("in tensor 'counts'") for refusal in refusals)
    if sound:
        rows = [one["counts"] for one in sound.values()]
        expected = [math.fsum(row) for row in zip(*rows, strict=True)]
        assert load_state(folder / "sum")["counts"].tolist() == expected


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return keyword_world.make_world(tmp_path_factory.mktemp("world"))


def open_round(world, path, *settings):
    """Open a round of all clients, weighted by their utterances, up to its aggregation."""
    settings = ("method_conf.weighting=utterances", "clients_per_round=1.0", *settings)
    keyword_world.begin(world, path, "fedavg", *settings)
    inside("sample", path, "--nj", 2).ok()
    for job in (1, 2):
        inside("train-local", path, "--job", job).ok()
    return path / "round_0001"


def sent(folder) -> dict[str, tuple[int, dict[str, np.ndarray]]]:
    """Return client -> (utterances, tensors), read by the library."""
    found = {}
    for table in sorted(folder.glob("update.*.tsv")):
        header, *rows = (line.split("\t") for line in table.read_text().splitlines())
        tensors = load_file(table.with_suffix(".safetensors"))
        for index, row in enumerate(rows):
            values = {name: value[index] for name, value in tensors.items()}
            found[row[0]] = int(row[header.index("utterances")]), values
    return found


def assert_mean(folder, weights: dict[str, float], states) -> None:
    """Check that the next state is the mean of these clients' tensors."""
    following = load_file(folder.parent / "round_0002" / "global.safetensors")
    for name, value in following.items():
        rows = [states[client][1][name].astype("float64") for client in weights]
        oracle = np.average(rows, 0, list(weights.values()))
        np.testing.assert_allclose(value, oracle, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("utterances", 10**9, "1000000000 utterances cannot be, it has 6 at most"),
        ("utterances", 7, "7 utterances cannot be, it has 6 at most"),
        ("steps", 10**12, "1000000000000 steps of 6 utterances cannot be, 4 are most"),
        ("steps", 5, "5 steps of 6 utterances cannot be, 4 are most"),
        ("seconds", 1e9, "1e+09 seconds cannot be, the round has taken"),
        ("loss", 1e29, "a loss of 1e+29 cannot be"),
    ],
)
def test_what_no_client_can_have_done(world, tmp_path, column, value, said):
    """Clients with impossible figures are refused, as if they had sent nothing."""
    folder = open_round(world, tmp_path / "exp")
    sizes = {client: size for client, (size, _) in sent(folder).items()}
    assert sorted(sizes.values()) == sorted(keyword_world.SIZES)
    (liar,) = (client for client, size in sizes.items() if size == 6)
    set_row(folder, liar, column, value)
    states = sent(folder)
    told = inside("aggregate", tmp_path / "exp").ok().err
    assert_mean(folder, {client: size for client, size in sizes.items() if client != liar}, states)
    rows = {row["client"]: row for row in ledger(tmp_path / "exp")}
    assert said in rows[liar]["status"] and rows[liar]["status"] in told
    assert {row["status"] for client, row in rows.items() if client != liar} == {"ok"}
    assert float(rows[liar]["client_epochs"]) == float(rows[liar]["seconds"]) == 0


def set_row(folder, client, column, value) -> None:
    """Change a field of a client's row."""
    for table in folder.glob("update.*.tsv"):
        header, *rows = (line.split("\t") for line in table.read_text().splitlines())
        for row in rows:
            if row[0] == client:
                row[header.index(column)] = str(value)
        table.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))


def test_seconds_are_at_most_those_since_sampling(world, tmp_path):
    """The server's own clock bounds seconds, whatever a client reports within a day."""
    begun = time.time()
    folder = open_round(world, tmp_path / "exp")
    liar = min(sent(folder))
    set_row(folder, liar, "seconds", 80_000)
    inside("aggregate", tmp_path / "exp").ok()
    (row,) = (row for row in ledger(tmp_path / "exp") if row["client"] == liar)
    assert row["status"] == "ok" and 0 < float(row["seconds"]) <= time.time() - begun


@pytest.mark.parametrize("ratio", [2, 0])
def test_weights_over_a_multiple_of_the_median_are_lowered(world, tmp_path, ratio):
    """Of 1, 3, 6, 9, 17, 21 and 40 utterances the last two count as 18; the ledger says so."""
    folder = open_round(world, tmp_path / "exp", f"method_conf.max_weight_ratio={ratio}")
    states = sent(folder)
    sizes = {client: size for client, (size, _) in states.items()}
    told = inside("aggregate", tmp_path / "exp").ok().err
    weights = {client: min(size, 18) if ratio else size for client, size in sizes.items()}
    assert_mean(folder, weights, states)
    status = {row["client"]: row["status"] for row in ledger(tmp_path / "exp")}
    for client, size in sizes.items():
        lowered = bool(ratio) and size > 18
        assert (f"{client}: weight {size} lowered to 18" in told) == lowered
        assert status[client] == ("weight lowered" if lowered else "ok")


def test_clients_without_utterances_do_not_bound_the_others(world, tmp_path):
    """The median is taken over clients with positive weight."""
    folder = open_round(world, tmp_path / "exp", "method_conf.max_weight_ratio=100")
    for table in folder.glob("update.*.tsv"):
        text = table.read_text()
        for size in (3, 6, 9, 17, 21):
            text = text.replace(f"\t{size}\t4\t", "\t0\t4\t", 1)
        table.write_text(text)
    states = sent(folder)
    weights = {client: size for client, (size, _) in states.items() if size}
    assert sorted(weights.values()) == [1, 40]
    inside("aggregate", tmp_path / "exp").ok()
    assert_mean(folder, weights, states)


@pytest.mark.parametrize("ratio", [100, 0])
def test_a_client_whose_update_is_far_too_long(world, tmp_path, ratio):
    folder = open_round(world, tmp_path / "exp", f"method_conf.max_norm_ratio={ratio}")
    path = folder / "update.1.safetensors"
    tensors = load_file(path)
    for value in tensors.values():
        value[1] *= 1e20
    save_file(tensors, path)
    liar = (folder / "update.1.tsv").read_text().splitlines()[2].split("\t")[0]
    states = sent(folder)
    said = inside("aggregate", tmp_path / "exp").ok().err
    weights = {c: size for c, (size, _) in states.items() if c != liar or not ratio}
    assert_mean(folder, weights, states)
    status = {row["client"]: row["status"] for row in ledger(tmp_path / "exp")}
    refused = [client for client, text in status.items() if text != "ok"]
    assert refused == ([liar] if ratio else [])
    assert not ratio or ("over 100 x the median" in status[liar] and status[liar] in said)


def test_memory_stays_under_three_models(tmp_path):
    parameters, clients = 2_000_000, [f"c{n}" for n in range(8)]
    spec = {"a": ((parameters,), "float32")}
    tensors = {"a": np.ones(parameters, "float32")}
    send(tmp_path, dict.fromkeys(clients, tensors), spec, [clients])
    save_state(tmp_path / "base", tensors)
    script = f"""
import sys
from tests.bench.bench_aggregate import peak
from fedtools.exchange.messages import Payload, read_messages
from fedtools.exchange.origin import Origin
from fedtools.server.aggregate import Bound, combine
from pathlib import Path
folder, spec = sys.argv[1], {spec}
messages, _ = read_messages(Path(folder), [{clients}], {clients}, Payload(spec), {ORIGIN})
bound = Bound(Path(folder) / "base", 100)
before = peak()
assert combine(messages, [1] * 8, folder + "/mean", spec, bound=bound) == []
print(peak() - before)
"""
    grown = int(run(sys.executable, "-c", script, tmp_path).ok().out)
    assert grown < 3 * 4 * parameters
