"""Experiments of DecoupleFL and their models, shared by several test files."""

from __future__ import annotations

from pathlib import Path

import simulated
from asr_world import TRAIN, TRAINING, State, begin, model_of, some_data
from conftest import inside
from safetensors.numpy import load_file, save_file
from torch import Tensor

EXTRACTOR = ("encoder.embed.", "encoder.encoders.0.")
PERSONAL = '["encoder.embed.*", "encoder.encoders.0.*"]'
DECAY = 0.7
TEACHER = ("--set", "training.labels=continuous", "--set", f"training.decay={DECAY}")
CUT = ("--set", f"method_conf.personal={PERSONAL}")


def stages(first: int, second: int) -> tuple[str, ...]:
    return ("--set", f"method_conf.stage1={first}", "--set", f"method_conf.stage2={second}")


def learned_world(root: Path) -> Path:
    """Return data, and a model trained on them well enough to give labels."""
    some_data(root / "train", TRAIN, 0)
    some_data(root / "valid", {"au": 2, "en": 4, "in": 3}, 1)
    simulated.config_file(root / "plain.yaml", model=model_of(0.0), training=TRAINING)
    simulated.config_file(root / "random.yaml", model=model_of(0.1), training=TRAINING)
    inside("train-tokens", root / "train" / "text", root / "tokens", "--token-type", "char").ok()
    fast = ("training.optim_conf.lr=0.01", "training.scheduler_conf.warmup_steps=20")
    path = begin(root, root / "baseline", "centralized", *(x for o in fast for x in ("--set", o)))
    inside("rounds", path, "--to", "60").ok()
    state = load_file(path / "init.safetensors")
    save_file(state | load_file(path / "round_0061/global.safetensors"), root / "start.safetensors")
    (root / "text").write_bytes((root / "train" / "text").read_bytes())
    return root


def start(world: Path, path: Path, method: str, *more: str, config: str = "plain") -> Path:
    first = ("--start", str(world / "start.safetensors"))
    return begin(world, path, method, *first, *TEACHER, *more, config=config)


def collapsed(frames: Tensor) -> list[int]:
    """Return the greedy CTC labels of one utterance's posteriors (T, tokens), frame by frame."""
    labels, last = [], 0
    for token in frames.argmax(1).tolist():
        if token not in (0, last):
            labels.append(token)
        last = token
    return labels


def final(path: Path, client: str, number: int) -> State:
    """Return a client's whole model after a round."""
    state = load_file(path / "init.safetensors")
    state |= load_file(path / f"round_{number + 1:04d}" / "global.safetensors")
    kept = sorted(path.glob(f"clients/{client}/round_*/personal.safetensors"))
    return state | (load_file(kept[-1]) if kept else {})
