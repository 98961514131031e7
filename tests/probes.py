"""Utterances for footprints, shared by several test files."""

from __future__ import annotations

import copy

import torch

from fedtools.attack.victims import Probe
from fedtools.models.acoustic.asr import build_model

TOKENS = ["<blank>", "a", "b", "<sos/eos>"]
ENCODERS = {
    "tdnn": {"output_size": 8, "contexts": [1, 1, 3, 3]},
    "transformer": {"output_size": 8, "attention_heads": 2, "linear_units": 8, "num_blocks": 2},
    "conformer": {"output_size": 8, "attention_heads": 2, "linear_units": 8, "num_blocks": 2},
}


def asr_probe(encoder: str, held: int) -> Probe:
    torch.manual_seed(0)
    config = {"input_size": 20, "encoder": encoder, "encoder_conf": ENCODERS[encoder]}
    model = build_model(config, TOKENS).eval()
    speech = [torch.randn(1, length, 20) for length in (40, 31, 57)]
    return Probe(
        [copy.deepcopy(model) for _ in range(1 + held)],
        lambda one: one.state_dict(),
        lambda one, frames: one.encode(frames.clone(), torch.tensor([frames.shape[1]])),
        lambda: iter(speech),
    )
