"""Small speech experiments and their data, shared by several test files."""

from __future__ import annotations

from pathlib import Path

import kaldiio
import numpy as np
import simulated
import torch
from conftest import inside
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from fedtools.data.datadir import DataDir

TRAIN, VALID = {"au": 9, "en": 6, "in": 3}, {"au": 2, "en": 4, "in": 3}
# An epsilon far above rounding errors, whose sign Adam would otherwise turn into whole steps.
RATE, EPSILON, WARMUP, CLIP = 0.003, 1e-3, 4, 1.0
# All utterances in one batch, so that a step does not depend on their order.
TRAINING = {
    "optim": "adam",
    "optim_conf": {"lr": RATE, "eps": EPSILON},
    "scheduler": "warmuplr",
    "scheduler_conf": {"warmup_steps": WARMUP},
    "grad_clip": CLIP,
    "batch_bins": 10_000_000,
}
State = dict[str, np.ndarray]


def model_of(dropout: float) -> dict:
    """Return the model's options, with or without dropout and SpecAugment."""
    model = dict(simulated.CONFIG["model"])
    if not dropout:
        del model["specaug"], model["specaug_conf"]
    rates = {"dropout_rate": dropout, "positional_dropout_rate": dropout}
    return model | {"encoder_conf": model["encoder_conf"] | rates}


def some_data(path: Path, counts: dict[str, int], seed: int) -> Path:
    """Make data in which each client has a different number of utterances."""
    data = DataDir.read(simulated.data_dir(path, list(counts), max(counts.values()), seed))
    keep = [name for one in counts for name in data.client_utterances(one)[: counts[one]]]
    data.restrict(keep).write()
    return path


def make_world(root: Path) -> Path:
    """Make data of three clients, tokens and two configurations."""
    some_data(root / "train", TRAIN, 0)
    some_data(root / "valid", VALID, 1)
    simulated.config_file(root / "plain.yaml", model=model_of(0.0), training=TRAINING)
    simulated.config_file(root / "random.yaml", model=model_of(0.5), training=TRAINING)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    return root


def begin(world: Path, path: Path, method: str, *more: str, config: str = "plain") -> Path:
    inside(
        *("init", path, "--config", world / f"{config}.yaml", "--method", method),
        *("--data", f"train={world / 'train'}", "--data", f"valid={world / 'valid'}"),
        *("--asset", f"tokens={world / 'tokens'}", *more),
    ).ok()
    return path


def tokens_of(world: Path) -> list[str]:
    return (world / "tokens" / "tokens.txt").read_text().split()


def table(path: Path) -> dict[str, str]:
    rows = (line.partition(" ") for line in path.read_text().splitlines())
    return {name: rest for name, _, rest in rows}


def batch_of(world: Path, split: str, *clients: str) -> dict[str, Tensor]:
    """Return all utterances of some clients as a batch of ESPnet's models."""
    folder, tokens = world / split, tokens_of(world)
    owners, places, texts = (table(folder / name) for name in ("utt2client", "feats.scp", "text"))
    names = [name for name, owner in owners.items() if owner in clients]
    speech = [torch.tensor(kaldiio.load_mat(places[name])) for name in names]
    spelled = [
        torch.tensor([tokens.index("<space>" if c == " " else c) for c in texts[name]])
        for name in names
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "speech": pad(speech, True),
        "speech_lengths": torch.tensor([len(one) for one in speech]),
        "text": pad(spelled, True, -1),
        "text_lengths": torch.tensor([len(one) for one in spelled]),
    }


def load(model: nn.Module, state: State) -> nn.Module:
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    return model


def assert_near(found: State, expected: State, start: State) -> None:
    """Check that two models agree within a thousandth of the distance from their common start."""
    apart, moved = (
        sum(np.square(one[name].astype("f8") - expected[name]).sum() for name in expected) ** 0.5
        for one in (start | found, start)
    )
    assert moved > 0 and apart < 1e-3 * moved, (apart, moved)


def say(path: Path, letter: str, tokens: list[str]) -> None:
    """Make a model recognise one letter in every frame."""
    state = load_file(path)
    state["ctc.ctc_lo.weight"][:] = state["ctc.ctc_lo.bias"][:] = 0
    state["ctc.ctc_lo.bias"][tokens.index(letter)] = 9
    save_file(state, path)


def mean_of(states: list[State]) -> State:
    return {name: np.mean([one[name].astype("f8") for one in states], 0) for name in states[0]}
