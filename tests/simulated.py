"""Data with known truth: "speech" in which every letter is a fixed pattern, in two accents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from fedtools.data.ark import write_ark
from fedtools.data.datadir import DataDir, write_table

LETTERS = "abcd"
BINS = 20

CONFIG = {
    "model": {
        "input_size": BINS,
        "init": "xavier_uniform",
        "encoder": "transformer",
        "encoder_conf": {
            "output_size": 16,
            "attention_heads": 2,
            "linear_units": 32,
            "num_blocks": 2,
            "dropout_rate": 0.1,
        },
        "specaug": "specaug",
        "specaug_conf": {"apply_time_warp": False, "time_mask_width_range": [0, 4]},
        "normalize": "utterance_mvn",
    },
    "training": {
        "optim": "adam",
        "optim_conf": {"lr": 0.003},
        "batch_bins": 8000,
        "num_threads": 1,
        # Never: checkpoints take a tenth of the time, and few tests interrupt a training.
        "save_interval_steps": 1000,
    },
}


def data_dir(
    path: Path, clients: list[str], utterances: int, seed: int = 0, log_mel: bool = False
) -> Path:
    """Write a data directory of `utterances` for each client, two speakers each.

    With `log_mel`, features are of whole seconds and within a range of 2, as Whisper's are.

    Every letter is 12 frames of its own pattern plus noise; the clients' patterns are shifted by
    one bin from client to client, which is what makes their data non-IID.
    """
    random = np.random.default_rng(seed)
    patterns = np.random.default_rng(99).normal(0, 3, (len(LETTERS), BINS))
    data = DataDir(path)
    matrices = []
    for shift, client in enumerate(clients):
        for number in range(utterances):
            speaker = f"{client}-s{number % 2}"
            name = f"{speaker}-{number:03d}"
            words = [
                "".join(random.choice(list(LETTERS), random.integers(1, 3)))
                for _ in range(random.integers(1, 4))
            ]
            frames = [
                np.repeat(np.roll(patterns[LETTERS.index(letter)], shift)[None], 12, axis=0)
                for letter in "".join(words)
            ]
            clean = np.concatenate([np.zeros((6, BINS)), *frames, np.zeros((6, BINS))])
            matrix = (clean + random.normal(0, 0.5, clean.shape)).astype("f4")
            if log_mel:
                matrix = np.pad(np.tanh(matrix / 4), ((0, -len(matrix) % 100), (0, 0)))
            matrices.append((name, matrix))
            data.text[name] = " ".join(words)
            data.utt2spk[name] = speaker
            data.utt2client[name] = client
    path.mkdir(parents=True)
    data.feats_scp = write_ark(path / "feats.ark", sorted(matrices))
    data.write()
    write_table(path / "utt2num_frames", {name: str(len(matrix)) for name, matrix in matrices})
    return path


def config_file(path: Path, **changes: dict) -> Path:
    """Write `CONFIG` with some sections changed."""
    config = {**CONFIG, **changes}
    path.write_text(yaml.safe_dump(config))
    return path


def one_speaker_each(path: Path) -> Path:
    """Write `simulated.data_dir`, whose clients are models of the speakers."""
    data = DataDir.read(path)
    data.utt2spk = {utt: client[:3] for utt, client in data.utt2client.items()}
    data.write()
    return path
