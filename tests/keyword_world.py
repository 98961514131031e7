"""A small federation of keyword spotting, shared by several test files."""

from __future__ import annotations

from pathlib import Path

import keywords
import numpy as np
from commands import inside

SIZES = [40, 21, 17, 9, 6, 3, 1]
CLIENTS = [f"{number}e{number}" for number in range(1, len(SIZES) + 1)]
CONFIG = keywords.CONFIG | {
    "rounds": 4,
    "evaluate_every": 2,
    "clients_per_round": 5,
    "model": {"network": "dscnn", "network_conf": {"channels": 6, "blocks": 1}},
    "training": {
        "optim": "sgd",
        # At 0.05, rounding at the kink of a ReLU grows to 1e-4 of an update, stacked or alone.
        "optim_conf": {"lr": 0.02, "momentum": 0.9},
        "batch_size": 8,
        "stack": 2,
    },
    "method_conf": {"local_steps": 4},
}


def make_world(root: Path, length: int = keywords.LENGTH) -> Path:
    """Make packed clips, with client-dependent shares of classes, and a configuration."""
    random = np.random.default_rng(0)
    for split, sizes in (("train", SIZES), ("test", [20, 20])):
        shares = random.dirichlet([1.0] * len(keywords.CLASSES), len(sizes))
        counts = map(random.multinomial, sizes, shares)
        keywords.pack(root / split, dict(zip(CLIENTS, counts, strict=False)), length=length)
    keywords.config_file(root / "config.yaml", **CONFIG)
    return root


def begin(world: Path, path: Path, method: str = "fedkws_ui", *settings: str) -> Path:
    """Begin an experiment in `path` on the clips of `world`."""
    more = [word for setting in settings for word in ("--set", setting)]
    inside(
        *("init", path, "--config", world / "config.yaml", "--method", method),
        *("--data", f"train={world / 'train'}", "--data", f"test={world / 'test'}", *more),
    ).ok()
    return path


OWN_NETWORK = """
from dataclasses import dataclass

from fedtools.models.keywords import NETWORKS
from fedtools.models.keywords.base import Network, Sizes
from fedtools.models.stacked import Linear


class MyNet(Network):
    def __init__(self, sizes, clients, bins, frames, classes):
        super().__init__()
        self.hidden = Linear(clients, bins, sizes.width)
        self.head = Linear(clients, sizes.width, classes)

    def features(self, mfcc, valid=None):
        return self.hidden(mfcc.mean(2)).relu()


@NETWORKS.register("mynet")
@dataclass(frozen=True)
class MySizes(Sizes):
    width: int = 7
    network = MyNet
    title = "My own"
"""
