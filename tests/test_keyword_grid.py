"""A grid of rows in a configuration: its list of experiments, their options and costs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, run
from keyword_checkout import TINY
from keywords import pack
from scripts import script

from fedtools.core.tables import read_tsv
from fedtools.exchange.states import load_state
from fedtools.federation.federation import Federation

GRID = {
    "dscnn": {
        "centralized": 0,
        "fedavg": "0 1 2",
        "fedavg.rounds=6": "0 1",
        "alt.conserve=clips": "0 1",
        "alo.private_steps=3,adversarial=0.1": "1",
        "fedkws_ui": "0 1 2",
    },
    "wide": {"fedavg": "7"},
}
ALL = "centralized fedavg alt alo fedkws_ui"
CHOSEN = ("--tasks", "keywords", "--networks", "dscnn")


@pytest.fixture
def world(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for split, clips in (("train", [9, 8, 7, 6]), ("valid", [2] * 4), ("test", [3] * 4)):
        pack(Path("dump/keywords", split), {"ann": clips, "bob": clips, "cat": [1, 0, 2, 3]})
    methods = {key: {} for key in ALL.split()} | {
        "centralized": TINY["methods"]["centralized"],
        "alt": {"method_conf": {"base_ratio": 3.5}},
    }
    networks = TINY["networks"] | {"wide": TINY["networks"]["dscnn"]}
    write(TINY | {"grid": GRID, "methods": methods, "networks": networks})
    return tmp_path


def write(config: dict) -> None:
    Path("grid.yaml").write_text(yaml.safe_dump(config))


def listed(*options: str, methods: str = ALL) -> list[list[str]]:
    told = script("experiments.py", "exp", "dump", *CHOSEN, "--methods", methods, *options).ok()
    return [line.split("\t") for line in told.out.splitlines()]


def test_rounds_are_those_of_every_row_without_its_own(world):
    plain, lines = listed("--grid", "grid.yaml"), listed("--grid", "grid.yaml", "--rounds", "6")
    for before, after in zip(plain, lines, strict=True):
        own = "rounds=" in before[0]
        added = [] if own else ["--set", "rounds=6"]
        assert sorted(after) == sorted([*before, *added]), after
    assert any("rounds=" in line[0] for line in lines)


def test_only_pretrained_networks_get_a_model_and_those_projected_a_projection(world):
    heads = {"cache_frozen": True, "network": "hf"}
    networks = {
        "head": {"model": {**heads, "normalise": "projection"}},
        "plain": {"model": heads},
        **TINY["networks"],
    }
    write(TINY | {"networks": networks, "grid": {name: {"fedavg": "0"} for name in networks}})
    chosen = ("--networks", " ".join(networks), "--pretrained", "there")
    grid = ("--config", "grid.yaml", "--grid", "grid.yaml")
    lines = {line[0].split("/")[2]: line for line in listed(*chosen, *grid)}
    assert {name for name, line in lines.items() if "model.path=there" in line} == {"head", "plain"}
    asset = "projection=exp/keywords/projection"
    assert {name for name, line in lines.items() if asset in line} == {"head"}
    # All rows have the same data.
    assert not any("valid=dump/keywords/valid" in line for line in lines.values())
    networks["head"]["model"].pop("normalise")
    write(TINY | {"networks": networks, "grid": {name: {"fedavg": "0"} for name in networks}})
    again = listed(*chosen, *grid)
    assert all("valid=dump/keywords/valid" in line for line in again) and len(again) == 3


def test_rows_have_the_seeds_that_the_configuration_says(world):
    lines = listed("--grid", "grid.yaml", "--ablations", "true")
    expected = [
        f"exp/keywords/dscnn/{row}/seed{seed}"
        for row, seeds in GRID["dscnn"].items()
        for seed in str(seeds).split()
    ]
    assert sorted(line[0] for line in lines) == sorted(expected)
    # Of the chosen rows.
    some = listed("--grid", "grid.yaml", "--seeds", "1", methods="alo alt fedavg")
    assert sorted(line[0] for line in some) == sorted(
        name for name in expected
        if name.endswith("seed1") and re.search("/(alo|alt|fedavg)[./]", name)
    )  # fmt: skip
    # Without such a section, all chosen rows are run.
    write(TINY)
    lines = listed("--grid", "grid.yaml", methods="fedavg alo")
    assert len(lines) == 2 * 3


def test_experiments_begin_with_what_their_row_says(world, cli):
    for folder, _, *words in listed("--grid", "grid.yaml"):
        cli("init", folder, "--config", "grid.yaml", *words).ok()
        config = yaml.safe_load(Path(folder, "config.yaml").read_text())
        row = folder.split("/")[3]
        method, _, changes = row.partition(".")
        assert config["method"] == method and folder.endswith(f"/seed{config['seed']}")
        assert config["rounds"] == (6 if changes == "rounds=6" else 2)
        options = config["method_conf"]
        if method == "alo":
            assert (options["private_steps"], options["adversarial"]) == (3, 0.1)
        if method == "alt":
            assert (options["conserve"], options["base_ratio"]) == ("clips", 0)
        if row == "fedkws_ui":
            assert options == {"local_steps": 2}


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ({"dscnn": "fedavg"}, "grid.dscnn is not a section"),
        ([1], "grid is not a section"),
        ({"dscnn": {"fedavg": "0 x"}}, "grid.dscnn: 'fedavg: 0 x' is not a row with seeds"),
        ({"dscnn": {"fedavg.rounds": "0"}}, "'fedavg.rounds: 0' is not a row"),
        ({"dscnn": {"fedavg": ""}}, "is not a row with seeds"),
        ({"dscn": {"fedavg": 0}}, "unknown network 'dscn', did you mean 'dscnn'?"),
        ({"dscnn": {"fedav.rounds=6": 0}}, "unknown method 'fedav', did you mean 'fedavg'?"),
    ],
)
def test_what_is_no_grid_is_told(world, grid, said):
    write(TINY | {"grid": grid})
    told = script("experiments.py", "exp", "dump", *CHOSEN, "--methods", ALL, "--grid", "grid.yaml")
    told.fails(1, "grid.yaml", said)


def test_a_round_of_each_row_tells_what_all_will_take(world):
    lines = "".join("\t".join(line) + "\n" for line in listed("--grid", "grid.yaml"))
    Path("exp").mkdir()
    waves = [sys.executable, ROOT / "utils/waves.py", "exp/list"]
    run(*waves, input=lines, cwd=Path.cwd()).ok()
    told = script("price.py", "exp/list", "--config", "grid.yaml", "--nj", 2).ok()
    rows = {line.split()[0]: line.split()[1:] for line in told.out.splitlines()[1:-1]}
    rows.pop("-" * 3, None)
    names = {f"keywords/dscnn/{row}" for row in GRID["dscnn"]}
    assert names <= rows.keys()
    hours = 0.0
    for row, seeds in GRID["dscnn"].items():
        count, rounds, each, evaluation, _ = rows[f"keywords/dscnn/{row}"]
        assert int(count) == len(str(seeds).split())
        assert int(rounds) == (6 if "rounds" in row else 2) and float(each) > 0
        # Measured at the start and after every round.
        measured = int(rounds) + 1
        hours += int(count) * (int(rounds) * float(each) + measured * float(evaluation)) / 3600
    total = float(
        re.search(r"all of the list: ([\d.]+) hours, [\d.]+ with 2 in parallel", told.out)[1]
    )
    assert total == pytest.approx(hours, abs=0.06)
    assert [path.name for path in Path("exp").iterdir()] == ["list"]
    Path("exp/list").write_text("1\texp/a\n")
    script("price.py", "exp/list", "--config", "grid.yaml").fails(1, "exp/list:1: no experiment")


def test_private_models_are_measured_beside_the_shared_one(world, cli):
    """Accuracies by hand agree, of each client's newest private model and of the shared one."""
    data = [f"--data={split}=dump/keywords/{split}" for split in ("train", "test")]
    more = ["--set", "method_conf.private_steps=5", "--section", "networks.dscnn"]
    more += ["--set", "clients_per_round=2", "--set", "rounds=4"]
    cli("init", "exp", "--config", "grid.yaml", "--method", "alo", *more, *data).ok()
    cli("rounds", "exp").ok()
    out = script("overfit.py", "exp").ok().out
    federation = Federation("exp")
    features = {split: federation.task.clips.features(split) for split in ("train", "test")}
    values = []
    for client in ("ann", "bob", "cat"):
        newest = max(Path("exp/clients", client).glob("round_*/private.safetensors"))
        row = []
        for path in (newest, Path("exp/round_0005/global.safetensors")):
            federation.task.load(load_state(path), 4)
            for split in ("train", "test"):
                clips = features[split].clips
                rows = clips.rows(client) if split == "train" else slice(0, len(clips.labels))
                logits = federation.task.hear(features[split].plain(rows)).numpy()
                row.append(100 * np.mean(logits.argmax(1) == clips.labels[rows]))
        values.append(row)
    (found,) = read_tsv("exp/private.tsv", None)
    assert found["round"] == "4" and found["clients"] == "3"
    told = [float(value) for value in list(found.values())[2:]]
    assert told == pytest.approx(np.mean(values, 0).tolist(), abs=0.01)
    assert out.splitlines()[1].split()[1:] == list(found.values())
    cli("init", "plain", "--config", "grid.yaml", "--method", "fedavg", *more[2:4], *data).ok()
    script("overfit.py", "plain").fails(1, "plain: no client has kept a private model")


def test_grids_of_the_recipe_are_of_its_networks_and_methods(world):
    for name in ("eight", "whisper"):
        path = ROOT / "conf/speechcommands" / f"{name}.yaml"
        config = yaml.safe_load(path.read_text())
        rows = [row for rows in config["grid"].values() for row in rows]
        assert config["grid"].keys() <= config["networks"].keys()
        assert {row.partition(".")[0] for row in rows} <= config["methods"].keys()
        # A private model in use has no row without it next to it.
        for network, rows in config["grid"].items():
            if any(row.startswith("alo") for row in rows):
                assert "alo.adversarial=0.0" in rows, network
