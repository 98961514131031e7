"""Writing of Hugging Face folders of Whisper, as `transformers` does, but without that package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtools.core.atomic import atomic_path, new_folder, write_text
from fedtools.models.pretrained.whisper_import.network import EMBEDDING, Sizes, Whisper
from fedtools.models.pretrained.whisper_import.tokens import (
    END,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TASKS,
    Suppressed,
    Tokens,
)
from fedtools.models.torch_files import save_tensors


def write_folder(out: Path, whisper: Whisper, tokens: Tokens, suppressed: Suppressed) -> None:
    """Write the folder under a temporary name, and rename it when it is complete."""
    dtype = str(whisper.tensors[EMBEDDING].dtype).removeprefix("torch.")
    ids = _ids(tokens) | {
        "suppress_tokens": suppressed.always,
        "begin_suppress_tokens": suppressed.first,
    }
    contents = {
        "config.json": _config(whisper.sizes, dtype) | ids,
        "generation_config.json": _generation_config(whisper.sizes, tokens, suppressed) | ids,
        "preprocessor_config.json": _preprocessor_config(whisper.sizes),
        "tokenizer_config.json": _tokenizer_config(whisper.sizes, tokens),
    }
    with new_folder(out) as folder:
        for name, content in contents.items():
            write_text(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / "tokenizer.json", tokens.text)
        with atomic_path(folder / "model.safetensors") as temporary:
            # The output layer is not written: transformers ties it to the embedding.
            save_tensors(temporary, whisper.tensors)


def _ids(tokens: Tokens) -> dict[str, Any]:
    end = tokens.special[END]
    return {
        "decoder_start_token_id": tokens.special[START],
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
    }


def _config(sizes: Sizes, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": dtype,
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "apply_spec_augment": False,
    } | sizes.config()


def _generation_config(sizes: Sizes, tokens: Tokens, suppressed: Suppressed) -> dict[str, Any]:
    config: dict[str, Any] = {
        "is_multilingual": tokens.multilingual,
        "max_length": sizes.target_positions,
        "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": tokens.special[NO_TIMESTAMPS],
        "prev_sot_token_id": tokens.special[PREVIOUS],
        "return_timestamps": False,
    }
    if suppressed.heads is not None:
        config["alignment_heads"] = suppressed.heads
    if tokens.multilingual:
        config["lang_to_id"] = tokens.languages
        config["task_to_id"] = {task: tokens.special[f"<|{task}|>"] for task in TASKS}
    return config


def _preprocessor_config(sizes: Sizes) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": sizes.mels,
        "sampling_rate": 16_000,
        "n_fft": 400,
        "hop_length": 160,
        "chunk_length": 30,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _tokenizer_config(sizes: Sizes, tokens: Tokens) -> dict[str, Any]:
    return {
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "add_prefix_space": False,
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
        "additional_special_tokens": [name for name in tokens.special if name != END],
        "model_max_length": sizes.target_positions,
    }
