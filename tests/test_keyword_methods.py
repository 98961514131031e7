"""Methods of keyword spotting: by hand, and by autograd over plain losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import keywords
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from bare_networks import as_bare, bare_dscnn
from by_hand import mmd_by_hand
from conftest import inside, ledger
from kaldi_mfcc import kaldi_mfcc
from keyword_world import CLIENTS, CONFIG, begin, make_world
from safetensors.numpy import load_file
from torch import Tensor

from fedtools.core.errors import UserError
from fedtools.core.tables import read_tsv
from fedtools.exchange.messages import COLUMNS
from fedtools.federation.federation import Federation
from fedtools.methods import make_method
from fedtools.methods.fedavg import FedAvg
from fedtools.methods.fedkws_ui import Alt, FedKwsUi
from fedtools.methods.fedmmd import squared_mmd
from fedtools.methods.fedopt import FedOpt
from fedtools.models.keywords import Network
from fedtools.models.keywords.clip_batch import ClipBatch
from fedtools.tasks.kws.model import tensors_of

RATE = 0.05
STEPS = CONFIG["method_conf"]["local_steps"]
PLAIN = (
    "clients_per_round=7",
    "keep_updates=true",
    f"training.optim_conf={{lr: {RATE}, momentum: 0}}",
    "training.stack=1",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """Make packed clips and a configuration."""
    return make_world(tmp_path_factory.mktemp("world"))


def round_of(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Run a round; return client -> its sent tensors."""
    inside("rounds", path, "--to", "1", "--nj", "1").ok()
    rows = read_tsv(path / "round_0001" / "update.1.tsv", COLUMNS)
    sent = load_file(path / "round_0001" / "update.1.safetensors")
    return {
        row["client"]: {name: value[index] for name, value in sent.items()}
        for index, row in enumerate(rows)
    }


# Called with a network, a batch, the federation and the client's name.
Loss = Callable[[Network, ClipBatch, Federation, str], Tensor]


def descend(federation: Federation, client: str, steps: int, loss: Loss) -> dict[str, Tensor]:
    """Run plain gradient descent of an explicit loss over the same batches."""
    place = federation.client([client], 1)
    network = copy.deepcopy(place.model).train()
    for (batch,) in place.source.batches(None, steps, "train").stream(0):
        network.zero_grad()
        loss(network, batch, federation, client).backward()
        with torch.no_grad():
            for value in network.parameters():
                value -= RATE * value.grad
    return tensors_of(network)


def check(path: Path, steps: int, loss: Loss) -> None:
    """Check that a round's updates are those of plain gradient descent, for every client."""
    found = round_of(path)
    assert len(found) == len(CLIENTS)
    federation = Federation(path)
    for client, tensors in found.items():
        with federation.settings():
            expected = descend(federation, client, steps, loss)
        for name, value in tensors.items():
            by_hand = expected[name].detach().numpy()
            np.testing.assert_allclose(value, by_hand, rtol=1e-3, atol=2e-6)


def cross_entropy(network: Network, batch: ClipBatch) -> Tensor:
    return F.cross_entropy(network(batch.mfcc)[0], batch.labels[0])


def test_fedprox(world, tmp_path):
    path = begin(world, tmp_path / "exp", "fedprox", *PLAIN, "method_conf.proximal=0.7")
    start = {
        key: torch.tensor(value) for key, value in load_file(path / "init.safetensors").items()
    }

    def loss(network: Network, batch: ClipBatch, *_: object) -> Tensor:
        apart = [(value[0] - start[name]).norm() ** 2 for name, value in network.named_parameters()]
        return cross_entropy(network, batch) + 0.7 / 2 * sum(apart)

    check(path, STEPS, loss)


def test_squared_mmd():
    random = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(2, 5, 3, generator=random) + shift for shift in (0.0, 0.5))
    weights = torch.tensor([[0.2] * 5, [0.25, 0.25, 0.25, 0.25, 0.0]])
    found = squared_mmd(ours, theirs, weights)
    # The second client's fifth clip is padding.
    expected = mmd_by_hand(ours[0], theirs[0]), mmd_by_hand(ours[1, :4], theirs[1, :4])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(squared_mmd(ours, ours, weights), torch.zeros(2), rtol=0, atol=1e-6)


def test_fedmmd(world, tmp_path):
    settings = "method_conf.discrepancy=0.5", "method_conf.local_steps=2"
    path = begin(world, tmp_path / "exp", "fedmmd", *PLAIN, *settings)

    def loss(network: Network, batch: ClipBatch, federation: Federation, _: str) -> Tensor:
        federation.load_result(None, 0)
        with torch.no_grad():
            theirs = federation.task.models.build().eval().features(batch.mfcc)[0]
        features = network.features(batch.mfcc)
        entropy = F.cross_entropy(network.head(features)[0], batch.labels[0])
        return entropy + 0.5 * mmd_by_hand(features[0], theirs)

    check(path, 2, loss)


def test_adversarial_learning(world, tmp_path):
    """Losses follow equations 1 to 3, with the private model that the client kept."""
    settings = ["method_conf.smoothing=0.3", "method_conf.adversarial=0.8"]
    path = begin(world, tmp_path / "exp", "alo", *PLAIN, *settings)

    def loss(network: Network, batch: ClipBatch, federation: Federation, client: str) -> Tensor:
        private = federation.task.models.build(1, "copy").eval()
        for name, value in load_file(kept_by(path, client)).items():
            tensors_of(private)[name].copy_(torch.tensor(value))
        log_probs = network(batch.mfcc)[0].log_softmax(-1)
        classes = log_probs.shape[-1]
        target = 0.7 * F.one_hot(batch.labels[0], classes) + 0.3 / classes
        smooth = -(target * log_probs).sum(-1).mean()
        with torch.no_grad():
            overfitted = private(batch.mfcc)[0].softmax(-1)
        against = -(overfitted * log_probs).sum(-1).mean()
        return smooth - 0.8 * against

    check(path, STEPS, loss)
    start = load_file(path / "init.safetensors")
    for client in CLIENTS:
        private = load_file(kept_by(path, client))
        assert any(not np.array_equal(value, start[name]) for name, value in private.items())


def kept_by(path: Path, client: str) -> Path:
    """Return a client's private model after a round."""
    return path / "clients" / client / "round_0001" / "private.safetensors"


def test_utility_and_steps():
    """Utility is section 4's harmonic mean of relative size and entropy; total work is kept."""
    sizes, entropies = np.array([100, 50, 20, 3]), np.array([0.9, 1.0, 0.4, 0.0])
    facts = Alt(local_steps=50).prepare(sizes, entropies, 32)
    by_hand = [2 * 1.0 * 0.9 / 1.9, 2 * 0.5 / 1.5, 2 * 0.2 * 0.4 / 0.6, 0.0]
    np.testing.assert_allclose(facts["utility"], by_hand)
    ratio = 4 / sum(by_hand)
    assert facts["steps"].tolist() == [*(round(ratio * one * 50) for one in by_hand[:3]), 1]
    assert abs(facts["steps"].sum() - 4 * 50) <= 3
    # r0 may be given.
    facts = Alt(local_steps=50, base_ratio=3.5).prepare(sizes, entropies, 32)
    assert facts["steps"].tolist() == [*(round(3.5 * one * 50) for one in by_hand[:3]), 1]
    even = FedKwsUi(local_steps=50, adaptive=False).prepare(sizes, entropies, 32)
    assert even["steps"].tolist() == [50] * 4


def test_as_many_clips_as_without_adaptive_steps():
    """Batches have at most 32 clips, so clients with many clips train on more per step."""
    sizes, entropies = np.array([100, 50, 20, 3]), np.array([0.9, 1.0, 0.4, 0.5])
    batches = np.array([32, 32, 20, 3])
    fedavg = 50 * batches.sum()
    steps = Alt(local_steps=50).prepare(sizes, entropies, 32)["steps"]
    assert abs(steps.sum() - 4 * 50) <= 2 and (steps * batches).sum() > 1.2 * fedavg
    facts = Alt(local_steps=50, conserve="clips").prepare(sizes, entropies, 32)
    # Rounded to whole steps.
    assert abs((facts["steps"] * batches).sum() - fedavg) <= batches.sum() / 2
    utility = facts["utility"]
    np.testing.assert_allclose(facts["ratio"] / utility, fedavg / (50 * utility @ batches))
    with pytest.raises(ValueError, match="base_ratio must be 0"):
        Alt(conserve="clips", base_ratio=3.5)
    with pytest.raises(UserError, match="'work': input should be 'steps' or 'clips'"):
        make_method("alt", {"conserve": "work"}, "c.yaml")


def test_steps_without_any_utility(world, cli, tmp_path):
    """Clients of one label have a utility of 0, which no r0 can scale to work."""
    sizes, nothing = np.array([10, 20, 5]), np.zeros(3)
    with pytest.raises(ValueError, match="no client has clips of two labels"):
        Alt(local_steps=50).prepare(sizes, nothing, 32)
    given = Alt(local_steps=50, base_ratio=3.5).prepare(sizes, nothing, 32)
    assert given["steps"].tolist() == [1, 1, 1]
    one = np.eye(len(keywords.CLASSES), dtype=int)
    keywords.pack(tmp_path / "train", {"a": 4 * one[0], "b": 3 * one[1]})
    cli(
        *("init", tmp_path / "exp", "--config", world / "config.yaml", "--method", "alt"),
        *("--set", "clients_per_round=1.0", "--data", f"train={tmp_path / 'train'}"),
    ).ok()
    cli("rounds", tmp_path / "exp").fails(1, "no client has clips of two labels", "train")


def test_server_steps_by_hand():
    """Algorithm 2 of S. Reddi et al., three rounds of one parameter: v starts at tau^2."""
    deltas = [0.5, -0.2, 0.1]
    for optimizer in ("sgd", "adam", "yogi"):
        method = FedOpt(
            optimizer=optimizer, learning_rate=0.3, momentum=0.9, decay=0.99, adaptivity=0.01
        )
        kept = {slot: np.full(1, first) for slot, first in method.slots.items()}
        m, v = 0.0, 0.01 * 0.01
        for delta in deltas:
            (found,) = method.step(np.array([delta]), kept)
            if optimizer == "sgd":
                m = 0.9 * m + delta
                expected = 0.3 * m
            else:
                m = 0.9 * m + 0.1 * delta
                if optimizer == "adam":
                    v = 0.99 * v + 0.01 * delta**2
                else:
                    v = v - 0.01 * delta**2 * math.copysign(1.0, v - delta**2)
                expected = 0.3 * m / (math.sqrt(v) + 0.01)
            assert found == pytest.approx(expected, rel=1e-12)


def test_server_steps_of_a_federation(world, tmp_path):
    """With a rate of 1 and no momentum the server is FedAvg's; with half, it takes half the step.

    Adam's first step is computed by hand.
    """
    states = {}
    for name, method, *settings in (
        ("mean", "fedavg"),
        ("whole", "fedopt", "method_conf.learning_rate=1.0", "method_conf.momentum=0.0"),
        ("half", "fedopt", "method_conf.learning_rate=0.5", "method_conf.momentum=0.0"),
        ("adam", "fedopt", "method_conf.optimizer=adam", "method_conf.adaptivity=0.01"),
    ):
        path = begin(world, tmp_path / name, method, *settings)
        inside("rounds", path, "--to", "1", "--nj", "1").ok()
        start = load_file(path / "round_0001" / "global.safetensors")
        states[name] = load_file(path / "round_0002" / "global.safetensors")
    for name, mean in states["mean"].items():
        np.testing.assert_allclose(states["whole"][name], mean, rtol=1e-6, atol=1e-7)
        half = mean if "running" in name else (start[name] + mean) / 2
        np.testing.assert_allclose(states["half"][name], half, rtol=1e-5, atol=1e-6)
        delta = mean - start[name]
        adam = start[name] + 0.1 * delta / (np.sqrt(0.99 * 0.01**2 + 0.01 * delta**2) + 0.01)
        adam = mean if "running" in name else adam
        np.testing.assert_allclose(states["adam"][name], adam, rtol=1e-5, atol=1e-5)


# --- two rounds of torch's own layers and optimiser, on Kaldi's features of the packed clips

# All clips of a client in one unmodified batch, so that a step does not depend on their order.
WHOLE = (
    "training.batch_size=97",
    "training.augment={time_shift_ms: 0, noise_volume: 0.0}",
)
Heard = tuple[Tensor, Tensor]
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def heard(world) -> dict[str, Heard]:
    """Return client -> features of its training clips."""
    return hear(world / "train")


def hear(folder: Path) -> dict[str, Heard]:
    """Return client -> Kaldi's MFCC of its clips, scaled, and their labels, from utt2label."""
    waves = np.load(folder / "clips.npy").astype(np.float32)
    rows = [line.split("\t") for line in (folder / "clips.tsv").read_text().splitlines()[1:]]
    found: dict[str, list] = {}
    for wave, (_, client, label, _) in zip(waves, rows, strict=True):
        mfcc = torch.tensor(kaldi_mfcc(wave, 40, 30, 10, 16_000))
        mfcc[:, 0] -= 100
        found.setdefault(client, []).append((mfcc / 16, keywords.CLASSES.index(label)))
    return {
        client: (torch.stack([mfcc for mfcc, _ in own]), torch.tensor([label for _, label in own]))
        for client, own in found.items()
    }


class Trainer:
    """A client, or the server, with a network of torch's layers and all its clips in a batch."""

    def __init__(self, heard: Heard):
        self.mfcc, self.labels = heard
        self.network = bare_dscnn(len(keywords.CLASSES), channels=6, blocks=1)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.02, momentum=0.9)

    def entropy(self) -> Tensor:
        return F.cross_entropy(self.network(self.mfcc), self.labels)

    def predict(self, state: State, layers: slice = slice(None)) -> Tensor:
        """Return outputs of the network, or of some of its layers, in evaluation mode."""
        self.network.load_state_dict(state, strict=False)
        with torch.no_grad():
            return self.network.eval()[layers](self.mfcc)

    def fit(self, state: State, steps: int, loss: Callable[[], Tensor] | None = None) -> State:
        self.network.load_state_dict(state, strict=False)
        self.network.train()
        for _ in range(steps):
            self.optimizer.zero_grad()
            (loss or self.entropy)().backward()
            self.optimizer.step()
        return {
            name: value.clone()
            for name, value in self.network.state_dict().items()
            if name in state
        }


def read_state(path: Path) -> State:
    """Read a model's file with the names of torch's layers."""
    return as_bare("dscnn", {name: torch.tensor(value) for name, value in load_file(path).items()})


def begin_whole(world: Path, path: Path, method: str, *settings: str) -> tuple[Path, State]:
    """Run two rounds of five clients; return the experiment, and its initial state."""
    begin(world, path, method, *WHOLE, *settings)
    inside("rounds", path, "--to", "2").ok()
    return path, read_state(path / "init.safetensors")


def mean_of(states: list[State], weights: list[float]) -> State:
    shares = [weight / sum(weights) for weight in weights]
    return {
        name: sum(one[name].double() * share for one, share in zip(states, shares, strict=True))
        for name in states[0]
    }


def sampled(path: Path, number: int) -> list[str]:
    return (path / f"round_{number:04d}" / "clients").read_text().split()


def rounds_by_hand(
    path: Path,
    start: State,
    local: Callable[[str, State], State],
    server: Callable[[State, State], State] = lambda state, mean: mean,
    weight: Callable[[str], float] = lambda client: 1.0,
) -> State:
    """Run two rounds by `local`, of client name and state, and `server`, of state and mean."""
    state = start
    for number in (1, 2):
        clients = sampled(path, number)
        sent = [local(client, state) for client in clients]
        mean = mean_of(sent, [weight(client) for client in clients])
        state = {name: value.float() for name, value in server(state, mean).items()}
    return state


def assert_near(found: State, expected: State, start: State) -> None:
    """Check that parameters and statistics agree within some thousandths of the distance moved."""
    for statistics in (False, True):
        names = [name for name in expected if ("running" in name) == statistics]
        apart, moved = (
            sum((one[name].double() - expected[name]).square().sum() for name in names).sqrt()
            for one in (found, start)
        )
        assert moved > 0 and apart < 3e-3 * moved, (statistics, apart / moved)


def after_two(path: Path) -> State:
    return read_state(path / "round_0003" / "global.safetensors")


def test_two_rounds_of_fedavg(world, heard, tmp_path):
    path, start = begin_whole(world, tmp_path / "exp", "fedavg", "method_conf.weighting=utterances")
    expected = rounds_by_hand(
        path,
        start,
        lambda client, state: Trainer(heard[client]).fit(state, STEPS),
        weight=lambda client: len(heard[client][1]),
    )
    assert_near(after_two(path), expected, start)


def test_two_rounds_of_fedprox(world, heard, tmp_path):
    """The proximal term refers to the model of this round, not of the first."""
    path, start = begin_whole(world, tmp_path / "exp", "fedprox", "method_conf.proximal=0.7")

    def local(client: str, state: State) -> State:
        trainer = Trainer(heard[client])

        def loss() -> Tensor:
            named = trainer.network.named_parameters()
            apart = sum((value - state[name]).square().sum() for name, value in named)
            return trainer.entropy() + 0.7 / 2 * apart

        return trainer.fit(state, STEPS, loss)

    assert_near(after_two(path), rounds_by_hand(path, start, local), start)


def test_two_rounds_of_fedmmd(world, heard, tmp_path):
    """The server's features are those of this round's model, in evaluation mode."""
    path, start = begin_whole(world, tmp_path / "exp", "fedmmd", "method_conf.discrepancy=0.5")

    def local(client: str, state: State) -> State:
        trainer = Trainer(heard[client])
        theirs = trainer.predict(state, slice(-1))

        def loss() -> Tensor:
            ours = trainer.network[:-1](trainer.mfcc)
            entropy = F.cross_entropy(trainer.network[-1](ours), trainer.labels)
            return entropy + 0.5 * mmd_of_matrices(ours, theirs)

        return trainer.fit(state, STEPS, loss)

    assert_near(after_two(path), rounds_by_hand(path, start, local), start)


def mmd_of_matrices(ours: Tensor, theirs: Tensor) -> Tensor:
    """Compute `mmd_by_hand` by the three blocks of the kernel matrix."""
    both = torch.cat([ours, theirs])
    apart = (both[:, None] - both).square().sum(-1)
    width = (apart.mean() + 1e-3 * both.square().sum(1).mean()).detach()
    kernels = sum(torch.exp(-apart / (factor * width)) for factor in (0.25, 0.5, 1, 2, 4))
    n = len(ours)
    return kernels[:n, :n].mean() + kernels[n:, n:].mean() - 2 * kernels[:n, n:].mean()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_rounds_of_fedopt(world, heard, tmp_path, optimizer):
    """The server's state of the first round counts in the second; statistics are the mean's."""
    rate, tau = 0.5, 0.05
    options = f"method_conf={{local_steps: {STEPS}, optimizer: {optimizer}, learning_rate: {rate}, "
    options += f"momentum: 0.9, decay: 0.99, adaptivity: {tau}}}"
    path, start = begin_whole(world, tmp_path / "exp", "fedopt", options)
    first = {name: torch.zeros_like(value).double() for name, value in start.items()}
    second = {name: torch.full_like(value, tau**2) for name, value in first.items()}

    def server(state: State, mean: State) -> State:
        found = dict(mean)
        for name in mean:
            if "running" in name:
                continue
            delta = mean[name] - state[name]
            first[name] = 0.9 * first[name] + (1 if optimizer == "sgd" else 0.1) * delta
            second[name] = 0.99 * second[name] + 0.01 * delta**2
            scale = 1 if optimizer == "sgd" else 1 / (second[name].sqrt() + tau)
            found[name] = state[name] + rate * first[name] * scale
        return found

    def local(client: str, state: State) -> State:
        return Trainer(heard[client]).fit(state, STEPS)

    assert_near(after_two(path), rounds_by_hand(path, start, local, server), start)


def steps_by_hand(heard: dict[str, Heard]) -> dict[str, int]:
    """Return section 4's steps r0 r_k E; r_k is the harmonic mean of amount and evenness."""
    sizes = {client: len(labels) for client, (_, labels) in heard.items()}
    utility = {}
    for client, (_, labels) in heard.items():
        shares = [
            labels.tolist().count(label) / len(labels) for label in range(len(keywords.CLASSES))
        ]
        even = -sum(share * math.log(share) for share in shares if share)
        even /= math.log(len(keywords.CLASSES))
        amount = sizes[client] / max(sizes.values())
        utility[client] = 2 * amount * even / (amount + even)
    base = len(sizes) / sum(utility.values())
    return {client: max(1, round(base * one * STEPS)) for client, one in utility.items()}


def test_two_rounds_of_fedkws_ui(world, heard, tmp_path):
    """Clients take their own steps, and continue from their kept private models."""
    settings = "method_conf.smoothing=0.3", "method_conf.adversarial=0.8"
    path, start = begin_whole(world, tmp_path / "exp", "fedkws_ui", *settings)
    steps, private = steps_by_hand(heard), {}
    assert len(set(steps.values())) > 3

    def local(client: str, state: State) -> State:
        private[client] = Trainer(heard[client]).fit(private.get(client, state), STEPS)
        overfitted = Trainer(heard[client]).predict(private[client]).softmax(-1)
        trainer = Trainer(heard[client])

        def loss() -> Tensor:
            logits = trainer.network(trainer.mfcc)
            smooth = F.cross_entropy(logits, trainer.labels, label_smoothing=0.3)
            return smooth - 0.8 * F.cross_entropy(logits, overfitted)

        return trainer.fit(state, steps[client], loss)

    expected = rounds_by_hand(path, start, local)
    twice = set(sampled(path, 1)) & set(sampled(path, 2))
    assert len(twice) > 2
    for client in twice:
        kept = path / "clients" / client / "round_0002" / "private.safetensors"
        assert_near(read_state(kept), private[client], start)
    assert_near(after_two(path), expected, start)


def test_centralised_training_is_on_everybodys_clips(world, heard, tmp_path):
    """Three rounds take one step each over all clips, with one momentum."""
    path = begin(world, tmp_path / "exp", "centralized", *WHOLE)
    # Evaluation during training puts the network into evaluation mode.
    inside("rounds", path, "--to", "3", "--evaluate", "test").ok()
    start = read_state(path / "init.safetensors")
    everything = tuple(torch.cat(parts) for parts in zip(*heard.values(), strict=True))
    expected = Trainer(everything).fit(start, 3)
    assert_near(read_state(path / "round_0004" / "global.safetensors"), expected, start)
    epochs = [(row["client"], row["server_epochs"]) for row in ledger(path)]
    assert epochs == [("-", "1")] * 3


@pytest.mark.parametrize("method", ["fedavg", "centralized"])
def test_models_are_measured_by_the_statistics_of_training(world, tmp_path, method):
    """After every round, test clips are normalised by BatchNorm's running statistics."""
    path = begin(world, tmp_path / "exp", method, *WHOLE)
    inside("rounds", path, "--to", "2", "--evaluate", "test").ok()
    inside("evaluate", path, "--split", "test").ok()
    everything = tuple(
        torch.cat(parts) for parts in zip(*hear(world / "test").values(), strict=True)
    )
    rows = read_tsv(path / "evaluate_test.tsv", None)
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    for row in rows:
        state = read_state(path / f"round_{int(row['round']) + 1:04d}" / "global.safetensors")
        logits = Trainer(everything).predict(state)
        loss = F.cross_entropy(logits, everything[1]).item()
        assert float(row["loss"]) == pytest.approx(loss, rel=1e-3)
        errors = int((logits.argmax(1) != everything[1]).sum())
        assert (int(row["clips"]), int(row["errors"])) == (len(logits), errors)
    assert len({row["loss"] for row in rows}) == 3


def test_an_epoch_is_every_clip(world, tmp_path):
    """Batches hold all clips: for the server, and for a client without given steps."""
    federation = Federation(begin(world, tmp_path / "exp", "centralized"))
    place = federation.learner(1)
    batches = place.source.batches(1, None, "train")
    assert batches.steps == [-(-97 // 8)]
    assert set(batches._plans[0].clips.flat) == set(range(97))
    facts = FedAvg(local_epochs=3).prepare(np.array([40, 9, 8, 1]), np.ones(4), 8)
    assert facts["steps"].tolist() == [15, 6, 3, 3]


def test_other_seeds_are_other_models_and_other_clients(world, tmp_path):
    """Equal seeds give equal models and clients."""
    drawn, models = [], []
    for number, seed in enumerate((3, 3, 4)):
        path = tmp_path / str(number)
        words = ("init", path, "--config", world / "config.yaml", "--method", "fedavg")
        data = ("--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}")
        inside(*words, *data, "--seed", seed, "--set", "clients_per_round=2").ok()
        inside("rounds", path, "--to", "3").ok()
        drawn.append([sampled(path, at) for at in (1, 2, 3)])
        models.append((path / "init.safetensors").read_bytes())
    assert drawn[0] == drawn[1] != drawn[2] and models[0] == models[1] != models[2]
