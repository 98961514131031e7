"""Robust rules equal what their papers say, written apart; streamed from files in any cut."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_aggregate import cut, send, split
from threadpoolctl import threadpool_limits

from fedtools.core.errors import UserError
from fedtools.exchange.states import load_state, save_state
from fedtools.exchange.values import of_model
from fedtools.server import aggregate, updates
from fedtools.server.aggregate import Bound
from fedtools.server.by_rule import Given, Ruled, combine_by_rule
from fedtools.server.products import Adapters
from fedtools.server.robust import RULES, make_rule

# With short rows, rows of one element, a row longer than a block, and BatchNorm statistics.
SPEC = {
    "bias": ((1,), "float32"),
    "deep": ((5, 13), "float32"),
    "double": ((7,), "float64"),
    "norm.running_mean": ((4,), "float32"),
    "norm.running_var": ((4,), "float32"),
}
RANDOM = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _same_numbers():
    """Draw the same numbers in each test, whichever others run."""
    global RANDOM
    RANDOM = np.random.default_rng(5)


# --- the papers, on a matrix of updates (clients, parameters)


def clip(moved, weights, bound):
    """Sun et al. 2019, one client after the other."""
    found = np.zeros(moved.shape[1])
    for update, weight in zip(moved, weights, strict=True):
        length = math.sqrt(math.fsum(float(value) ** 2 for value in update))
        found += weight / sum(weights) * update * (min(1, bound / length) if length else 1)
    return found


def krum_order(moved, dishonest):
    """Blanchard et al. 2017: the clients by their scores, in exact arithmetic, first ones first."""
    exact = [[Fraction(float(value)) for value in update] for update in moved]
    apart = [
        [sum((a - b) ** 2 for a, b in zip(one, two, strict=True)) for two in exact] for one in exact
    ]
    number = len(exact)
    closest = max(0, number - dishonest - 2)
    scores = []
    for client in range(number):
        others = sorted(apart[client][other] for other in range(number) if other != client)
        scores.append(sum(others[:closest], Fraction(0)))
    return sorted(range(number), key=lambda client: (scores[client], client))


def multi_krum(moved, dishonest):
    order = krum_order(moved, dishonest)
    return moved[order[: len(moved) - dishonest]].mean(0)


def geometric_median(moved, weights, iterations, smoothing):
    """Pillutla et al. 2022, algorithm 2, on the vectors themselves."""
    point = np.average(moved, axis=0, weights=weights)
    for _ in range(iterations):
        apart = np.array([np.linalg.norm(point - update) for update in moved])
        point = np.average(moved, axis=0, weights=np.array(weights) / np.maximum(smoothing, apart))
    return point


def fltrust(moved, root, lengthen=True):
    """Cao et al. 2021, algorithm 2."""
    total, trusts, length = np.zeros(moved.shape[1]), 0.0, np.linalg.norm(root)
    for update in moved:
        own = np.linalg.norm(update)
        if own == 0 or length == 0:
            continue
        trust = max(0.0, float(update @ root) / (own * length))
        scale = length / own if lengthen else min(1.0, length / own)
        total, trusts = total + trust * scale * update, trusts + trust
    return total / trusts if trusts else total


def low_median(numbers):
    return sorted(numbers)[(len(numbers) - 1) // 2]


PARTS = {
    "an update": ["bias", "deep", "double"],
    "statistics": ["norm.running_mean", "norm.running_var"],
}


def by_paper(name, options, states, base, weights, root=None, parts=None):
    """Return the next state by a rule, and the bound of clip by part."""
    found, bounds = {}, {}
    for part, names in (parts or PARTS).items():
        rows = [flat(one, names) - flat(base, names) for one in states.values()]
        moved, number = np.array(rows), len(states)
        own = flat(root, names) - flat(base, names) if root else None
        if name == "median":
            step = np.median(moved, axis=0)
        elif name == "multi_krum":
            share = math.ceil(Fraction(str(options.get("attackers", 0.2))) * number)
            step = multi_krum(moved, max(0, min(share, (number - 3) // 2)))
        elif name == "geometric_median":
            step = geometric_median(moved, weights, options.get("iterations", 10), 1e-6)
        elif name == "fltrust":
            step = fltrust(moved, own, part != "statistics")
        else:
            bounds[part] = low_median([float(np.linalg.norm(update)) for update in moved])
            fixed = options.get("norm" if part == "an update" else "statistics")
            if fixed == "server":
                bounds[part] = float(np.linalg.norm(own))
            elif fixed:
                bounds[part] = fixed
            step = clip(moved, weights, bounds[part])
        found |= shaped(flat(base, names) + step, base, names)
    return found, bounds


def flat(state, names):
    return np.concatenate([np.ravel(state[name]).astype("f8") for name in names])


def shaped(vector, like, names):
    found, at = {}, 0
    for name in names:
        size = like[name].size
        found[name], at = vector[at : at + size].reshape(like[name].shape), at + size
    return found


# --- the same by the server


def combined(folder, states, base, options, weights=None, jobs=None, root=None, **more) -> Ruled:
    """Write messages, and the next state folder/next by a rule."""
    folder.mkdir(exist_ok=True)
    spec = more.pop("spec", SPEC)
    save_state(folder / "base", base)
    if root:
        save_state(folder / "root", root)
    messages = send(folder, states, spec, jobs or [list(states)])
    more = {"bound": Bound(folder / "base", more.pop("ratio", 0.0)), **more}
    adapters = Adapters(more.pop("how", "mean"), folder / "base", "round 1")
    given = Given(
        rule=make_rule(options, "options"),
        adapters=adapters,
        root=folder / "root" if root else None,
        values=of_model(spec),
        **more,
    )
    out = folder / "next"
    return combine_by_rule(messages, weights or [1.0] * len(states), out, spec, given)


OPTIONS = [
    {"rule": "clip"},
    {"rule": "clip", "norm": 2.5},
    {"rule": "clip", "norm": "server", "statistics": 0.5},
    {"rule": "median"},
    {"rule": "multi_krum"},
    {"rule": "multi_krum", "attackers": 0.45},
    {"rule": "multi_krum", "attackers": 0.1},
    {"rule": "geometric_median"},
    {"rule": "geometric_median", "iterations": 3},
    {"rule": "fltrust"},
]
NAMES = [" ".join(map(str, one.values())) for one in OPTIONS]


def needs_root(options) -> bool:
    return options["rule"] == "fltrust" or options.get("norm") == "server"


def drawn(random, number, spread=1.0, spec=SPEC):
    """Return a base model, updates around a common direction, and one of the server's own."""
    base = {name: random.normal(2, 0.1, shape).astype(kind) for name, (shape, kind) in spec.items()}
    common = {name: random.normal(0, 0.2, shape) for name, (shape, _) in spec.items()}
    states = {
        f"c{k:02}": {
            name: (base[name] + common[name] + spread * random.normal(0, 0.2, shape)).astype(kind)
            for name, (shape, kind) in spec.items()
        }
        for k in range(number + 1)
    }
    root = states.pop(f"c{number:02}")
    return base, states, root


def test_all_rules_are_tested():
    assert set(RULES.names()) == {"mean", *(one["rule"] for one in OPTIONS)}


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("number", [1, 2, 3, 12])
def test_a_rule_is_its_paper(tmp_path, options, number):
    base, states, root = drawn(RANDOM, number)
    weights = [float(one) for one in RANDOM.integers(1, 9, number)]
    root = root if needs_root(options) else None
    done = combined(tmp_path / "r", states, base, options, weights, root=root, spec=SPEC)
    expected, bounds = by_paper(options["rule"], options, states, base, weights, root)
    found = load_state(tmp_path / "r" / "next", SPEC)
    for name in SPEC:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6, err_msg=name)
    assert done.refusals == []
    assert done.recorded == pytest.approx(bounds, rel=1e-6)
    assert (found["norm.running_var"] > 0).all()


SMALL = {"a": ((3,), "float32"), "b": ((), "float64"), "n.running_mean": ((2,), "float32")}
SMALL_PARTS = {"an update": ["a", "b"], "statistics": ["n.running_mean"]}


@given(
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=7),
    root=st.lists(st.integers(-2, 2), min_size=6, max_size=6),
    heavy=st.integers(1, 5),
    options=st.sampled_from(OPTIONS),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_ties_zeros_and_equal_updates(tmp_path_factory, rows, root, heavy, options, data):
    """Whole numbers make many of them; blocks of a few values cross every boundary."""
    folder = tmp_path_factory.mktemp("round")

    def state(values):
        one = shaped(np.array(values, "f8"), {n: np.zeros(s) for n, (s, _) in SMALL.items()}, SMALL)
        return {name: np.asarray(one[name], kind) for name, (_, kind) in SMALL.items()}

    states = {f"c{k}": state(row) for k, row in enumerate(rows)}
    base, weights = state([1, 0, -1, 1, 0, 1]), [float(heavy)] + [1.0] * (len(rows) - 1)
    trained = state(root) if needs_root(options) else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregate, "_CHUNK", data.draw(st.integers(2, 9)))
        patch.setattr(aggregate, "_LONG", 2)
        patch.setattr(updates, "_TOGETHER", data.draw(st.integers(1, 20)))
        patch.setattr(updates, "_MULTIPLIED", 1)
        patch.setattr(updates, "_LEAST", data.draw(st.integers(1, 3)))
        patch.setattr(updates, "_SORTED", data.draw(st.integers(1, 3)))
        jobs = cut(list(states), data)
        done = combined(folder, states, base, options, weights, jobs, trained, spec=SMALL)
    parts = SMALL_PARTS
    expected, _ = by_paper(options["rule"], options, states, base, weights, trained, parts)
    found = load_state(folder / "next", SMALL)
    for name in SMALL:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6, err_msg=name)
    assert done.refusals == []


def test_equal_scores_that_rounding_makes_unequal(tmp_path):
    """Each client sends the same values, moved on by two places: all have the same distances."""
    values, spec = RANDOM.normal(30, 1, size=14), {"a": ((14,), "float64")}
    states = {f"c{k}": {"a": np.roll(values, 2 * k)} for k in range(7)}
    base = {"a": np.zeros(14)}
    done = combined(tmp_path / "r", states, base, {"rule": "multi_krum"}, spec=spec)
    expected = np.mean([states[f"c{k}"]["a"] for k in range(5)], axis=0)
    np.testing.assert_allclose(load_state(tmp_path / "r" / "next")["a"], expected, atol=1e-12)
    assert done.statuses.keys() == {"c5", "c6"}


def test_what_the_geometric_median_minimises(tmp_path):
    """Not algorithm against algorithm: no point nearby has a smaller sum of distances."""
    base, states, _ = drawn(RANDOM, 9)
    options = {"rule": "geometric_median", "iterations": 200}
    combined(tmp_path / "r", states, base, options)
    found = load_state(tmp_path / "r" / "next")
    for names in PARTS.values():
        points = np.array([flat(one, names) for one in states.values()])

        def total(point, points=points):
            return np.linalg.norm(points - point, axis=1).sum()

        best = flat(found, names)
        for _ in range(200):
            assert total(best) <= total(best + RANDOM.normal(0, 0.02, len(best))) + 1e-9


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_any_jobs_and_threads_give_the_same_bytes(tmp_path, options, monkeypatch):
    monkeypatch.setattr(aggregate, "_CHUNK", 4000)
    monkeypatch.setattr(aggregate, "_LONG", 1000)
    monkeypatch.setattr(updates, "_TOGETHER", 9000)
    # In float64 the last bit of every share shows.
    spec = {
        "long": ((3, 4001), "float64"),
        "short": ((50,), "float32"),
        "x.running_var": ((9,), "float64"),
    }
    base, states, root = drawn(RANDOM, 11, spec=spec)
    weights, written = [float(one) for one in RANDOM.integers(1, 9, 11)], set()
    for jobs, threads in ((1, 1), (3, 2), (11, 4)):
        monkeypatch.setattr(updates.os, "sched_getaffinity", lambda _, n=threads: range(n))
        folder = tmp_path / str(jobs)
        with threadpool_limits(threads, "blas"):
            combined(
                *(folder, states, base, options, weights, split(states, jobs)),
                root=root if needs_root(options) else None,
                spec=spec,
            )
        written.add((folder / "next").read_bytes())
    assert len(written) == 1


def test_a_stack_of_all_values_at_once_is_the_stream(tmp_path, monkeypatch):
    """Blocks of 16 values against one block: sums differ by rounding alone."""
    base, states, root = drawn(RANDOM, 9)
    for place, options in enumerate(OPTIONS):
        found = []
        for size in (16, 1 << 20):
            monkeypatch.setattr(updates, "_TOGETHER", size)
            monkeypatch.setattr(updates, "_MULTIPLIED", size)
            monkeypatch.setattr(updates, "_LEAST", 1)
            monkeypatch.setattr(updates, "_SORTED", size)
            trained = root if needs_root(options) else None
            folder = tmp_path / f"{place}-{size}"
            combined(folder, states, base, options, root=trained)
            found.append(load_state(folder / "next"))
        for name in SPEC:
            np.testing.assert_allclose(found[0][name], found[1][name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("options", [OPTIONS[0], *OPTIONS[3:5], OPTIONS[9]])
def test_memory_is_that_of_blocks(tmp_path, options, monkeypatch):
    """Not that of all clients' tensors, 24 MB, nor of one in float64 for each thread."""
    monkeypatch.setattr(aggregate, "_CHUNK", 4000)
    monkeypatch.setattr(aggregate, "_LONG", 1000)
    monkeypatch.setattr(updates, "_TOGETHER", 16_000)
    monkeypatch.setattr(updates, "_MULTIPLIED", 16_000)
    size = 200_000
    spec = {"a": ((size,), "float32")}
    states = {f"c{k:02}": {"a": np.full(size, k + 1, "float32")} for k in range(30)}
    base, root = {"a": np.zeros(size, "float32")}, {"a": np.ones(size, "float32")}
    messages = send(tmp_path, states, spec, split(states, 3))
    save_state(tmp_path / "base", base)
    save_state(tmp_path / "root", root)
    rule, bound = make_rule(options, ""), Bound(tmp_path / "base", 0.0)
    own = tmp_path / "root" if needs_root(options) else None
    given = Given(rule, bound, Adapters("mean", tmp_path / "base", ""), own)
    tracemalloc.start()
    combine_by_rule(messages, [1.0] * 30, tmp_path / "next", spec, given)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3e6


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("factor", [10.0, -10.0])
def test_replacement_by_a_tenth_leads_no_rule_far(tmp_path, options, factor):
    """One of ten clients sends another model, ten times as far as an honest one would go."""
    base, states, root = drawn(RANDOM, 10, spread=0.5)
    if options.get("norm") == 2.5:
        options = {**options, "norm": 2.0}
    honest = list(states)[1:]
    for name, value in states["c00"].items():
        far = RANDOM.normal(0, 0.2, value.shape)
        # A variance that is negative would be refused.
        far = abs(far) if name.endswith("var") else factor / 10 * far
        states["c00"][name] = (base[name] + 10 * far).astype(value.dtype)
    names = PARTS["an update"]
    good = np.mean([flat(states[one], names) for one in honest], axis=0) - flat(base, names)
    length = np.linalg.norm(good)
    off = {}
    for rule in (options, {"rule": "mean"}):
        folder = tmp_path / rule["rule"]
        combined(folder, states, base, rule, root=root if needs_root(rule) else None)
        step = flat(load_state(folder / "next"), names) - flat(base, names)
        off[rule["rule"]] = np.linalg.norm(step - good) / length
    assert off["mean"] > 0.8
    assert off[options["rule"]] < 0.4


def test_who_was_clipped_or_left_out(tmp_path):
    base, states, root = drawn(RANDOM, 10, spread=0.3)
    names = PARTS["an update"]
    for name in names:
        opposite = base[name] - (states["c03"][name] - base[name])
        states["c03"][name] = (4 * opposite - 3 * base[name]).astype(base[name].dtype)
    said = {}
    for options in ({"rule": "clip", "norm": 3.0}, *OPTIONS[3:]):
        trained = root if needs_root(options) else None
        done = combined(tmp_path / "r", states, base, options, root=trained)
        said[options["rule"], options.get("attackers")] = done.statuses
    lengths = {c: np.linalg.norm(flat(s, names) - flat(base, names)) for c, s in states.items()}
    assert [client for client, length in lengths.items() if length > 3] == ["c03"]
    clipped = said["clip", None]
    assert clipped["c03"] == "clipped" and set(clipped.values()) == {"clipped"}
    # The others are those whose statistics are longer than the median.
    statistics = {
        c: np.linalg.norm(flat(s, PARTS["statistics"]) - flat(base, PARTS["statistics"]))
        for c, s in states.items()
    }
    over = {c for c, length in statistics.items() if length > low_median(statistics.values())}
    assert set(clipped) == over | {"c03"}
    left_out = "left out by the robust rule"
    assert said["fltrust", None] == {"c03": left_out}
    assert said["multi_krum", 0.1] == {"c03": left_out}
    assert len(said["multi_krum", None]) == 2 and len(said["multi_krum", 0.45]) == 3
    assert said["median", None] == said["geometric_median", None] == {}


@pytest.mark.parametrize("weights", [[1.0] * 6, [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]])
def test_a_clip_that_nobody_reaches_has_the_bytes_of_the_mean(tmp_path, weights):
    base, states, _ = drawn(RANDOM, 6)
    wide = {"rule": "clip", "norm": 50, "statistics": 50}
    done = combined(tmp_path / "r", states, base, wide, weights)
    aggregate.combine(send(tmp_path / "m", states, SPEC, [list(states)]), weights,
                      tmp_path / "mean", SPEC)  # fmt: skip
    assert (tmp_path / "r" / "next").read_bytes() == (tmp_path / "mean").read_bytes()
    assert done.statuses == {}


def test_a_recorded_bound_stays(tmp_path):
    base, states, _ = drawn(RANDOM, 5)
    kept = {"an update": 0.25, "statistics": 0.125}
    done = combined(tmp_path / "r", states, base, {"rule": "clip"}, recorded=kept)
    found = load_state(tmp_path / "r" / "next")
    for part, names in PARTS.items():
        moved = np.array([flat(one, names) - flat(base, names) for one in states.values()])
        step = clip(moved, [1.0] * 5, kept[part])
        np.testing.assert_allclose(flat(found, names), flat(base, names) + step, atol=1e-6)
    assert done.recorded == {}


def test_where_most_do_not_move_nothing_is_recorded_and_nothing_moves(tmp_path):
    base, states, _ = drawn(RANDOM, 5)
    for client in ("c00", "c02", "c04"):
        states[client] = base
    done = combined(tmp_path / "r", states, base, {"rule": "clip"})
    assert done.recorded == {}
    for name, value in load_state(tmp_path / "r" / "next").items():
        np.testing.assert_allclose(value, base[name], rtol=1e-15)


def test_nobody_trusted_and_nobody_there(tmp_path):
    base, states, root = drawn(RANDOM, 3, spread=0.1)
    mirrored = {name: (2.0 * base[name] - root[name]).astype(root[name].dtype) for name in root}
    combined(tmp_path / "r", states, base, {"rule": "fltrust"}, root=mirrored)
    combined(tmp_path / "root", states, base, {"rule": "fltrust"}, root=base)
    for folder in ("r", "root"):
        for name, value in load_state(tmp_path / folder / "next").items():
            np.testing.assert_array_equal(value, base[name])
    rule = make_rule({"rule": "clip", "norm": "server"}, "")
    given = Given(rule, Bound(tmp_path / "r" / "base", 20), Adapters("mean", tmp_path, ""))
    given = Given(rule, given.bound, given.adapters, tmp_path / "r" / "root")
    done = combine_by_rule([], [], tmp_path / "next", SPEC, given, min_clients=0)
    for name, value in load_state(tmp_path / "next").items():
        np.testing.assert_array_equal(value, base[name])
    names = PARTS["an update"]
    length = np.linalg.norm(flat(mirrored, names) - flat(base, names))
    assert done.recorded["an update"] == pytest.approx(length, rel=1e-6)


def test_variances_stay_positive_where_the_root_goes_far(tmp_path):
    """Lengthened to the root's, statistics would go below zero."""
    base, states, root = drawn(RANDOM, 3, spread=0.1)
    names = ("norm.running_mean", "norm.running_var")
    for one in states.values():
        one["norm.running_var"] = base["norm.running_var"] * np.float32(0.9)
        one["norm.running_mean"] = base["norm.running_mean"].copy()
    root["norm.running_var"] = base["norm.running_var"] * np.float32(0.05)
    root["norm.running_mean"] = base["norm.running_mean"] + np.float32(30)
    combined(tmp_path / "r", states, base, {"rule": "fltrust"}, root=root)
    found = load_state(tmp_path / "r" / "next")
    np.testing.assert_allclose(found[names[1]], 0.9 * base[names[1]], rtol=1e-6)


@pytest.mark.parametrize("options", [OPTIONS[0], *OPTIONS[3:5], OPTIONS[7]])
def test_what_is_refused_before_a_rule_sees_it(tmp_path, options):
    """NaN, values that overflow, a negative variance, a missing file, and updates too long."""
    base, states, _ = drawn(RANDOM, 9)
    states["c01"]["deep"][2, 3] = np.nan
    states["c03"]["double"][1] = 1e200
    states["c04"]["norm.running_var"][0] = -1
    states["c06"]["bias"][0] = 1e6
    done = combined(tmp_path / "r", states, base, options, ratio=20.0)
    reasons = {refusal.client: refusal.reason for refusal in done.refusals}
    assert reasons.keys() == {"c01", "c03", "c04", "c06"}
    assert reasons["c01"] == "NaN or Inf in tensor 'deep'"
    assert "norm inf" in reasons["c03"] and "-1 is below 0" in reasons["c04"]
    assert "over 20 x the median" in reasons["c06"]
    left = {client: one for client, one in states.items() if client not in reasons}
    expected, _ = by_paper(options["rule"], options, left, base, [1.0] * 5)
    for name, value in load_state(tmp_path / "r" / "next").items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [OPTIONS[0], *OPTIONS[3:5], OPTIONS[9]])
def test_a_negative_variance_alone_is_refused(tmp_path, options):
    base, states, root = drawn(RANDOM, 4)
    states["c02"]["norm.running_var"][0] = -1
    root = root if needs_root(options) else None
    (refusal,) = combined(tmp_path / "r", states, base, options, root=root).refusals
    assert refusal.client == "c02" and "-1 is below 0" in refusal.reason


def test_a_file_that_changes_and_weights_of_zero(tmp_path):
    base, states, _ = drawn(RANDOM, 4)
    save_state(tmp_path / "base", base)
    messages = send(tmp_path, states, SPEC, [list(states)[:2], list(states)[2:]])
    rule = make_rule({"rule": "geometric_median"}, "")
    bound = Bound(tmp_path / "base", 20.0)
    given = Given(rule, bound, Adapters("mean", tmp_path / "base", ""))
    with pytest.raises(UserError, match="zero"):
        combine_by_rule(messages, [0.0] * 4, tmp_path / "next", SPEC, given)
    assert not (tmp_path / "next").exists()
    with open(tmp_path / "update.2.safetensors", "r+b") as file:
        file.truncate(messages[2].offset("deep"))
    done = combine_by_rule(messages, [1.0] * 4, tmp_path / "next", SPEC, given, min_clients=3)
    assert [one.client for one in done.refusals] == ["c02", "c03"]
    assert "missing or has changed" in done.refusals[0].reason
    assert not (tmp_path / "next").exists()


# --- adapters

INPUTS, OUTPUTS, RANK = 9, 7, 2
ADAPTED = {
    "head.weight": ((3,), "float32"),
    "low.lora_a": ((RANK, INPUTS), "float32"),
    "low.lora_b": ((OUTPUTS, RANK), "float32"),
    "up.lora_a": ((RANK, OUTPUTS), "float32"),
    "up.lora_b": ((INPUTS, RANK), "float32"),
}
LAYERS = ("low", "up")


def product(state, layer):
    return state[f"{layer}.lora_b"].astype("f8") @ state[f"{layer}.lora_a"].astype("f8")


def whole(state):
    """Return the head, and the products, as one vector."""
    products = [product(state, layer).ravel() for layer in LAYERS]
    return np.concatenate([state["head.weight"].astype("f8"), *products])


def shares_by_paper(options, moved, root, weights):
    """Return each update's share, found from the paper's result on coordinates of its own."""
    number = len(moved)
    # In the span of the updates a combination is known by its coordinates.
    basis, _ = np.linalg.qr(moved.T)
    inside = moved @ basis
    if options["rule"] == "clip":
        bound = options.get("norm") or low_median(np.linalg.norm(moved, axis=1).tolist())
        step = clip(inside, weights, bound)
    elif options["rule"] == "multi_krum":
        share = math.ceil(0.2 * number)
        step = multi_krum(inside, max(0, min(share, (number - 3) // 2)))
    elif options["rule"] == "geometric_median":
        step = geometric_median(inside, weights, 10, 1e-6)
    else:
        return np.linalg.lstsq(moved.T, fltrust(moved, root), rcond=None)[0]
    return np.linalg.lstsq(inside.T, step, rcond=None)[0]


@pytest.mark.parametrize("how", ["mean", "svd", "residual"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4], OPTIONS[7], OPTIONS[9]])
@pytest.mark.parametrize("together", [1 << 22, 200])
def test_lengths_of_adapters_are_those_of_products(
    tmp_path, options, how, together, monkeypatch, capsys
):
    monkeypatch.setattr("fedtools.server.changed_products._TOGETHER", together)
    base, states, root = drawn(RANDOM, 6, spec=ADAPTED)
    for one in (*states.values(), root):
        # The same product as other factors: what counts is not how it is factored.
        scale = np.float32(RANDOM.uniform(0.5, 2))
        one["low.lora_a"] *= scale
        one["low.lora_b"] /= scale
    delta = {
        f"{layer}.lora_delta": RANDOM.normal(size=product(base, layer).shape).astype("f4")
        for layer in LAYERS
    }
    weights = [float(one) for one in RANDOM.integers(1, 5, 6)]
    combined(
        *(tmp_path / "r", states, base | delta, options, weights),
        root=root if needs_root(options) else None,
        spec=ADAPTED,
        how=how,
    )
    moved = np.array([whole(one) - whole(base) for one in states.values()])
    shares = shares_by_paper(options, moved, whole(root) - whole(base), weights)
    found = load_state(tmp_path / "r" / "next")

    rows = list(states.values())

    def mixed(of):
        changed = [share * (of(one) - of(base)) for share, one in zip(shares, rows, strict=True)]
        return of(base) + np.sum(changed, axis=0)

    for name in ADAPTED if how == "mean" else ["head.weight"]:
        expected = mixed(lambda one, name=name: one[name].astype("f8"))
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=3e-6)
    for layer in LAYERS if how != "mean" else ():
        expected = mixed(lambda one, layer=layer: product(one, layer))
        if how == "svd":
            left, values, right = np.linalg.svd(expected)
            expected = left[:, :RANK] * values[:RANK] @ right[:RANK]
            np.testing.assert_allclose(product(found, layer), expected, rtol=0, atol=2e-5)
        else:
            total = product(found, layer) + found[f"{layer}.lora_delta"]
            expected = expected + delta[f"{layer}.lora_delta"]
            np.testing.assert_allclose(total, expected, rtol=0, atol=2e-5)


def test_products_that_do_not_change_are_at_distance_zero(tmp_path):
    """Two clients with other factors of the very same product are one point for Krum."""
    base, states, _ = drawn(RANDOM, 5, spec=ADAPTED)
    twin = {name: value.copy() for name, value in states["c00"].items()}
    twin["low.lora_a"] *= np.float32(4)
    twin["low.lora_b"] /= np.float32(4)
    states = {"c00": states["c00"], "c01": twin, "c02": states["c02"], "c03": states["c03"]}
    # Of four clients none may be an attacker: a score is the distance to the closest two others.
    far = {name: (value + np.float32(3)).astype("f4") for name, value in base.items()}
    states["c04"] = far
    done = combined(tmp_path / "r", states, base, {"rule": "multi_krum"}, spec=ADAPTED)
    assert done.statuses == {"c04": "left out by the robust rule"}


# --- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attackers": 0.1}, "attackers is an option of a rule, and no rule is named; add rule"),
        ({"rule": "multikrum"}, "unknown robust rule 'multikrum', did you mean 'multi_krum'?"),
        ({"rule": "multi_krum", "attackers": 0.5}, "should be less than 0.5"),
        ({"rule": "multi_krum", "attackers": -0.1}, "greater than or equal to 0"),
        ({"rule": "clip", "norm": 0}, "greater than 0"),
        ({"rule": "clip", "norm": "clients"}, "norm"),
        ({"rule": "clip", "attackers": 0.1}, "unknown option 'attackers'; known: norm, stat"),
        ({"rule": "geometric_median", "iterations": 0}, "greater than or equal to 1"),
        ({"rule": "geometric_median", "smoothing": 0.0}, "greater than 0"),
        ({"rule": 3}, "unknown robust rule '3'"),
    ],
)
def test_options_out_of_range(options, said):
    with pytest.raises(UserError) as error:
        make_rule(options, "where")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_flowers_own_rules(tmp_path):
    """Only in the environment of utils/build_flower.sh."""
    flower = pytest.importorskip("flwr.server.strategy.aggregate")
    base, states, _ = drawn(RANDOM, 9, spec={"a": ((40,), "float32")})
    results = [([one["a"]], 1) for one in states.values()]
    expected = {
        "median": flower.aggregate_median(results)[0],
        "multi_krum": flower.aggregate_krum(results, 2, 7)[0],
    }
    for rule, value in expected.items():
        combined(tmp_path / rule, states, base, {"rule": rule}, spec={"a": ((40,), "float32")})
        np.testing.assert_allclose(load_state(tmp_path / rule / "next")["a"], value, atol=1e-6)
