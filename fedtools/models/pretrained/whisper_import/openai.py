"""Reading of OpenAI's Whisper checkpoints, .pt files of sizes and tensors, without running code."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from fedtools.core.errors import UserError
from fedtools.models.pretrained.whisper_import.network import Sizes, Whisper, check
from fedtools.models.torch_files import load_tensors

# Patterns in OpenAI's names and replacements for Hugging Face's, applied in this order.
_NAMES = (
    (r"blocks\.", "layers."),
    (r"cross_attn_ln\.", "encoder_attn_layer_norm."),
    (r"attn_ln\.", "self_attn_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"^encoder\.ln_post\.", "encoder.layer_norm."),
    (r"^decoder\.ln\.", "decoder.layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)
_SIZES = (
    "n_mels n_audio_ctx n_audio_state n_audio_head n_audio_layer n_vocab n_text_ctx n_text_state "
    "n_text_head n_text_layer"
).split()
_KINDS = (torch.float16, torch.bfloat16, torch.float32)


def read_openai(path: Path) -> Whisper:
    """Read a .pt file of `dims` and `model_state_dict`.

    Raises:
        UserError: naming the file, if it holds anything but numbers and tensors, or these are not
            a Whisper model.
    """
    content = load_tensors(path)
    sizes, state = (
        content.get(key) if isinstance(content, dict) else None
        for key in ("dims", "model_state_dict")
    )
    if not (isinstance(sizes, dict) and isinstance(state, dict)):
        problem = "no dims and model_state_dict"
        raise UserError(problem, path=path, remedy="only checkpoints of Whisper can be converted")
    for name in _SIZES:
        if type(sizes.get(name)) is not int:
            raise UserError(f"dims: {name} is not a whole number", path=path)
    if sizes["n_audio_state"] != sizes["n_text_state"]:
        problem = "dims: n_audio_state is not n_text_state, as it is in Whisper"
        raise UserError(problem, path=path, remedy="such a model cannot be converted")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        sound = torch.is_tensor(value) and value.dtype in _KINDS and value.layout == torch.strided
        if not isinstance(name, str) or not sound:
            problem = f"{name!r} is not a tensor of float16, bfloat16 or float32"
            raise UserError(problem, path=path)
        if (ours := _renamed(name)) in tensors:
            raise UserError(f"tensor {ours!r} is duplicated", path=path)
        tensors[ours] = value
    # A view of a single number can have any size.
    if sum(value.nbytes for value in tensors.values()) > path.stat().st_size:
        raise UserError("its tensors have more bytes than the file", path=path)
    found = _sizes(sizes)
    check(found, tensors, path)
    # Copied, because safetensors refuses tensors that share memory.
    return Whisper(found, {name: value.contiguous().clone() for name, value in tensors.items()})


def _renamed(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return f"model.{name}"


def _sizes(dims: dict[str, int]) -> Sizes:
    width = dims["n_audio_state"]
    return Sizes(
        mels=dims["n_mels"],
        width=width,
        encoder_layers=dims["n_audio_layer"],
        encoder_heads=dims["n_audio_head"],
        encoder_inner=4 * width,
        decoder_layers=dims["n_text_layer"],
        decoder_heads=dims["n_text_head"],
        decoder_inner=4 * width,
        vocabulary=dims["n_vocab"],
        source_positions=dims["n_audio_ctx"],
        target_positions=dims["n_text_ctx"],
    )
