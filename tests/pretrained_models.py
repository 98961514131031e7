"""Tiny random pretrained models, as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers


def save_whisper(folder: Path, bins: int = 80, **changes: int) -> Path:
    """A Whisper of three encoder layers in a folder."""
    sizes = {
        "vocab_size": 60,
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 200,
        "max_target_positions": 40,
    }
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(num_mel_bins=bins, **{**sizes, **marks, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(config)
    model.save_pretrained(folder)
    return folder
