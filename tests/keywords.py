"""Packed clips with known truth: every label is a tone, at a pitch that depends on the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

from fedtools.data.clips import Clip, write_clips

# Samples of a clip: a third of a second is enough for tones, and trains in a third of the time.
LENGTH = 5600
CLASSES = ("_silence_", "_unknown_", "yes", "no")

CONFIG = {
    "task": "kws",
    "rounds": 3,
    "evaluate_every": 1,
    "keep_updates": False,
    "model": {"network": "dscnn", "network_conf": {"channels": 4, "blocks": 1}},
    "training": {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_size": 8},
    "method_conf": {"local_steps": 2},
}


def pack(
    folder: Path,
    clients: Mapping[str, Sequence[int]],
    classes: Sequence[str] = CLASSES,
    length: int = LENGTH,
) -> Path:
    """Write packed clips of `length` samples: client -> its number of clips per class."""
    random = np.random.default_rng(0)
    clips, time = [], np.arange(length) / 16000
    for pitch, client in enumerate(sorted(clients)):
        number = 0
        for label, count in zip(classes, clients[client], strict=True):
            frequency = 300 * 2 ** classes.index(label) * (1 + 0.02 * pitch)
            for _ in range(count):
                tone = 3000 * np.sin(2 * np.pi * (frequency * time + random.random()))
                wave = (tone + random.normal(0, 300, length)).astype("<i2")
                clips.append(Clip(f"{client}-{number:04d}", client, label, wave))
                number += 1
    noise = [random.normal(0, 500, 32000).astype("<i2")]
    write_clips(folder, clips, classes, noise, length)
    return folder


def config_file(path: Path, **changes: object) -> Path:
    """Write `CONFIG` with some sections changed."""
    path.write_text(yaml.safe_dump({**CONFIG, **changes}))
    return path
