"""Experiments of DecoupleFL and their models, for the tests of several files."""

from __future__ import annotations

from pathlib import Path

from asr_world import (
    State,
)
from safetensors.numpy import load_file
from torch import Tensor

EXTRACTOR = ("encoder.embed.", "encoder.encoders.0.")
PERSONAL = '["encoder.embed.*", "encoder.encoders.0.*"]'
DECAY = 0.7
TEACHER = ("--set", "training.labels=continuous", "--set", f"training.decay={DECAY}")
CUT = ("--set", f"method_conf.personal={PERSONAL}")


def stages(first: int, second: int) -> tuple[str, ...]:
    return ("--set", f"method_conf.stage1={first}", "--set", f"method_conf.stage2={second}")


def collapsed(frames: Tensor) -> list[int]:
    """Greedy CTC labels of one utterance's posteriors (T, tokens), frame by frame."""
    labels, last = [], 0
    for token in frames.argmax(1).tolist():
        if token not in (0, last):
            labels.append(token)
        last = token
    return labels


def final(path: Path, client: str, number: int) -> State:
    """A client's whole model after a round."""
    state = load_file(path / "init.safetensors")
    state |= load_file(path / f"round_{number + 1:04d}" / "global.safetensors")
    kept = sorted(path.glob(f"clients/{client}/round_*/personal.safetensors"))
    return state | (load_file(kept[-1]) if kept else {})
