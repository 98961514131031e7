"""Faults of a network of one's own: each is one line, before anything is trained."""

from __future__ import annotations

import keywords
import pytest
import yaml
from conftest import fedtools
from keyword_world import OWN_NETWORK

# What is changed in a network that works, and what init says.
FAULTS = {
    "torch's own layer": (
        [("Linear(clients, bins, sizes.width)", "nn.Linear(bins, sizes.width)")],
        ("hidden.weight is [7, 40] for 2 clients: no client dimension", "fedtools.models.stacked"),
    ),
    "a size that is that of the clients": (
        [
            ("Linear(clients, bins, sizes.width)", "nn.Linear(bins, 2)"),
            ("Linear(clients, sizes.width, classes)", "Linear(clients, 2, classes)"),
        ],
        ("hidden.weight is [2, 40] for 3 clients: no client dimension",),
    ),
    "a buffer": (
        [("self.hidden =", "self.register_buffer('mean', torch.zeros(40)); self.hidden =")],
        ("mean is [40] for 2 clients: no client dimension",),
    ),
    "features transposed": (
        [(".relu()", ".relu().transpose(0, 1)")],
        ("features are [4, 3, 7], not [3, 4, values]", "features (clients, clips, values)"),
    ),
    "features with time": (
        [("mfcc.mean(2)", "mfcc")],
        ("features are [3, 4, 33, 7], not [3, 4, values]",),
    ),
    "clients that mix": (
        [("self.hidden(mfcc.mean(2))", "self.hidden(mfcc.mean(2) - mfcc.mean((0, 1, 2)))")],
        ("the input of one client changes the output of another",),
    ),
    "as many clients as at first": (
        [("mfcc.mean(2)", "mfcc.mean(2) * self.head.weight[:, :1, :1]")],
        ("mynet.py:18: MyNet fails: RuntimeError", "A keyword network"),
    ),
    "no head": ([("self.head =", "self.top =")], ("the network has no head", "self.head = Linear")),
    "a head of another width": (
        [("Linear(clients, sizes.width, classes)", "Linear(clients, 5, classes)")],
        ("MyNet fails: RuntimeError", "features (clients, clips, values)"),
    ),
    "another number of classes": (
        [("Linear(clients, sizes.width, classes)", "Linear(clients, sizes.width, 3)")],
        ("logits are [3, 4, 3], not [3, 4, 4]",),
    ),
    "no network": (
        [("    network = MyNet\n", "")],
        ("the network 'mynet' has options without network", "derived from Network"),
    ),
    "no title": ([('    title = "My own"\n', "")], ("has options without title",)),
    "no dataclass": (
        [("@dataclass(frozen=True)\n", "")],
        ("has an option 'width', but is no dataclass",),
    ),
    "no options": ([("class MySizes(Sizes)", "class MySizes")], ("derived from Sizes",)),
    "other arguments": (
        [("sizes, clients, bins, frames, classes)", "sizes, clients)")],
        ("MyNet fails: TypeError",),
    ),
    "no mask": ([("mfcc, valid=None", "mfcc")], ("MyNet fails: TypeError",)),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("networks")
    keywords.pack(root / "train", {"c0": [3, 2, 1, 4], "c1": [1, 2, 3, 4]})
    keywords.config_file(root / "c.yaml", model={"network": "mynet"}, clients_per_round=2)
    return root


def begin(world, folder, text, *more):
    (folder / "plug/keywords").mkdir(parents=True, exist_ok=True)
    (folder / "plug/keywords/mynet.py").write_text(text)
    environment = {"FEDTOOLS_PATH": str(folder / "plug")}
    words = "init", folder / "exp", "--config", world / "c.yaml", "--method", "fedavg", *more
    return fedtools(*words, "--data", f"train={world / 'train'}", env=environment)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(world, tmp_path, fault):
    changes, said = FAULTS[fault]
    text = "import torch\nfrom torch import nn\n" + OWN_NETWORK
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    done = begin(world, tmp_path, text).fails(1, f"{tmp_path}/plug/keywords/mynet.py", *said)
    assert "CONTRIBUTING.md" in done.err or "stacked" in done.err
    assert not (tmp_path / "exp").exists()


def test_without_a_fault_it_begins_as_without_the_trial(world, tmp_path):
    """The trial draws from torch's generator, and leaves no trace of that."""
    begin(world, tmp_path, OWN_NETWORK).ok()
    assert (tmp_path / "exp/sha256sums").exists()


def test_an_option_of_another_network_is_named_with_it(world, tmp_path):
    """The section of the network that one's own is to replace stands in the same file."""
    config = yaml.safe_load((world / "c.yaml").read_text())
    config["networks"] = {
        "mhattrnn": {"model": {"network": "mhattrnn", "network_conf": {"heads": 4}}},
        "resnet": {"model": {"network": "resnet", "network_conf": {"channels": 4}}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    more = "--config", tmp_path / "c.yaml", "--set", "model.network=mynet", "--section"
    done = begin(world, tmp_path, OWN_NETWORK, *more, "networks.mhattrnn")
    said = "network_conf of mynet: unknown option 'heads'"
    done.fails(
        1, f"{tmp_path}/c.yaml", said, "mhattrnn, transformer have it", "model.network_conf={}"
    )
    done = begin(world, tmp_path, OWN_NETWORK, *more, "networks.resnet")
    done.fails(1, "unknown option 'channels'", "dscnn, resnet have it")
    again = "--set", "model.network_conf={}"
    begin(world, tmp_path, OWN_NETWORK, *more, "networks.resnet", *again).ok()


METHOD = '''
from dataclasses import dataclass

from fedtools.methods import METHODS
from fedtools.methods.fedavg import FedAvg


@METHODS.register("mymethod")
@dataclass(frozen=True)
class MyMethod(FedAvg):
    """Mine."""

    title = "Mine"
    part: float = 1.0
'''


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("@dataclass(frozen=True)\n", "", "has an option 'part', but is no dataclass"),
        ("class MyMethod(FedAvg)", "class MyMethod", "is no class derived from Method"),
    ],
)
def test_faults_of_a_method_are_one_line(tmp_path, old, new, said):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/mymethod.py").write_text(METHOD.replace(old, new))
    done = fedtools("methods", "mymethod", env={"FEDTOOLS_PATH": str(tmp_path)})
    done.fails(1, f"mymethod.py: the method 'mymethod' {said}", "'A method' in CONTRIBUTING.md")


def test_a_method_without_a_name_in_tables_is_one_line(tmp_path):
    (tmp_path / "methods").mkdir()
    text = METHOD.replace('    title = "Mine"\n', "").replace(
        "fedavg import FedAvg", "base import Method"
    )
    (tmp_path / "methods/mymethod.py").write_text(text.replace("(FedAvg)", "(Method)"))
    done = fedtools("methods", "mymethod", env={"FEDTOOLS_PATH": str(tmp_path)})
    done.fails(1, "the method 'mymethod' has no title")
