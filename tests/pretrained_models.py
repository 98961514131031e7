"""Tiny random pretrained models in transformers' format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers


def save_whisper(folder: Path, bins: int = 80, **changes: int) -> Path:
    """Save a Whisper of three encoder layers in a folder."""
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


def save_wave(
    folder: Path, kind: str = "Wav2Vec2", norm: str = "layer", head: str = "Model", **changes
) -> Path:
    """Save a three-layer wav2vec 2.0, HuBERT or WavLM and its preprocessor's config.

    `norm` "layer" normalises the convolutions as in the large variant, otherwise as in the base.
    """
    large = norm == "layer"
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "conv_dim": [16] * 3,
        "conv_kernel": [10, 3, 2],
        "conv_stride": [5, 2, 2],
        "num_feat_extract_layers": 3,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "num_buckets": 20,
        "max_bucket_distance": 30,
        "vocab_size": 20,
        "feat_extract_norm": norm,
        "do_stable_layer_norm": large,
        "conv_bias": large,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
        model = getattr(transformers, f"{kind}{head}")(config)
        for value in model.parameters():
            value.data.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(do_normalize=large).save_pretrained(folder)
    return folder


# Outputs of a Whisper of `save_tokens`: letters, a blank, and special tokens after them.
SPELLED = [*"abcdefghijklmnopqrstuvwxyz", "Ġ"]
MARKS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>"]
MARKS += ["<|notimestamps|>"]
IDS = {token: number for number, token in enumerate([*SPELLED, *MARKS])}


def save_recogniser(folder: Path, multilingual: bool = False, **changes: int) -> Path:
    """Save a Whisper that has tokens in a folder."""
    ids = {
        "pad_token_id": IDS["<|endoftext|>"],
        "bos_token_id": IDS["<|endoftext|>"],
        "eos_token_id": IDS["<|endoftext|>"],
        "decoder_start_token_id": IDS["<|startoftranscript|>"],
    }
    save_whisper(folder, **{"vocab_size": len(IDS), **ids, **changes})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    added = [
        {"id": IDS[mark], "content": mark, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for mark in MARKS
    ]
    vocabulary = {token: IDS[token] for token in SPELLED}
    tokens = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    settings = {
        **ids,
        "is_multilingual": multilingual,
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "lang_to_id": {mark: IDS[mark] for mark in ("<|en|>", "<|de|>")},
        "task_to_id": {"transcribe": IDS["<|transcribe|>"]},
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder
