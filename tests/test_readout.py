"""Constant inputs of a client, read out of a first layer's update."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import updates_world
from conftest import inside
from safetensors.numpy import load_file
from test_language import LM
from test_language import begin as begin_language
from test_language import world as language  # noqa: F401
from torch import nn
from updates_world import CONSTANT, INPUTS, MODEL, SGD, begin, data_with_constants, sent, speakers

from fedtools.attack.speakers.readout import constant_of
from fedtools.attack.speakers.verify import COLUMNS
from fedtools.core.tables import read_tsv
from fedtools.data.ark import FeatureReader, write_ark
from fedtools.data.datadir import DataDir

PEOPLE = speakers(10)
CLIENTS = [f"{one}-a{number}" for one in PEOPLE for number in (1, 2)]
FEW = ("--resamples", "20", "--others", "0")


# --- the formula


def local_training(
    first: nn.Module, optimiser: str, steps: int, constant: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return a first layer's change by steps on frames that end in constant values."""
    random = torch.Generator().manual_seed(1)
    last = nn.Linear(16, 5).double()
    rest = nn.Sequential(nn.ReLU(), last)
    parameters = [*first.parameters(), *rest.parameters()]
    kinds = {"sgd": (torch.optim.SGD, 0.5), "adam": (torch.optim.Adam, 0.001)}
    kind, rate = kinds[optimiser]
    optimizer = kind(parameters, lr=rate)
    weight, bias = first.weight.detach().clone(), first.bias.detach().clone()
    for _ in range(steps):
        frames = torch.randn(4, 30, 8, generator=random, dtype=torch.float64)
        own = constant.expand(4, 30, -1)
        values = torch.cat([frames, own], 2)
        is_linear = isinstance(first, nn.Linear)
        hidden = first(values) if is_linear else first(values.transpose(1, 2)).transpose(1, 2)
        labels = torch.randint(5, hidden.shape[:2], generator=random)
        loss = nn.functional.cross_entropy(rest(hidden).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (first.weight - weight).detach().numpy(), (first.bias - bias).detach().numpy()


FIRST = {
    "linear": lambda: nn.Linear(28, 16),
    "convolution": lambda: nn.Conv1d(28, 16, 3, padding=1),
    "every third": lambda: nn.Conv1d(28, 16, 5, padding=4, stride=3, dilation=2),
}


def made(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return FIRST[kind]().double(), torch.randn(20, dtype=torch.float64)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("kind", FIRST)
def test_after_one_step_of_sgd_it_is_the_constant(kind):
    first, constant = made(kind)
    found = constant_of(*local_training(first, "sgd", 1, constant))
    assert found.shape == (28,)
    np.testing.assert_allclose(found[8:], constant.numpy(), atol=1e-8)
    # Values that vary give their mean.
    assert np.abs(found[:8]).max() < 3 and not np.allclose(found[:8], 0, atol=1e-3)


@pytest.mark.parametrize("kind", FIRST)
@pytest.mark.parametrize(
    ("optimiser", "steps", "least"), [("sgd", 20, 1 - 1e-9), ("adam", 20, 0.75)]
)
def test_after_more_steps_it_is_near(kind, optimiser, steps, least):
    first, constant = made(kind)
    found = constant_of(*local_training(first, optimiser, steps, constant))
    assert least < cosine(found[8:], constant.numpy()) < 1 + 1e-9


def test_of_a_bias_that_did_not_move_nothing_is_read_out():
    found = constant_of(np.ones((3, 4, 5)), np.zeros(3))
    np.testing.assert_array_equal(found, np.zeros(4))


# --- of an experiment


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("readout")
    data_with_constants(root / "train", CLIENTS, 3)
    begin(root, "sgd", rounds=2)
    return root


def compared(folder: Path) -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in read_tsv(folder / "readout.tsv", None)}


def status_of(folder: Path) -> dict[str, str]:
    return {row["part"]: row["status"] for row in read_tsv(folder / "parts.tsv", None)}


def test_the_constants_of_clients_are_read_out_of_what_they_send(world, tmp_path):
    two = ("--round", "1", "--round", "2")
    inside("attack", "weights", world / "sgd", tmp_path, *two, *FEW).ok()
    rows = compared(tmp_path)
    assert list(rows) == sorted(f"{one}-r000{number}" for one in CLIENTS for number in (1, 2))
    found = {
        name: np.array([float(row[name]) for row in rows.values()])
        for name in ("cosine", "centred")
    }
    # The direction is right, and where padding is most of a batch the sign may be wrong.
    assert np.abs(found["cosine"]).min() > 0.999
    assert (found["cosine"] > 0).mean() > 0.9 and np.median(found["centred"]) > 0.99
    # By hand: the first layer's inputs are the constants, scaled by the global model.
    own = updates_world.constants(world / "train")
    state = load_file(world / "sgd" / "round_0002" / "global.safetensors")
    for client in CLIENTS[::7]:
        update = sent(world / "sgd", 2)[client]
        names = (f"encoder.layers.0.affine.{n}" for n in ("weight", "bias"))
        read = constant_of(*(update[name] for name in names))
        mean, variance = (state[f"encoder.scale.running_{n}"] for n in ("mean", "var"))
        scaled = (own[client[:3]] - mean[-CONSTANT:]) / np.sqrt(variance[-CONSTANT:] + 1e-5)
        expected = cosine(read[-CONSTANT:], scaled)
        assert float(rows[f"{client}-r0002"]["cosine"]) == pytest.approx(expected, abs=1e-3)
    figures = {row["layer"]: row for row in read_tsv(tmp_path / "weights.tsv", COLUMNS)}
    assert float(figures["constant"]["EER%"]) < 12


def test_the_columns_can_be_said(world, tmp_path):
    first, last = INPUTS - CONSTANT + 1, INPUTS
    said = ("--set", f"weights.constant=[{first}, {last}]")
    for name, more in (("found", ()), ("said", said)):
        inside("attack", "weights", world / "sgd", tmp_path / name, *more, *FEW).ok()
    for name in ("weights.tsv", "readout.tsv", "parts.tsv", "weights.constant.easy"):
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "said" / name).read_bytes()


def test_what_local_training_with_adam_leaves(world, tmp_path):
    adam = SGD | {"optim": "adam", "optim_conf": {"lr": 0.001}}
    path = begin(world, "adam", training=adam)
    inside("attack", "weights", path, tmp_path, *FEW).ok()
    found = [float(row["cosine"]) for row in compared(tmp_path).values()]
    assert np.mean(found) > 0.8


def test_ivectors_that_change_now_and_then_are_read_out_by_their_mean(world, tmp_path):
    """Online i-vectors, as in recipes, change within an utterance."""
    shutil.copytree(world / "tokens", tmp_path / "tokens")
    shutil.copytree(world / "train", tmp_path / "train")
    data = DataDir.read(tmp_path / "train")
    reader, matrices = FeatureReader(data.feats_scp), []
    random = np.random.default_rng(0)
    for name in sorted(data.utterances):
        frames = reader.read(name).copy()
        for at in range(0, len(frames), 10):
            frames[at : at + 10, -CONSTANT:] += random.normal(0, 0.3, CONSTANT).astype("f4")
        matrices.append((name, frames))
    data.feats_scp = write_ark(tmp_path / "train" / "feats.ark", matrices)
    data.write()
    inside("attack", "weights", begin(tmp_path, "exp"), tmp_path / "out", *FEW).ok()
    assert status_of(tmp_path / "out")["constant"] == "ok"
    found = [float(row["cosine"]) for row in compared(tmp_path / "out").values()]
    assert len(found) == len(CLIENTS) and np.median(np.abs(found)) > 0.95


@pytest.mark.parametrize(
    ("encoder", "why"),
    [
        ("transformer", "sees patches of its input"),
        ("adapted", "is not sent: adapters do not change it"),
        ("personal", "is not sent: clients keep it"),
    ],
)
def test_where_nothing_can_be_read_out_it_says_why(world, tmp_path, encoder, why):
    shutil.copytree(world / "tokens", tmp_path / "tokens")
    shutil.copytree(world / "train", tmp_path / "train")
    sizes = {"output_size": 8, "attention_heads": 2, "linear_units": 8, "num_blocks": 1}
    network = {"input_size": INPUTS, "encoder": "transformer", "encoder_conf": sizes}
    more: tuple[str, ...] = ()
    if encoder == "adapted":
        base = begin(tmp_path, "base", model=network)
        network |= {"adapt": {"rank": 2, "targets": ["*linear_q"]}}
        more = ("--start", str(base / "init.safetensors"))
    if encoder == "personal":
        network, more = MODEL, ("--set", "method_conf.personal=['encoder.layers.0.*']")
    path = begin(tmp_path, "exp", *more, model=network)
    done = inside("attack", "weights", path, tmp_path / "out", *FEW).ok()
    found = status_of(tmp_path / "out")
    for name in ("input", "constant"):
        assert found[name].startswith("not applicable: the first layer, encoder.")
        assert why in found[name] and f"{name}: {found[name]}\n" in done.err
    layers = {row["layer"] for row in read_tsv(tmp_path / "out" / "weights.tsv", COLUMNS)}
    assert {"all", "together"} <= layers and not layers & {"input", "constant"}


def test_a_language_model_begins_with_a_table_of_words(language, tmp_path):  # noqa: F811
    path = begin_language(language, tmp_path / "exp")
    two = ("--round", "1", "--round", "2")
    inside("attack", "weights", path, tmp_path / "out", *two, *FEW).ok()
    found = status_of(tmp_path / "out")
    assert found["input"].startswith("not applicable: the first layer, embed, is a table of words")
    assert found["embed"] == "ok" and LM["layer"] == 1


PLUGIN = '''
from dataclasses import dataclass

from torch import nn

from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.stacked import BatchNorm2d, Conv1d, Linear


class Normed(Network):
    def __init__(self, sizes, clients, bins, frames, classes):
        super().__init__()
        self.first = Conv1d(clients, bins, 6, 3, padding=1)
        self.norm = BatchNorm2d(clients, 6)
        self.head = Linear(clients, 6, classes)

    def features(self, mfcc, valid=None):
        clients, batch, frames, bins = mfcc.shape
        values = mfcc.permute(1, 0, 3, 2).reshape(batch, clients * bins, frames)
        images = self.norm(self.first(values)[:, :, None], valid)
        return images.relu().mean((2, 3)).view(batch, clients, 6).transpose(0, 1)


@NETWORKS.register("normed")
@dataclass(frozen=True)
class NormedSizes(Sizes):
    """A convolution that BatchNorm follows at once."""

    network = Normed
    title = "Normed"
'''


def test_before_batchnorm_a_bias_does_not_move(tmp_path, monkeypatch):
    import keywords
    from commands import fedtools

    (tmp_path / "own" / "keywords").mkdir(parents=True)
    (tmp_path / "own" / "keywords" / "normed.py").write_text(PLUGIN)
    monkeypatch.setenv("FEDTOOLS_PATH", str(tmp_path / "own"))
    model = {"network": "normed"}
    keywords.config_file(tmp_path / "c.yaml", rounds=2, keep_updates=True, model=model)
    clips = keywords.pack(tmp_path / "train", {one: [0, 0, 4, 4] for one in speakers(6)})
    valid = keywords.pack(tmp_path / "valid", {"zoe": [2, 2, 4, 4]})
    path = tmp_path / "exp"
    fedtools(
        *("init", path, "--config", tmp_path / "c.yaml", "--method", "fedavg"),
        *("--data", f"train={clips}", "--data", f"valid={valid}"),
        *("--set", "clients_per_round=null"),
    ).ok()
    fedtools("rounds", path).ok()
    # Check that premise.
    moved = [one["first.bias"] for one in sent(path).values()]
    weights = [one["first.weight"] for one in sent(path).values()]
    assert np.abs(moved).max() < 1e-4 * np.abs(weights).max()
    two = ("--round", "1", "--round", "2")
    fedtools("attack", "weights", path, tmp_path / "out", *two, *FEW).ok()
    assert "BatchNorm follows directly" in status_of(tmp_path / "out")["input"]
