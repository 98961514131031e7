"""Experiments whose updates have a known truth, shared by tests of the attacks on updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import simulated
from conftest import inside
from safetensors.numpy import load_file, save_file

from fedtools.core.tables import read_tsv
from fedtools.data.ark import FeatureReader, write_ark
from fedtools.data.datadir import DataDir

CONSTANT = 6
INPUTS = simulated.BINS + CONSTANT
ENCODER = {"output_size": 12, "contexts": [1, 1, 3, 3], "fixed_scale": True}
MODEL = {"input_size": INPUTS, "encoder": "tdnn", "encoder_conf": ENCODER}
SGD = {"optim": "sgd", "optim_conf": {"lr": 0.05}, "batch_bins": 8000, "num_threads": 1}
State = dict[str, np.ndarray]


def speakers(count: int, first: str = "s") -> list[str]:
    return [f"{first}{number:02d}" for number in range(count)]


def data_with_constants(
    path: Path, clients: list[str], utterances: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Write data whose frames end with constants per speaker, like i-vectors.

    A client's name begins with its speaker's three letters.
    """
    random = np.random.default_rng(seed)
    simulated.one_speaker_each(simulated.data_dir(path, clients, utterances, seed=seed))
    data = DataDir.read(path)
    own = {
        name: random.normal(0, 1, CONSTANT).astype("f4")
        for name in sorted({c[:3] for c in clients})
    }
    reader, matrices = FeatureReader(data.feats_scp), []
    for name in sorted(data.utterances):
        frames = reader.read(name)
        rows = np.tile(own[data.utt2spk[name]], (len(frames), 1))
        matrices.append((name, np.concatenate([frames, rows], 1)))
    data.feats_scp = write_ark(path / "feats.ark", matrices)
    data.write()
    return own


def begin(
    root: Path, name: str, *more: str, model: dict = MODEL, training: dict = SGD, rounds: int = 1
) -> Path:
    """Run all rounds of an experiment on ROOT/<name>_train, or ROOT/train."""
    path, data = root / name, root / f"{name}_train"
    data = data if data.exists() else root / "train"
    simulated.config_file(root / f"{name}.yaml", model=model, training=training)
    if not (root / "tokens").exists():
        tokens = ("--token-type", "char")
        inside("train-tokens", data / "text", root / "tokens", *tokens).ok()
    inside(
        *("init", path, "--config", root / f"{name}.yaml", "--method", "fedavg"),
        *("--data", f"train={data}", "--asset", f"tokens={root / 'tokens'}"),
        *("--set", f"rounds={rounds}", *more),
    ).ok()
    inside("rounds", path).ok()
    return path


def sent(path: Path, number: int = 1) -> dict[str, State]:
    """Return each client's change: by name, the tensors less the initial ones."""
    folder, found = path / f"round_{number:04d}", {}
    start = load_file(folder / "global.safetensors")
    for table in sorted(folder.glob("update.*.tsv")):
        stacked = load_file(table.with_suffix(".safetensors"))
        for row, line in enumerate(read_tsv(table, None)):
            found[line["client"]] = {
                name: value[row].astype("f8") - start[name] for name, value in stacked.items()
            }
    return found


def plant(path: Path, change: Callable[[str, State], State], number: int = 1) -> None:
    """Replace the updates of a round by the global model plus a given change.

    Args:
        change: a function of a client's name and its initial tensors.
    """
    folder = path / f"round_{number:04d}"
    start = load_file(folder / "global.safetensors")
    for table in sorted(folder.glob("update.*.tsv")):
        update = table.with_suffix(".safetensors")
        stacked = load_file(update)
        for row, line in enumerate(read_tsv(table, None)):
            moved = change(line["client"], start)
            for name in stacked:
                stacked[name][row] = start[name] + moved[name]
        save_file(stacked, update)


def constants(path: Path) -> dict[str, np.ndarray]:
    """Return the constants that `data_with_constants` appended for each speaker."""
    data = DataDir.read(path)
    reader = FeatureReader(data.feats_scp)
    return {data.utt2spk[name]: reader.read(name)[0, -CONSTANT:] for name in data.utterances}
