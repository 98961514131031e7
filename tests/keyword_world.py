"""A small federation of keyword spotting, for the tests of several files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
import yaml
from conftest import inside

WORDS = ["down", "go", "left", "up"]
SIZES = [40, 21, 17, 9, 6, 3, 1]
CLIENTS = [f"{number}e{number}" for number in range(1, len(SIZES) + 1)]
CONFIG = {
    "task": "kws",
    "rounds": 4,
    "evaluate_every": 2,
    "clients_per_round": 5,
    "keep_updates": False,
    "model": {"network": "dscnn", "network_conf": {"channels": 6, "blocks": 1}},
    "training": {
        "optim": "sgd",
        "optim_conf": {"lr": 0.05, "momentum": 0.9},
        "batch_size": 8,
        "stack": 2,
    },
    "method_conf": {"local_steps": 4},
}


def data_dir(path: Path, sizes: list[int], seed: int) -> Path:
    """Clips of a tone for each word, of another height for each client."""
    rng = np.random.default_rng(seed)
    rows = {"wav.scp": [], "text": [], "utt2spk": [], "utt2client": []}
    path.mkdir(parents=True)
    for number, (client, size) in enumerate(zip(CLIENTS, sizes, strict=False)):
        for clip in range(size):
            word = int(rng.integers(len(WORDS)))
            name = f"{client}-{WORDS[word]}-{clip:02d}"
            pitch = 300 * 2**word + 20 * number
            wave = 0.3 * np.sin(2 * np.pi * pitch * np.arange(16000) / 16000)
            wave += 0.02 * rng.standard_normal(16000)
            soundfile.write(path / f"{name}.wav", wave, 16000)
            rows["wav.scp"].append(f"{name} {path / name}.wav")
            rows["text"].append(f"{name} {WORDS[word]}")
            for table in ("utt2spk", "utt2client"):
                rows[table].append(f"{name} {client}")
    for table, lines in rows.items():
        (path / table).write_text("".join(f"{line}\n" for line in sorted(lines)))
    return path


def make_world(root: Path) -> Path:
    """Packed clips and a configuration."""
    (root / "classes.txt").write_text("".join(f"{word}\n" for word in WORDS))
    soundfile.write(root / "hiss.wav", 0.1 * np.random.default_rng(0).standard_normal(40000), 16000)
    (root / "noise.scp").write_text(f"hiss {root}/hiss.wav\n")
    for role, sizes in (("train", SIZES), ("test", [20, 20])):
        data = data_dir(root / "data" / role, sizes, seed=len(role))
        more = ("--classes", root / "classes.txt", "--noise", root / "noise.scp")
        inside("pack-clips", data, root / role, *more).ok()
    (root / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return root


def begin(world: Path, path: Path, method: str = "fedkws_ui", *settings: str) -> Path:
    more = [word for setting in settings for word in ("--set", setting)]
    inside(
        *("init", path, "--config", world / "config.yaml", "--method", method),
        *("--train", world / "train", "--test", world / "test", *more),
    ).ok()
    return path
