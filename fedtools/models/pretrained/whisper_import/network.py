"""Whisper as tensors: its sizes, and the names and shapes of tensors for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedtools.core.errors import UserError

EMBEDDING = "model.decoder.embed_tokens.weight"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Whisper model, which determine all shapes of its tensors."""

    mels: int
    width: int
    encoder_layers: int
    encoder_heads: int
    encoder_inner: int
    decoder_layers: int
    decoder_heads: int
    decoder_inner: int
    vocabulary: int
    source_positions: int
    target_positions: int

    def config(self) -> dict[str, int]:
        """Return the sizes with the keys of `transformers.WhisperConfig`."""
        return {
            "vocab_size": self.vocabulary,
            "num_mel_bins": self.mels,
            "d_model": self.width,
            "encoder_layers": self.encoder_layers,
            "encoder_attention_heads": self.encoder_heads,
            "encoder_ffn_dim": self.encoder_inner,
            "decoder_layers": self.decoder_layers,
            "decoder_attention_heads": self.decoder_heads,
            "decoder_ffn_dim": self.decoder_inner,
            "max_source_positions": self.source_positions,
            "max_target_positions": self.target_positions,
        }


@dataclass(frozen=True)
class Whisper:
    """A model that was read: sizes, tensors by Hugging Face's names, and notes for users."""

    sizes: Sizes
    tensors: dict[str, torch.Tensor]
    notes: list[str] = field(default_factory=list)


def check(sizes: Sizes, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Raise a `UserError` unless the tensors are those of a Whisper model of these sizes."""
    for name, value in sizes.config().items():
        if not 0 < value < 1 << 31:
            raise UserError(f"{name} is {value}", path=path, remedy="the file is damaged")
    for heads in (sizes.encoder_heads, sizes.decoder_heads):
        if sizes.width % heads:
            problem = f"{heads} attention heads do not divide a width of {sizes.width}"
            raise UserError(problem, path=path, remedy="the file is damaged")
    if max(sizes.encoder_layers, sizes.decoder_layers) > len(tensors):
        problem = f"{len(tensors)} tensors are too few for its layers"
        raise UserError(problem, path=path, remedy="the file is damaged")
    expected = dict(_shapes(sizes))
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            raise UserError(f"tensor {name!r} is missing", path=path, remedy="is it Whisper?")
        if name not in expected:
            problem = f"tensor {name!r} does not belong to Whisper"
            raise UserError(problem, path=path, remedy="such a model cannot be converted")
        if (found := tuple(tensors[name].shape)) != expected[name]:
            problem = f"tensor {name!r} has shape {found}, expected {expected[name]}"
            raise UserError(problem, path=path, remedy="the file is damaged, or not from Whisper")
        if not tensors[name].isfinite().all():
            raise UserError(f"tensor {name!r} has a NaN or infinity", path=path)


def _shapes(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of `WhisperForConditionalGeneration`, whose output layer is tied."""
    width = sizes.width
    yield EMBEDDING, (sizes.vocabulary, width)
    for layer, inputs in (("conv1", sizes.mels), ("conv2", width)):
        yield f"model.encoder.{layer}.weight", (width, inputs, 3)
        yield f"model.encoder.{layer}.bias", (width,)
    for half, positions, layers, inner, attentions in (
        ("encoder", sizes.source_positions, sizes.encoder_layers, sizes.encoder_inner, 1),
        ("decoder", sizes.target_positions, sizes.decoder_layers, sizes.decoder_inner, 2),
    ):
        yield f"model.{half}.embed_positions.weight", (positions, width)
        yield from _norm(f"model.{half}.layer_norm", width)
        for number in range(layers):
            layer = f"model.{half}.layers.{number}"
            for attention in ("self_attn", "encoder_attn")[:attentions]:
                yield from _norm(f"{layer}.{attention}_layer_norm", width)
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    yield f"{layer}.{attention}.{projection}.weight", (width, width)
                    if projection != "k_proj":
                        yield f"{layer}.{attention}.{projection}.bias", (width,)
            yield from _norm(f"{layer}.final_layer_norm", width)
            yield f"{layer}.fc1.weight", (inner, width)
            yield f"{layer}.fc1.bias", (inner,)
            yield f"{layer}.fc2.weight", (width, inner)
            yield f"{layer}.fc2.bias", (width,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
