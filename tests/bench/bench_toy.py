#!/usr/bin/env python3
"""A toy round that other simulators were measured on: seconds a round, ours and a bare loop's.

    python tests/bench/bench_toy.py [--turns 5] [--stack 4]

2,434 clients with sizes like those of Speech Commands, 200 of them a round, one local epoch in
batches of 16, a temporal convolution network of 65 k parameters on 98 x 40 random features (no
waveforms: the table of features is in memory, as for the others). Our round is a whole one, with
its files, in two processes; the bare loop keeps nothing but the sum of models. They take turns;
the first turn does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bench_clients import CLASSES, make_clips
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from fedtools.client.clips import ClipFeatures  # noqa: E402
from fedtools.federation.init import init  # noqa: E402
from fedtools.federation.rounds import _trainer  # noqa: E402
from fedtools.federation.steps import aggregate, sample  # noqa: E402
from fedtools.federation.tasks import open_federation  # noqa: E402
from fedtools.files.tables import format_table  # noqa: E402
from fedtools.models.keywords import NETWORKS, Network  # noqa: E402
from fedtools.models.keywords.layers import NORMS, Conv2d, Linear  # noqa: E402
from fedtools.models.keywords.networks import Sizes, pooled  # noqa: E402

CLIENTS, SAMPLED, BATCH, PROCESSES = 2434, 200, 16, 2
CHANNELS, DILATIONS = 64, (1, 2, 4, 8)
# Clips share so many different features: more would not fit the memory of a small machine.
TABLE = 4096

PEERS = """Measured elsewhere on two busy cores, seconds a round:
bare loop    4.3-5.9
pfl-research 5.5-6.9
Flower       21-24"""


class Tcn(Network):
    """Residual dilated convolutions over time, K clients at once."""

    def __init__(self, sizes: TcnSizes, clients: int, bins: int, frames: int, classes: int):
        super().__init__()
        self.first = Conv2d(clients, bins, CHANNELS, (1, 5), padding=(0, 2), bias=False)
        self.convolutions = nn.ModuleList(
            Conv2d(
                clients, CHANNELS, CHANNELS, (1, 3), padding=(0, wide), dilation=wide, bias=False
            )
            for wide in DILATIONS
        )
        norm = NORMS[sizes.norm]
        self.norms = nn.ModuleList(norm(clients, CHANNELS) for _ in range(1 + len(DILATIONS)))
        self.head = Linear(clients, CHANNELS, classes)

    def features(self, mfcc: Tensor, valid: Tensor | None = None) -> Tensor:
        images = self.first(mfcc.permute(1, 0, 3, 2).flatten(1, 2)[:, :, None])
        images = F.relu(self.norms[0](images, valid))
        for layer, norm in zip(self.convolutions, self.norms[1:], strict=True):
            images = images + F.relu(norm(layer(images), valid))
        return pooled(images, mfcc.shape[0])


@dataclass(frozen=True)
class TcnSizes(Sizes):
    """It has no options of its own."""

    network = Tcn


class BareTcn(nn.Module):
    """The same network of torch's layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(40, CHANNELS, 5, padding=2, bias=False)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(CHANNELS, CHANNELS, 3, padding=wide, dilation=wide, bias=False)
            for wide in DILATIONS
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(CHANNELS) for _ in range(1 + len(DILATIONS)))
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        images = F.relu(self.norms[0](self.first(features.transpose(1, 2))))
        for layer, norm in zip(self.convolutions, self.norms[1:], strict=True):
            images = images + F.relu(norm(layer(images)))
        return self.head(images.mean(2))


def table() -> Tensor:
    """Random features (TABLE, 98, 40); clip number n has those of row n modulo TABLE."""
    return torch.randn(TABLE, 98, 40, generator=torch.Generator().manual_seed(0))


class Looked:
    """Stands in for waveforms, augmentation and MFCC."""

    found: Tensor | None = None

    @classmethod
    def up(cls, features: ClipFeatures, index: np.ndarray, *unused: np.ndarray) -> Tensor:
        """The features of clips (K, B)."""
        if cls.found is None:
            cls.found = table()
        return cls.found[torch.from_numpy(index % TABLE)]


# At import, so that it is so in the workers too.
NETWORKS["tcn"] = TcnSizes
ClipFeatures._features = lambda self, *arguments: Looked.up(self, *arguments)


def draw_sizes() -> np.ndarray:
    """Clips of each client: average 43, largest 316, as in Speech Commands."""
    drawn = np.random.default_rng(0).lognormal(3.22, 1.13, CLIENTS)
    return drawn.clip(1, 316).astype(int)


def begin(path: Path, clips: Path, stack: int) -> Path:
    """Make the experiment."""
    config = {
        "task": "kws",
        "clients_per_round": SAMPLED,
        "keep_updates": False,
        "model": {"network": "tcn"},
        "training": {
            "optim": "sgd",
            "optim_conf": {"lr": 0.05},
            "batch_size": BATCH,
            "stack": stack,
            "augment": {"time_shift_ms": 0, "noise_volume": 0.0},
        },
    }
    init(
        path, method="fedavg", config=config, where="toy", train=str(clips), valid=None,
        test=None, tokens=None, start=None, seed=0,
    )  # fmt: skip
    return path


class Bare:
    """The bare loop, alone in its process."""

    federation = None

    @classmethod
    def round(cls, clients: list[int], threads: int) -> float:
        """A round of these clients; returns its seconds."""
        torch.set_num_threads(threads)
        if cls.federation is None:
            torch.manual_seed(0)
            labels = torch.randint(CLASSES, (TABLE,))
            cls.federation = BareTcn(), table(), labels, draw_sizes()
        network, features, labels, sizes = cls.federation
        ends = np.cumsum(sizes)
        begun = time.perf_counter()
        start = {name: value.clone() for name, value in network.state_dict().items()}
        sums = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in clients:
            network.load_state_dict(start)
            network.train()
            optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
            clips = torch.arange(ends[client] - sizes[client], ends[client]) % TABLE
            for index in clips[torch.randperm(len(clips))].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(network(features[index]), labels[index]).backward()
                optimizer.step()
            for name, value in network.state_dict().items():
                sums[name] += value
        network.load_state_dict({name: value / len(clients) for name, value in sums.items()})
        return time.perf_counter() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--stack", type=int, default=4)
    parser.add_argument("--bare-threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    seconds: dict[str, list[float]] = {"bare loop": [], "fedtools, 2 processes": []}
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1, spawn) as bare:
        federation = open_federation(
            begin(Path(name) / "exp", make_clips(Path(name) / "clips", draw_sizes()), options.stack)
        )
        with _trainer(federation, PROCESSES, "cpu") as train:
            for number in range(1, options.turns + 2):
                begun = time.perf_counter()
                clients = sample(federation, number, PROCESSES)
                train(number, PROCESSES)
                aggregate(federation, number)
                ours = time.perf_counter() - begun
                numbers = [int(client[1:]) for client in clients]
                theirs = bare.submit(Bare.round, numbers, options.bare_threads).result()
                if number > 1:
                    seconds["bare loop"].append(theirs)
                    seconds["fedtools, 2 processes"].append(ours)
    sizes = draw_sizes()
    parameters = sum(value.numel() for value in BareTcn().parameters())
    print(
        f"{CLIENTS} clients of {sizes.mean():.0f} clips on average, {sizes.max()} at most; "
        f"{SAMPLED} a round, {parameters} parameters, stacks of {options.stack}"
    )
    rows = [
        (what, *(f"{value:.2f}" for value in (min(t), statistics.median(t), max(t))))
        for what, t in seconds.items()
    ]
    print(format_table(("seconds a round", "min", "median", "max"), rows), end="")
    pairs = [b / f for b, f in zip(*seconds.values(), strict=True)]
    print(
        f"speed of fedtools / bare loop, turn by turn: median {statistics.median(pairs):.2f} "
        f"({min(pairs):.2f} to {max(pairs):.2f})"
    )
    print(PEERS)


if __name__ == "__main__":
    main()
