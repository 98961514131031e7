"""Federations of keyword spotting with user-level privacy, shared by several test files."""

from __future__ import annotations

from pathlib import Path

import keywords
import numpy as np
from commands import inside
from safetensors.numpy import load_file

from fedtools.data.clips import Clip, Clips, write_clips

SIZES = [40, 21, 17, 9, 6, 3, 1]
CLIENTS = [f"{number}e{number}" for number in range(1, len(SIZES) + 1)]
TRANSFORMER = {
    "network": "transformer",
    "network_conf": {"layers": 1, "width": 8, "heads": 2, "feedforward": 16},
}
CONFIG = keywords.CONFIG | {
    "rounds": 3,
    "keep_updates": True,
    "model": TRANSFORMER,
    "training": {
        "optim": "sgd",
        "optim_conf": {"lr": 0.02},
        "batch_size": 8,
        "stack": 3,
    },
    "method_conf": {"local_steps": 2, "epsilon": 8.0, "clip": 0.05},
}
STEPS = 1 << 20


def make_world(root: Path, length: int = keywords.LENGTH) -> Path:
    """Make packed clips, with client-dependent shares of classes, a list and a configuration."""
    random = np.random.default_rng(0)
    for split, sizes in (("train", SIZES), ("test", [20, 20])):
        shares = random.dirichlet([1.0] * len(keywords.CLASSES), len(sizes))
        counts = map(random.multinomial, sizes, shares)
        names = CLIENTS if split == "train" else ["8e8", "9e9"]
        keywords.pack(root / split, dict(zip(names, counts, strict=False)), length=length)
    (root / "clients").write_text("".join(f"{name}\n" for name in CLIENTS))
    keywords.config_file(root / "config.yaml", **CONFIG)
    return root


def without(train: Path, out: Path, client: str) -> Path:
    """Write packed clips again without those of a client."""
    clips = Clips.read(train)
    owners = np.repeat(clips.clients, clips.sizes).tolist()
    kept = (
        Clip(name, owner, clips.classes[clips.labels[at]], np.array(clips.waves[at]))
        for at, (name, owner) in enumerate(zip(clips.utterances, owners, strict=True))
        if owner != client
    )
    write_clips(out, kept, clips.classes, [np.array(clips.noise)], clips.samples)
    return out


def init(
    world: Path,
    path: Path,
    *settings: str,
    train: Path | None = None,
    seed: int = 0,
    listed: bool = True,
):
    """Return the result of `fedtools init` of an experiment with privacy."""
    clients = ("--clients", world / "clients") if listed else ()
    more = [word for setting in settings for word in ("--set", setting)]
    return inside(
        *("init", path, "--config", world / "config.yaml", "--method", "dpfedavg"),
        *("--data", f"train={train or world / 'train'}", "--data", f"test={world / 'test'}"),
        *(*clients, "--seed", str(seed), *more),
    )


def begin(world: Path, path: Path, *settings: str, **more) -> Path:
    """Begin an experiment with privacy, and return its path; `more` as in `init`."""
    init(world, path, *settings, **more).ok()
    return path


def rows_of(experiment: Path, number: int = 1) -> dict[str, dict[str, np.ndarray]]:
    """Return client -> its tensors in the messages of a round, of clients that sent any."""
    found = {}
    for table in sorted(experiment.glob(f"round_{number:04d}/update.*.tsv")):
        header, *lines = (line.split("\t") for line in table.read_text().splitlines())
        tensors = load_file(table.with_suffix(".safetensors"))
        for at, line in enumerate(lines):
            row = dict(zip(header, line, strict=True))
            if row["status"] == "ok":
                found[row["client"]] = {name: one[at] for name, one in tensors.items()}
    return found


def vector(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return a client's tensors as one vector of whole numbers, in the order of their names."""
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)]).astype(np.int64)


def released(experiment: Path, number: int = 1) -> np.ndarray:
    """Return the change of the global state in a round, float64, in the order of names."""
    old, new = (
        load_file(experiment / f"round_{at:04d}" / "global.safetensors")
        for at in (number, number + 1)
    )
    return np.concatenate([(new[n].astype("f8") - old[n]).ravel() for n in sorted(old)])
