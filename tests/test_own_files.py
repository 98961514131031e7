"""A network and a method in a user's own files: a recipe needs only their names."""

from __future__ import annotations

import os
import re

import keywords
import numpy as np
import pytest
import yaml
from conftest import fedtools, run
from keyword_checkout import command, make_checkout
from keyword_world import OWN_NETWORK
from safetensors.numpy import load_file

OWN_METHOD = '''
from dataclasses import dataclass

from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg


@METHODS.register("mymethod")
@dataclass(frozen=True)
class MyMethod(FedAvg):
    """The server goes a part of the way to the clients' mean."""

    title = "Part of the way"

    part: float = 1.0

    def server(self, server):
        server.mean()
        server.step(lambda delta, kept: self.part * delta, {})
'''
OWN_CONFIG = {
    "task": "kws",
    "rounds": 2,
    "evaluate_every": 1,
    "clients_per_round": 3,
    "training": {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_size": 8, "stack": 2},
    "method_conf": {"local_steps": 2},
    "networks": {"mynet": {"model": {"network": "mynet", "network_conf": {"width": 5}}}},
    "methods": {"fedavg": {}, "mymethod": {"method_conf": {"part": 0.25}}},
}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "broken",
            "x = 1\nraise RuntimeError('no luck')\n",
            "broken.py:2: cannot be imported: Run",
        ),
        ("broken", "import sys\nsys.exit(0)\n", "broken.py:2: cannot be imported: SystemExit: 0"),
        ("broken", "def f(:\n", "broken.py:1: cannot be imported: SyntaxError"),
        ("broken", "import nothing_of_the_kind\n", "broken.py:1: cannot be imported: ModuleNot"),
        (
            "mine",
            OWN_METHOD.replace("mymethod", "fedavg"),
            "mine.py: registers the method 'fedavg'",
        ),
        ("fedavg", OWN_METHOD, "plug/methods/fedavg.py: never imported"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, name, text, said):
    (tmp_path / "plug" / "methods").mkdir(parents=True)
    (tmp_path / "plug" / "methods" / f"{name}.py").write_text(text)
    environment = {"FEDTOOLS_PATH": str(tmp_path / "plug")}
    fedtools("methods", env=environment).fails(1, said)


def test_a_recipe_takes_them_by_name(tmp_path):
    plug = tmp_path / "plug"
    for name, text in (("methods/mymethod.py", OWN_METHOD), ("keywords/mynet.py", OWN_NETWORK)):
        (plug / name).parent.mkdir(parents=True)
        (plug / name).write_text(text)
    recipe = make_checkout(tmp_path)
    (recipe / "my.yaml").write_text(yaml.safe_dump(OWN_CONFIG))
    counts = {f"c{number}": [3, 2, number, 4] for number in range(5)}
    for split, clients in (("train", counts), ("valid", {"v": [1] * 4}), ("test", {"t": [3] * 4})):
        keywords.pack(recipe / "dump" / "own" / "keywords" / split, clients)
    words, environment = command(recipe)
    environment |= {"FEDTOOLS_PATH": str(plug)}
    options = ["--tag", "own", "--release", "none", "--seeds", "0", "--tasks", "12", "--ngpu", "0"]
    options += ["--config", "my.yaml", "--networks", "mynet", "--methods", "fedavg mymethod"]
    for first, last in (("3", "5"), ("7", "7")):
        run(words[0], *options, "--stage", first, "--stop_stage", last, env=environment).ok()
    experiments = recipe / "exp" / "own" / "keywords" / "mynet"
    page = (recipe / "exp" / "own" / "RESULTS.md").read_text()
    accuracy, costs = (
        page[page.index(caption) :].split("\n\n")[1]
        for caption in ("accuracy (%) of federated", "communication and computation")
    )
    assert re.search(r"^\| Method +\| +keywords My own", accuracy)
    for table in (accuracy, costs):
        assert "FedAvg" in table and "Part of the way" in table and "My own" in table
    assert (experiments / "mymethod" / "seed0" / "detection_test.tsv").exists()
    # This method ran, with the option of its section.
    states = {
        method: [
            load_file(experiments / method / "seed0" / f"round_000{number}" / "global.safetensors")
            for number in (1, 2)
        ]
        for method in ("fedavg", "mymethod")
    }
    (start, mean), (same, found) = states["fedavg"], states["mymethod"]
    for name, value in found.items():
        assert np.array_equal(start[name], same[name])
        wanted = start[name] + 0.25 * (mean[name] - start[name])
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)
    assert any(not np.array_equal(mean[name], start[name]) for name in start)
    # Without the folder, the name is unknown.
    without = {key: value for key, value in environment.items() if key != "FEDTOOLS_PATH"}
    assert "FEDTOOLS_PATH" not in os.environ
    refused = run(words[0], *options, "--stage", "4", "--stop_stage", "4", env=without)
    assert refused.code == 1 and "unknown method 'mymethod'" in refused.err
