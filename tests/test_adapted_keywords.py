"""Federations of adapters on keyword networks."""

from __future__ import annotations

import shutil
from pathlib import Path

import keyword_world
import numpy as np
import pytest
import yaml
from conftest import fedtools, inside, ledger
from safetensors.numpy import load_file

HEAD = {"head.weight", "head.bias"}
SETTING = {"rank": 2, "targets": ["pointwise*", "first"]}
UP = {f"{layer}.lora_{name}" for layer in ("first", "pointwise.0") for name in "ab"} | HEAD


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make clips, and a network that has been trained on them."""
    root = keyword_world.make_world(tmp_path_factory.mktemp("world"))
    path = keyword_world.begin(root, root / "base", "centralized", "rounds=2")
    inside("rounds", path).ok()
    shutil.copy(path / "round_0003/global.safetensors", root / "base.safetensors")
    return root


def begin(world: Path, path: Path, how: dict, *settings: str, method="fedavg", start=True):
    more = [word for one in (f"model.adapt={how}", *settings) for word in ("--set", one)]
    return inside(
        *("init", path, "--config", world / "config.yaml", "--method", method, *more),
        *("--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}"),
        *(("--start", world / "base.safetensors") if start else ()),
    )


def sent(path: Path, number: int = 1) -> dict[str, np.ndarray]:
    files = sorted(path.glob(f"round_{number:04d}/update.*.safetensors"))
    states = [load_file(file) for file in files]
    return {name: np.concatenate([one[name] for one in states]) for name in states[0]}


def state_of(path: Path, number: int) -> dict[str, np.ndarray]:
    return load_file(path / f"round_{number:04d}/global.safetensors")


def test_only_what_is_trained_is_kept_and_sent(world, tmp_path):
    path = tmp_path / "e"
    said = begin(world, path, SETTING, "keep_updates=true", "training.stack=3").ok().err
    base = load_file(world / "base.safetensors")
    assert (path / "base.safetensors").read_bytes() == (world / "base.safetensors").read_bytes()
    first = load_file(path / "init.safetensors")
    assert first.keys() == UP
    trained = sum(value.size for value in first.values())
    low = sum(value.size for name, value in first.items() if "lora" in name)
    whole = sum(value.size for name, value in base.items() if "running" not in name) + low
    share = 100 * trained / whole
    assert said == f"trains {trained / 1e3:.1f} of {whole / 1e3:.1f} k parameters ({share:.1f} %)\n"
    inside("evaluate", path, "--split", "test").ok()
    inside("rounds", path, "--to", "2", "--evaluate", "test").ok()
    assert sent(path).keys() == state_of(path, 3).keys() == UP
    assert all((state_of(path, 3)[name] != first[name]).any() for name in UP)
    rows = [row for row in ledger(path) if row["client"] != "-"]
    assert all(row["status"] == "ok" for row in rows)
    assert {int(row["bytes_up"]) for row in rows} == {4 * trained}
    # Before training, the base is measured.
    plain = world / "base"
    inside("evaluate", plain, "--split", "test").ok()
    begun, last = (
        [line.split("\t") for line in (one / "evaluate_test.tsv").read_text().splitlines()]
        for one in (path, plain)
    )
    assert [row[1:] for row in begun if row[0] == "0"] == [row[1:] for row in last if row[0] == "2"]
    # Step by step, in two jobs, and each client alone.
    again = tmp_path / "again"
    begin(world, again, SETTING, "training.stack=1").ok()
    inside("sample", again, "--round", "1", "--nj", "2").ok()
    for job in ("1", "2"):
        inside("train-local", again, "--round", "1", "--job", job).ok()
    inside("aggregate", again, "--round", "1").ok()
    one, other = state_of(path, 2), state_of(again, 2)
    for name in UP:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("combine", ["fixed_a", "svd", "residual"])
def test_each_way_to_combine(world, tmp_path, combine):
    path = tmp_path / "e"
    settings = ("clients_per_round=4", "keep_updates=true")
    begin(world, path, SETTING | {"rank": 1, "combine": combine}, *settings).ok()
    said = inside("rounds", path, "--to", "2").ok().err
    assert said.count("% of the mean of the adapters") == (0 if combine == "fixed_a" else 2)
    assert {row["status"] for row in ledger(path)} == {"ok"}
    first = load_file(path / "init.safetensors")
    update, before, after = sent(path, 2), state_of(path, 2), first | state_of(path, 3)
    for stem in ("first", "pointwise.0"):
        low = update.get(f"{stem}.lora_a", first[f"{stem}.lora_a"])
        products = update[f"{stem}.lora_b"].astype("f8") @ low.astype("f8")
        ours = after[f"{stem}.lora_b"].astype("f8") @ after[f"{stem}.lora_a"].astype("f8")
        wanted = products.mean(0)
        scale = np.abs(wanted).max()
        assert scale > 1e-4
        if combine == "svd":
            left, values, right = np.linalg.svd(wanted)
            wanted = left[:, :1] * values[:1] @ right[:1]
        if combine == "residual":
            wanted = wanted + before[f"{stem}.lora_delta"]
            ours = ours + after[f"{stem}.lora_delta"]
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=2e-5 * scale)


def test_personal_adapters_and_methods(world, tmp_path):
    path = tmp_path / "e"
    begin(world, path, SETTING, "method_conf.personal=['*lora_b','head.*']").ok()
    inside("rounds", path, "--to", "2", "--evaluate", "test").ok()
    shared = {name for name in UP if name.endswith("lora_a")}
    assert state_of(path, 3).keys() == shared
    kept = [load_file(one) for one in path.glob("clients/*/round_0002/personal.safetensors")]
    assert len(kept) > 1 and all(one.keys() == UP - shared for one in kept)
    ui = tmp_path / "ui"
    begin(world, ui, SETTING, "clients_per_round=3", method="fedkws_ui").ok()
    inside("rounds", ui, "--to", "1").ok()
    assert state_of(ui, 2).keys() == UP


def test_a_network_of_the_users_own_file_is_adapted(world, tmp_path):
    (tmp_path / "keywords").mkdir()
    (tmp_path / "keywords/mynet.py").write_text(keyword_world.OWN_NETWORK)
    env = {"FEDTOOLS_PATH": str(tmp_path)}
    where = ("--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}")
    for name, how in (("base", ""), ("e", ", adapt: {rank: 2}")):
        start = ("--start", tmp_path / "base/init.safetensors") if how else ()
        fedtools(
            *("init", tmp_path / name, "--config", world / "config.yaml", "--method", "fedavg"),
            *(*where, *start, "--set", f"model={{network: mynet{how}}}"),
            env=env,
        ).ok()
    fedtools("rounds", tmp_path / "e", "--to", "1", "--evaluate", "test", env=env).ok()
    low = {"hidden.lora_a", "hidden.lora_b"}
    assert state_of(tmp_path / "e", 2).keys() == low | HEAD


def test_what_does_not_fit_is_refused(world, tmp_path):
    path = tmp_path / "e"
    begin(world, path, SETTING, start=False).fails(1, "adapt without a trained model", "--start")
    wider = "model.network_conf.channels=7"
    begin(world, path, SETTING, wider).fails(1, "base.safetensors", "tensor ")
    begin(world, path, {"targets": ["norms*"]}).fails(1, "or convolution matches 'norms*'")
    begin(world, path, {"also": ["*x*y"]}).fails(1, "also: no parameter matches '*x*y'")
    begin(world, path, {"rank": 0}).fails(1, "rank")
    assert not path.exists()
    said = begin(world, path, {"kind": "none"}).ok().err
    assert said.startswith("trains 0.0 of ")
    inside("evaluate", path, "--split", "test").ok()
    inside("rounds", path, "--to", "1").fails(1, "the model has no trainable parameters")
    config = yaml.safe_load((path / "config.yaml").read_text())
    assert config["model"]["adapt"] == {"kind": "none"}
    (path / "base.safetensors").unlink()
    inside("evaluate", path, "--split", "test").fails(1, "base.safetensors: missing")
