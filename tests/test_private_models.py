"""Models with user-level privacy: releases over kills and resets, what is refused, what leaves."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import private_world as world
import pytest
import yaml
from commands import inside
from private_world import CLIENTS, SIZES, STEPS, begin, init, released, rows_of, vector
from safetensors.numpy import load_file, save_file
from scipy import stats

from fedtools.attack.updates import find_updates, multiply, parts_of
from fedtools.core.tables import read_tsv
from fedtools.federation.federation import Federation
from fedtools.federation.rounds import run_rounds
from fedtools.privacy.clipping import Grid

CLIP, N = 0.05, len(CLIENTS)
NONCE = "0123456789abcdef" * 2
SECRET = (
    "sampling=poisson",
    "clients_per_round=4",
    "method_conf={noise: 1.0, clip: 0.05, local_steps: 2}",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return world.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def fixed(key, monkeypatch) -> None:
    """Set a fixed nonce, so that two folders can be compared."""
    monkeypatch.setenv("FEDTOOLS_NONCE", NONCE)


def run(path: Path, to: int, *more: str) -> Path:
    inside("rounds", path, "--to", to, *more).ok()
    return path


def noise_of(path: Path, number: int = 1) -> np.ndarray:
    """Return the noise in a release, in steps, from the states and the messages on disk."""
    total = sum(vector(one) for one in rows_of(path, number).values())
    return released(path, number) * N * STEPS / CLIP - total


def ledger(path: Path) -> list[dict[str, str]]:
    inside("privacy", path).ok()
    return read_tsv(path / "dp.tsv", None)


def states(path: Path) -> list[bytes]:
    return [(at / "global.safetensors").read_bytes() for at in sorted(path.glob("round_*"))]


class Killed(BaseException):
    """Exception that replaces kill -9."""


def run_until(path: Path, monkeypatch, name: str) -> None:
    """Run a round, killed as soon as a file of this name is in place."""
    replace = os.replace

    def replaced(source, target):
        replace(source, target)
        if Path(target).name == name:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replaced)
        with pytest.raises(Killed):
            run_rounds(path, 1, 1, "cpu", None, None)


# Noise.


def sharper(noise: np.ndarray, deviation: float) -> float:
    """Return the p-value of noise whose standard deviation is at least this."""
    return float(stats.chi2.cdf(np.square(noise / deviation).sum(), len(noise)))


def test_a_release_is_the_exact_sum_with_noise_of_the_planned_size(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp"), 2)
    plan = yaml.safe_load((path / "privacy.yaml").read_text())
    deviation = plan["noise"] * STEPS
    one, two = noise_of(path, 1), noise_of(path, 2)
    for noise in (one, two):
        assert stats.kstest(noise / deviation, "norm").pvalue > 1e-4
        assert 1e-4 < sharper(noise, deviation) < 1 - 1e-4
    # Noise that is drawn once for two releases cancels in their difference.
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.15
    # A thousand values show noise that is a fifth too small.
    assert sharper(0.8 * one[:1000], deviation) < 1e-6


def test_noise_is_drawn_once_whatever_kills_a_round(root, fixed, tmp_path, monkeypatch):
    whole = states(run(begin(root, tmp_path / "whole"), 1))
    for name in ("release.safetensors", "global.safetensors", "ledger.tsv", ".done"):
        path = begin(root, tmp_path / "exp")
        run_until(path, monkeypatch, name)
        assert states(run(path, 1)) == whole, name
        shutil.rmtree(path)
    path = begin(root, tmp_path / "exp")
    inside("sample", path, "--nj", "2").ok()
    for job in ("2", "1"):
        inside("train-local", path, "--job", job).ok()
    inside("aggregate", path).ok()
    assert states(path) == whole


def test_a_release_drawn_again_has_other_noise_and_counts(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp"), 2)
    before, spent = noise_of(path, 2), float(ledger(path)[-1]["spent"])
    inside("reset", path, "--round", "2").ok()
    assert abs(np.corrcoef(before, noise_of(run(path, 2), 2))[0, 1]) < 0.15
    rows = ledger(path)
    assert [row["release"] for row in rows] == ["1", "2", "2.2", "total"]
    assert float(rows[-1]["spent"]) > spent
    # A copy draws what the record next to the key counts for both.
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    inside("reset", copy, "--round", "2").ok()
    again = noise_of(run(copy, 2), 2)
    assert abs(np.corrcoef(again, noise_of(path, 2))[0, 1]) < 0.15
    assert [row["release"] for row in ledger(path)] == ["1", "2", "2.2", "2.3", "total"]


def test_no_more_rounds_than_the_noise_was_planned_for(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp"), 3)
    inside("rounds", path, "--to", "4").fails(1, "planned for 3 rounds")


# Clipping.


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 0.049, 0.05, 1.0, 1e6, 1e38])
def test_no_change_is_longer_than_the_norm_after_rounding(scale):
    random = np.random.default_rng(1)
    for shapes in ({"a": (5, 3)}, {"a": (5, 40, 30), "b": (5, 7)}, {"a": (5, 100_000)}):
        changes = {name: scale * random.normal(size=shape) for name, shape in shapes.items()}
        found = Grid(CLIP).rounded(changes)
        for client in range(5):
            own = [one[client].ravel().tolist() for one in found.values()]
            assert sum(x * x for values in own for x in values) <= STEPS**2
            exact = np.concatenate([one[client].ravel() for one in changes.values()])
            norm = np.linalg.norm(exact / scale) * scale
            wanted = exact * min(1.0, CLIP / norm) / (CLIP / STEPS)
            # Towards 0, by less than a step and what the margin shortens.
            assert np.all(np.abs(np.concatenate(own)) <= np.abs(wanted) + 1e-6)
            assert np.all(np.abs(np.concatenate(own) - wanted) < 2.0)


def test_a_change_that_is_not_finite_becomes_zeros_and_leaves_others_alone():
    changes = {"a": np.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0], [0.0, 0.0]])}
    found = Grid(1.0).rounded(changes)["a"]
    assert not found[1:].any()
    assert np.array_equal(found[0], Grid(1.0).rounded({"a": changes["a"][:1]})["a"][0])


# Hostile messages.


def one_job(root: Path, path: Path) -> Path:
    begin(root, path, "method_conf.epsilon=null", "method_conf.noise=0")
    inside("sample", path).ok()
    inside("train-local", path).ok()
    return path / "round_0001" / "update.1.safetensors"


def filled(client: int, change):
    """Return a function that puts a change, of all values, in place of a client's."""

    def put(tensors):
        first = sorted(tensors)[0]
        for one in tensors.values():
            one[client] = 0
        change(tensors[first][client])

    return put


def exactly_c(values):
    values.flat[0] = STEPS


def two_parts(values):
    values.flat[0], values.flat[1] = STEPS - 1, 2048


HOSTILE = {
    "the least whole number": (lambda v: v.fill(-(2**31)), "is below -1.04858e+06"),
    "the most": (lambda v: v.fill(2**31 - 1), "is over 1.04858e+06"),
    "one value over": (lambda v: v.flat.__setitem__(0, STEPS + 1), "is over 1.04858e+06"),
    "all at the bound": (lambda v: v.fill(STEPS), "a change of norm over 1048576 steps"),
    "a norm hardly over": (two_parts, "a change of norm over 1048576 steps"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_change_that_is_too_long_counts_as_zeros(root, key, tmp_path, name):
    change, said = HOSTILE[name]
    tensors = one_job(root, tmp_path / "exp")
    found = load_file(tensors)
    filled(2, change)(found)
    save_file(found, tensors)
    rows = rows_of(tmp_path / "exp")
    client = sorted(rows)[2]
    done = inside("aggregate", tmp_path / "exp").ok()
    assert f"{client}: refused: " in done.err and said in done.err
    total = sum(vector(one) for who, one in rows.items() if who != client)
    # All clients still count in the mean.
    assert np.allclose(released(tmp_path / "exp"), total * CLIP / STEPS / N, atol=1e-7)


def test_a_change_of_exactly_c_counts(root, key, tmp_path):
    tensors = one_job(root, tmp_path / "exp")
    found = load_file(tensors)
    filled(2, exactly_c)(found)
    save_file(found, tensors)
    assert "refused" not in inside("aggregate", tmp_path / "exp").ok().err
    total = sum(vector(one) for one in rows_of(tmp_path / "exp").values())
    assert np.allclose(released(tmp_path / "exp"), total * CLIP / STEPS / N, atol=1e-7)


def test_floats_in_place_of_whole_numbers_are_refused_and_change_nothing(root, key, tmp_path):
    tensors = one_job(root, tmp_path / "exp")
    save_file({name: one.astype("f4") for name, one in load_file(tensors).items()}, tensors)
    done = inside("aggregate", tmp_path / "exp").ok()
    assert done.err.count("expected int32") == N
    assert not released(tmp_path / "exp").any()


# What is refused at the beginning.

REFUSED = {
    "method_conf.weighting=utterances": "weighting: uniform",
    "method_conf.max_norm_ratio=20": "max_norm_ratio: privacy excludes",
    "method_conf.max_weight_ratio=20": "max_weight_ratio: privacy excludes",
    "method_conf.min_clients=2": "min_clients: privacy excludes",
    "method_conf.client_method=fedkws_ui": "allots a client's steps by what data others have",
    "method_conf.client_method=fedopt": "a server of its own",
    "method_conf.client_method=dpfedavg": "a server of its own",
    "method_conf.client_method=client": "has other messages than the shared tensors",
    "method_conf.client_conf={local_epochs: 2}": "give local_epochs beside client_method",
    "method_conf.client_conf={proximal: 2}": "proximal",
    "method_conf.noise=1": "give one of them",
    "method_conf={clip: 0.1}": "no epsilon",
    "method_conf={noise: 1.0e+5, clip: 0.1, cohorts: 3}": "too large to be drawn exactly",
    "method_conf={noise: 1.0e-6, clip: 0.1, simulated_users: 10000}": "too small to be drawn",
    "method_conf.delta=1e-14": "at least 1e-12",
    "method_conf.simulated_users=1e300": "from 1 to 1000000",
    "method_conf.personal=['*']": "clients send nothing",
    "method_conf.noise_key=/proc/x/y": "/proc/x",
    "method_conf.epsilon=0": "epsilon",
    "method_conf.epsilon=2000": "from 1e-06 to 1000",
    "method_conf.delta=1": "below 1",
    "method_conf.clip=.nan": "clip",
    "method_conf.clip=0": "clip",
    "method_conf.simulated_users=0.5": "simulated_users",
    "clients_per_round=4": "sampling: poisson",
    "model={network: dscnn, network_conf: {channels: 4, blocks: 1}}": "statistics of BatchNorm",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_would_break_the_bound_is_refused_in_one_line(root, key, tmp_path, setting):
    # Only of a secret sample is so small a delta too small.
    sample = SECRET[:2] if "delta=1e-14" in setting else ()
    init(root, tmp_path / "exp", setting, *sample).fails(1, REFUSED[setting])
    assert not (tmp_path / "exp").exists()


def test_a_list_of_clients_is_checked(root, key, tmp_path):
    lists = {
        "2e2\n2e2\n": "is duplicated",
        "1e1\n": "have data, and no line here",
        "": "empty",
        "a b\n": "is not one word",
        "../x\n": "client",
    }
    for at, (text, said) in enumerate(lists.items()):
        (tmp_path / "list").write_text(text)
        arguments = ("--config", root / "config.yaml", "--data", f"train={root / 'train'}")
        listed = ("--clients", tmp_path / "list")
        path = tmp_path / f"exp{at}"
        inside("init", path, *arguments, *listed, "--method", "dpfedavg").fails(1, said)
    (tmp_path / "list").write_text("".join(f"{one}\n" for one in CLIENTS))
    settings = ("--set", "method_conf={local_steps: 1}", "--method", "fedavg")
    done = inside("init", tmp_path / "plain", *arguments, *listed, *settings)
    done.fails(1, "without user-level privacy")
    path = begin(root, tmp_path / "begun")
    (tmp_path / "list").write_text("".join(f"{one}\n" for one in [*CLIENTS[:-1], "7e8", "7e7"]))
    assert init(root, path).ok().out == ""


def test_files_that_decide_the_noise_cannot_be_changed(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp"), 1)
    plan = path / "privacy.yaml"
    kept = plan.read_text()
    plan.write_text(kept.replace("noise: ", "noise: 0.0001 # "))
    inside("rounds", path).fails(1, "privacy.yaml", "changed since the experiment began")
    # Who changes the sums, too, is found by the record next to the key.
    sums = (path / "sha256sums").read_text()
    old, new = (hashlib.sha256(text.encode()).hexdigest() for text in (kept, plan.read_text()))
    (path / "sha256sums").write_text(sums.replace(old, new))
    inside("rounds", path).fails(1, "not the one that the noise key's record began with")


# A secret sample.


def sampled(path: Path, number: int) -> list[str]:
    return (path / f"round_{number:04d}" / "clients").read_text().split()


def test_a_secret_sample_follows_from_the_key_alone(root, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTOOLS_NONCE", NONCE)
    drawn = []
    for name in ("one", "one", "two"):
        monkeypatch.setenv("FEDTOOLS_NOISE_KEY", str(tmp_path / name / "noise.key"))
        path = begin(root, tmp_path / "exp", *SECRET, "rounds=20")
        for _ in range(5):
            inside("sample", path).ok()
            inside("train-local", path).ok()
            inside("aggregate", path).ok()
        drawn.append([sampled(path, number) for number in range(1, 6)])
        shutil.rmtree(path)
    assert drawn[0] == drawn[1] != drawn[2]
    # Not always the same number, as a sample of fixed size would have.
    assert len({len(one) for one in drawn[0] + drawn[2]}) > 1


def test_a_round_that_is_drawn_again_has_another_secret_sample(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp", *SECRET, "rounds=20"), 4)
    before = [sampled(path, number) for number in range(1, 5)]
    inside("reset", path, "--round", "1").ok()
    after = [sampled(run(path, 4), number) for number in range(1, 5)]
    assert before != after
    rows = ledger(path)
    assert len(rows) == 9
    # Nobody in the folder is fooled by the sample: all clients count as if they took part.
    assert float(rows[-1]["spent_inside"]) > float(rows[-1]["spent"])


# What is spent, and what leaves.


def test_experiments_on_the_same_clients_add_up(root, key, tmp_path):
    paths = [tmp_path / str(at) for at in range(3)]
    for seed, path in enumerate(paths):
        init(root, path, seed=seed).ok()
        run(path, 3)
    done = inside("privacy", *paths).ok()
    # Three times epsilon 8 at delta 1e-5, by composition of Gaussian mechanisms.
    spent, inside_too = map(float, done.out.splitlines()[-1].split()[-2:])
    assert 15.8 < spent == inside_too < 15.95
    single = ledger(paths[0])[-1]
    assert 7.99 < float(single["spent"]) <= 8
    assert 19.0 < float(single["spent_by_two"]) < 19.2
    assert single["unit"] == "client"


def test_the_noise_for_an_epsilon_is_printed(key):
    done = inside("privacy", "--target-epsilon", "2", "--rounds", "32").ok()
    # mu = sqrt(32) / z, and the closed form at epsilon 2.
    mu = np.sqrt(32) / float(done.out)
    delta = stats.norm.cdf(mu / 2 - 2 / mu) - np.exp(2) * stats.norm.cdf(-mu / 2 - 2 / mu)
    assert 0.999e-5 < delta <= 1e-5
    inside("privacy", "--target-epsilon", "2").fails(2, "--rounds")
    inside("privacy").fails(2, "EXP")


def test_only_what_is_private_is_published(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp"), 2)
    out = tmp_path / "out"
    inside("publish", path, out).ok()
    names = {one.name for one in out.iterdir()}
    rounds = {f"round_{number:04d}.safetensors" for number in (1, 2, 3)}
    others = {"README.md", "config.yaml", "privacy.yaml", "model.safetensors", "classes.txt"}
    others.add("clip_samples")
    assert names == rounds | others | {"sha256sums"}
    text = "".join(
        (out / name).read_text() for name in ("README.md", "config.yaml", "privacy.yaml")
    )
    for private in (str(root), str(tmp_path), *CLIENTS, "noise.key"):
        assert private not in text
    model, last = load_file(out / "model.safetensors"), load_file(out / "round_0003.safetensors")
    assert all(np.array_equal(model[name], one) for name, one in last.items())
    assert f"| {float(ledger(path)[-1]['spent']):.6g} |" in (out / "README.md").read_text()
    inside("publish", path, out).fails(1, "already exists")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("method_conf={noise: 0, clip: 0.1}",), "no noise was added"),
        (("method_conf.simulated_users=10",), "as a simulation"),
    ],
)
def test_what_is_not_private_is_not_published(root, key, tmp_path, settings, said):
    path = run(begin(root, tmp_path / "exp", *settings), 1)
    inside("publish", path, tmp_path / "out").fails(1, said)
    assert not (tmp_path / "out").exists()


def test_simulated_users_divide_the_noise_and_the_ledger_says_what_holds(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp", "method_conf.simulated_users=10"), 1)
    plan = yaml.safe_load((path / "privacy.yaml").read_text())
    deviation = plan["noise"] * STEPS / 10
    assert 1e-4 < sharper(noise_of(path), deviation) < 1 - 1e-4
    assert plan["epsilon"] > 80


def test_clients_without_data_still_count(root, key, tmp_path):
    (tmp_path / "clients").write_text("".join(f"{one}\n" for one in ("0e0", *CLIENTS, "9e9")))
    arguments = ("--config", root / "config.yaml", "--data", f"train={root / 'train'}")
    quiet = ("--set", "method_conf={noise: 0, clip: 0.05, local_steps: 2}")
    path = tmp_path / "exp"
    listed = ("--clients", tmp_path / "clients")
    inside("init", path, *arguments, *listed, *quiet, "--method", "dpfedavg").ok()
    done = inside("rounds", path, "--to", "1").ok()
    assert done.err.count("has no data") >= 2
    sums = sum(vector(one) for one in rows_of(path).values())
    assert len(rows_of(path)) == len(SIZES)
    assert np.allclose(released(path), sums * CLIP / STEPS / (N + 2), atol=1e-7)


def test_show_has_the_norms_of_clipped_changes(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp"), 1)
    rows = inside("show", path, "--clients").ok().out
    assert rows.count(" 0.05 ") == N


def test_rounds_are_not_chosen_on_the_clients_own_data(root, key, tmp_path):
    arguments = ("--config", root / "config.yaml", "--method", "dpfedavg")
    path = tmp_path / "exp"
    own = ("--data", f"train={root / 'train'}", "--data", f"valid={root / 'train'}")
    inside("init", path, *arguments, *own, "--set", "average=2").fails(1, "who also train")
    inside("init", path, *arguments, *own).ok()
    run(path, 1)
    inside("average", path).fails(1, "chooses rounds on data of")
    others = ("--data", f"train={root / 'train'}", "--data", f"valid={root / 'test'}")
    other = tmp_path / "other"
    inside("init", other, *arguments, *others, "--set", "average=2").ok()
    run(other, 2)
    inside("average", other).ok()


def test_an_estimate_releases_nothing(root, key, tmp_path):
    path = begin(root, tmp_path / "exp")
    inside("rounds", path, "--estimate").fails(1, "which count, too")
    assert [row["release"] for row in ledger(path)] == ["total"]


def test_releases_without_noise_have_spent_all(root, key, tmp_path):
    quiet = ("method_conf.epsilon=null", "method_conf.noise=0")
    path = run(begin(root, tmp_path / "quiet", *quiet), 2)
    assert [row["spent"] for row in ledger(path)] == ["inf"] * 3
    other = run(begin(root, tmp_path / "noisy"), 1)
    assert inside("privacy", path, other).ok().out.splitlines()[-1].split()[-1] == "inf"


def test_a_killed_round_keeps_its_secret_sample_even_if_a_copy_goes_on(
    root, key, tmp_path, monkeypatch
):
    path = begin(root, tmp_path / "exp", *SECRET, "rounds=20")
    run_until(path, monkeypatch, "release.safetensors")
    before = sampled(path, 1)
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    inside("reset", copy, "--round", "1").ok()
    run(copy, 1)
    run(path, 1)
    assert sampled(path, 1) == before
    # Complete rounds keep theirs.
    run(path, 2)


def test_a_kill_before_the_record_has_the_release(root, fixed, tmp_path, monkeypatch):
    settings = (*SECRET, "rounds=20")
    whole = states(run(begin(root, tmp_path / "whole", *settings), 1))
    path = begin(root, tmp_path / "exp", *settings)
    run_until(path, monkeypatch, "release.safetensors")
    for record in path.glob("releases.tsv"):
        record.unlink()
    assert states(run(path, 1)) == whole


def test_kinds_of_privacy_are_not_mixed_up(root, key, tmp_path):
    path = begin(root, tmp_path / "exp")
    inside("privacy", path, tmp_path / "missing").fails(1, "missing: no experiment here")
    plain = ("init", tmp_path / "plain", "--config", root / "config.yaml", "--method", "fedavg")
    data = ("--data", f"train={root / 'train'}", "--set", "method_conf={local_steps: 1}")
    inside(*plain, *data).ok()
    inside("privacy", path, tmp_path / "plain").fails(1, "plain/config.yaml: no user-level")
    inside("privacy", path, "--delta", "0.1").fails(2, "goes with --target-epsilon")


def test_a_list_that_is_not_given_and_a_large_delta_are_told(root, key, tmp_path):
    done = init(root, tmp_path / "exp", "method_conf.delta=0.2", listed=False).ok()
    assert "choose it well below 1 / clients" in done.err
    run(tmp_path / "exp", 1)
    inside("publish", tmp_path / "exp", tmp_path / "out").ok()
    assert "no list was given" in (tmp_path / "out" / "README.md").read_text()


def test_the_servers_own_state_is_checked(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp", "method_conf.cohorts=3"), 1)
    (kept,) = (path / "server").rglob("turns.safetensors")
    save_file({"sums": np.zeros((1, 2), np.int64)}, kept)
    inside("rounds", path, "--to", "2").fails(1, "turns.safetensors")


def test_the_server_can_compare_clipped_changes(root, key, tmp_path):
    """Noise is added to sums alone: products of what clients sent are those of their messages."""
    path = run(begin(root, tmp_path / "exp"), 2)
    rounds = ("--round", "1", "--round", "2")
    done = inside("attack", "weights", path, tmp_path / "out", *rounds).ok()
    assert "refused" not in done.err
    assert {"all", "head"} <= {row["layer"] for row in read_tsv(tmp_path / "out/weights.tsv", None)}
    found = find_updates(Federation(path), [1])
    sent = rows_of(path)
    for one in multiply([found.models[name] for name in CLIENTS], parts_of(found.spec)):
        names = parts_of(found.spec)[one.part]
        steps = np.stack([vector({n: sent[who][n] for n in names}) for who in CLIENTS])
        rows = steps * world.CONFIG["method_conf"]["clip"] / STEPS
        np.testing.assert_allclose(one.squares, (rows**2).sum(1), rtol=1e-5)
        lengths = np.diagonal(one.products)
        apart = lengths[:, None] + lengths - 2 * one.products
        expected = ((rows[:, None] - rows) ** 2).sum(2)
        np.testing.assert_allclose(apart, expected, rtol=1e-3, atol=1e-5 * expected.max())


def test_defences_of_models_do_not_go_with_clipped_changes(root, key, tmp_path):
    path = run(begin(root, tmp_path / "exp"), 1)
    done = inside("attack", "weights", path, tmp_path / "out", "--defence", "bits=8").ok()
    assert "not applicable: in round 1 clients send clipped changes" in done.err
