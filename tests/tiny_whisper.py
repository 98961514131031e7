"""A small Whisper by transformers: weights that follow from names, and its other file formats.

As a program, `tests/tiny_whisper.py`, it makes `whisper.float16.bin` and `whisper.int8.bin` next to
itself, by CTranslate2's own converter; made with ctranslate2 4.8.5 and transformers 5.24.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

HERE = Path(__file__).resolve().parent
LANGUAGES = ["en", "de", "yue"]
SPECIAL = [
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{name}|>" for name in LANGUAGES),
    "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nocaptions|>",
    "<|notimestamps|>",
]  # fmt: skip
LETTERS = "abcdefgh"
# After the special tokens, one for every 20 ms of 30 s.
SMALL = len(LETTERS) + len(SPECIAL) + 1501
SUPPRESSED = {"suppress_ids": [2, 3], "suppress_ids_begin": [1, len(LETTERS)]}
HEADS = [[0, 1], [1, 3]]
# CTranslate2's numbers of types.
KINDS = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.float16: 4, torch.bfloat16: 5}
FLAGS = {"activation": 3, "alibi": 0, "pre_norm": 1, "scale_embeddings": 0}


def config(vocabulary: int = SMALL, width: int = 8) -> WhisperConfig:
    """Return a configuration whose sizes differ where possible."""
    end = vocabulary - 1501 - len(SPECIAL)
    return WhisperConfig(
        vocab_size=vocabulary, num_mel_bins=5, d_model=width, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=4, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, max_source_positions=11, max_target_positions=6,
        decoder_start_token_id=end + 1, pad_token_id=end, bos_token_id=end, eos_token_id=end,
        suppress_tokens=[2, 3], begin_suppress_tokens=[1, end],
    )  # fmt: skip


def model(vocabulary: int = SMALL) -> WhisperForConditionalGeneration:
    """Return a model whose weights are multiples of 1/64, exact in bfloat16, by name."""
    whisper = WhisperForConditionalGeneration(config(vocabulary)).eval()
    with torch.no_grad():
        for place, (name, value) in enumerate(sorted(whisper.named_parameters())):
            numbers = (torch.arange(value.numel()) * 37 + place * 11) % 127 - 63
            # Equal ones become aliases.
            numbers *= not name.endswith("layer_norm.bias")
            value.copy_(numbers.reshape(value.shape) / 64)
    return whisper


def state(whisper: WhisperForConditionalGeneration) -> dict[str, torch.Tensor]:
    """Return its tensors by Hugging Face's names, the tied one once."""
    tensors = {name: value.clone() for name, value in whisper.state_dict().items()}
    del tensors["proj_out.weight"]
    return tensors


def tokenizer(folder: Path, vocabulary: int = SMALL) -> None:
    """Write a tokenizer of letters, and of tokens without a meaning up to the special ones."""
    first = vocabulary - 1501 - len(SPECIAL)
    vocab = {(LETTERS[one] if one < len(LETTERS) else f"x{one}"): one for one in range(first)}
    added = [
        {"id": first + place, "content": name, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True}
        for place, name in enumerate(SPECIAL)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def variables(tensors: dict[str, torch.Tensor], heads: tuple[int, int] = (2, 4)) -> dict:
    """Return a state's tensors by CTranslate2's names: q, k, v in one, keys with a zero bias."""
    theirs: dict[str, torch.Tensor] = {}
    for half, number in zip(("encoder", "decoder"), heads, strict=True):
        theirs[f"{half}/num_heads"] = torch.tensor(number, dtype=torch.int16)
        parts = {
            name.removeprefix(f"model.{half}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.{half}.")
        }
        for name, value in parts.items():
            *place, kind = name.replace("layers.", "layer_").split(".")
            if place[-1] in ("k_proj", "v_proj"):
                continue
            norm = {"weight": "gamma", "bias": "beta"}[kind]
            renamed = {
                "embed_tokens": f"embeddings/{kind}",
                "embed_positions": "position_encodings/encodings",
                "layer_norm": f"layer_norm/{norm}",
                "self_attn_layer_norm": f"self_attention/layer_norm/{norm}",
                "encoder_attn_layer_norm": f"attention/layer_norm/{norm}",
                "final_layer_norm": f"ffn/layer_norm/{norm}",
                "fc1": f"ffn/linear_0/{kind}",
                "fc2": f"ffn/linear_1/{kind}",
                "conv1": f"conv1/{kind}",
                "conv2": f"conv2/{kind}",
            }
            if place[-1] == "q_proj":
                stem = name.removesuffix(f"q_proj.{kind}")
                keys = parts.get(f"{stem}k_proj.{kind}", torch.zeros_like(value))
                queries, both = [value], [keys, parts[f"{stem}v_proj.{kind}"]]
                if place[-2] == "self_attn":
                    end, value = "self_attention/linear_0", torch.cat(queries + both)
                else:
                    theirs[f"{half}/{place[0]}/attention/linear_1/{kind}"] = torch.cat(both)
                    end = "attention/linear_0"
                end = f"{end}/{kind}"
            elif place[-1] == "out_proj":
                own = place[-2] == "self_attn"
                end = f"{'self_attention/linear_1' if own else 'attention/linear_2'}/{kind}"
            else:
                end = renamed[place[-1]]
            layer = f"{place[0]}/" if place[0].startswith("layer_") and len(place) > 1 else ""
            theirs[f"{half}/{layer}{end}"] = value
    flags = {f"decoder/{name}": torch.tensor(one, dtype=torch.int8) for name, one in FLAGS.items()}
    return dict(sorted((theirs | flags).items()))


def text(content: str) -> bytes:
    """Return a name in a model.bin."""
    return struct.pack("<H", len(content) + 1) + content.encode() + b"\0"


def variable(name: str, value: torch.Tensor) -> bytes:
    """Return a variable in a model.bin."""
    raw = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    shape = struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)
    return text(name) + shape + struct.pack("<BI", KINDS[value.dtype], len(raw)) + raw


def model_bin(
    theirs: dict[str, torch.Tensor],
    aliases: dict[str, str] | None = None,
    version: int = 6,
    kind: str = "WhisperSpec",
    revision: int = 3,
) -> bytes:
    """Return a whole model.bin, written according to its format."""
    if aliases is None:
        aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    return b"".join(
        [
            struct.pack("<I", version), text(kind), struct.pack("<II", revision, len(theirs)),
            *(variable(name, value) for name, value in theirs.items()),
            struct.pack("<I", len(aliases)),
            *(text(name) + text(of) for name, of in aliases.items()),
        ]
    )  # fmt: skip


def ct2_folder(folder: Path, content: bytes, vocabulary: int = SMALL) -> Path:
    """Make a CTranslate2 folder of a model.bin."""
    tokenizer(folder, vocabulary)
    (folder / "model.bin").write_bytes(content)
    (folder / "config.json").write_text(json.dumps(SUPPRESSED | {"alignment_heads": HEADS}))
    return folder


def checkpoint(whisper: WhisperForConditionalGeneration) -> dict:
    """Return the content of OpenAI's checkpoint of a model."""
    sizes = whisper.config
    dims = {
        "n_mels": sizes.num_mel_bins, "n_vocab": sizes.vocab_size,
        "n_audio_ctx": sizes.max_source_positions, "n_audio_state": sizes.d_model,
        "n_audio_head": sizes.encoder_attention_heads, "n_audio_layer": sizes.encoder_layers,
        "n_text_ctx": sizes.max_target_positions, "n_text_state": sizes.d_model,
        "n_text_head": sizes.decoder_attention_heads, "n_text_layer": sizes.decoder_layers,
    }  # fmt: skip
    return {"dims": dims, "model_state_dict": {_openai(k): v for k, v in state(whisper).items()}}


def _openai(name: str) -> str:
    name = name.removeprefix("model.")
    if ".layers." not in name:
        return {
            "encoder.layer_norm": "encoder.ln_post",
            "decoder.layer_norm": "decoder.ln",
            "encoder.embed_positions": "encoder.positional_embedding",
            "decoder.embed_positions": "decoder.positional_embedding",
            "decoder.embed_tokens": "decoder.token_embedding",
        }.get(stem := name.rpartition(".")[0], stem) + (
            "" if "positions" in name else f".{name.rpartition('.')[2]}"
        )
    half, _, number, *rest = name.split(".")
    parts = {
        "self_attn": "attn", "encoder_attn": "cross_attn", "self_attn_layer_norm": "attn_ln",
        "encoder_attn_layer_norm": "cross_attn_ln", "final_layer_norm": "mlp_ln", "fc1": "mlp.0",
        "fc2": "mlp.2", "q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out",
    }  # fmt: skip
    return ".".join([half, "blocks", number, *(parts.get(part, part) for part in rest)])


def step(value: torch.Tensor) -> np.ndarray:
    """Return the largest error of CTranslate2's 8 bits, by rows of a weight."""
    return value.flatten(1).abs().amax(1).numpy() / 127 / 2


def _make() -> None:
    import tempfile

    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model().save_pretrained(folder)
        tokenizer(folder)
        settings = {"tokenizer_class": "WhisperTokenizer", "eos_token": SPECIAL[0]}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        for kind in ("float16", "int8"):
            TransformersConverter(str(folder)).convert(f"{name}/{kind}", quantization=kind)
            content = (folder / kind / "model.bin").read_bytes()
            (HERE / f"whisper.{kind}.bin").write_bytes(content)


if __name__ == "__main__":
    _make()
