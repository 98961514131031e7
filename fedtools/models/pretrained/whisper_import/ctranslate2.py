"""Reading of CTranslate2's model.bin, which faster-whisper uses, without the library.

The file has, in little-endian numbers: the format's version; name and revision of the kind of
model; the number of variables, and for each its name, rank, dimensions, type and bytes; the number
of aliases, and for each its name and variable. Source: `ModelSpec._serialize` of CTranslate2's
Python package.
"""

from __future__ import annotations

import math
import os
import re
import struct
from pathlib import Path
from typing import BinaryIO, NoReturn

import torch

from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input
from fedtools.models.pretrained.whisper_import.network import EMBEDDING, Sizes, Whisper, check

_VERSION = 6
# Types in the order of their numbers in the file.
_TYPES = (
    torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16,
)  # fmt: skip
# No tensor has more dimensions than a convolution's weight.
_MAX_RANK = 3
_DAMAGED = "the file is cut off, damaged, or not from CTranslate2"

# Flags that the library's own converter writes for Whisper, in addition to tensors. Any other value
# means a model that computes something else, except for flags with None here, which have no effect.
_FLAGS = {
    "decoder/activation": 3,  # GELU
    "decoder/alibi": 0,
    "decoder/alibi_use_positive_positions": None,
    "decoder/alignment_heads": None,
    "decoder/alignment_layer": None,
    "decoder/pre_norm": 1,
    "decoder/scale_alibi": None,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
_PLAIN = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
_LAYER = re.compile(r"(encoder|decoder)/layer_(0|[1-9][0-9]{0,3})/(.+)/(gamma|beta|weight|bias)")
# Tensors within a layer: each corresponds to one in Hugging Face's names, or to several in order.
_PARTS = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_OTHERS = {
    "decoder/embeddings/weight": EMBEDDING,
    **{
        f"{half}/position_encodings/encodings": f"model.{half}.embed_positions.weight"
        for half in ("encoder", "decoder")
    },
    **{
        f"{half}/layer_norm/{theirs}": f"model.{half}.layer_norm.{ours}"
        for half in ("encoder", "decoder")
        for theirs, ours in (("gamma", "weight"), ("beta", "bias"))
    },
    **{
        f"encoder/{layer}/{kind}": f"model.encoder.{layer}.{kind}"
        for layer in ("conv1", "conv2")
        for kind in ("weight", "bias")
    },
}


def read_ctranslate2(path: Path) -> Whisper:
    """Read a model.bin.

    Raises:
        UserError: naming the file and the part of it that is damaged, has another version or kind
            of model, an unsupported quantisation, or does not belong to Whisper.
    """
    with open_input(path) as file:
        variables = _Reader(file, path).variables()
    heads = [_scalar(variables, f"{half}/num_heads", path) for half in ("encoder", "decoder")]
    for name, value in _FLAGS.items():
        if name in variables and (found := _scalar(variables, name, path)) != value is not None:
            problem = f"{name} is {found}, but {value} in Whisper"
            raise UserError(problem, path=path, remedy="such a model cannot be converted")
    quantised = any(value.dtype == torch.int8 for value in variables.values())
    _dequantise(variables, path)
    output = variables.pop("decoder/projection/weight", None)
    embedding = variables.get("decoder/embeddings/weight")
    if output is not None and (embedding is None or not torch.equal(output, embedding)):
        problem = "decoder/projection/weight is not the embedding matrix, as it is in Whisper"
        raise UserError(problem, path=path, remedy="such a model cannot be converted")
    tensors: dict[str, torch.Tensor] = {}
    for name in list(variables):
        tensors.update(_renamed(name, variables.pop(name), path))
    sizes = _sizes(tensors, heads[0], heads[1], path)
    check(sizes, tensors, path)
    note = "8-bit weights: they differ from those of the model before quantisation"
    return Whisper(sizes, tensors, [note] if quantised else [])


class _Reader:
    """Reader of an open model.bin that checks every size against the rest of the file."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self._path = path
        self._left = self._size = os.fstat(file.fileno()).st_size

    def variables(self) -> dict[str, torch.Tensor]:
        """Read all variables by name, including aliases."""
        version = self._number("I")
        if version != _VERSION:
            problem = f"version {version} of CTranslate2's format, or another format"
            remedy = f"convert the model again; only version {_VERSION} is supported"
            raise UserError(problem, path=self._path, remedy=remedy)
        if (kind := self._text()) != "WhisperSpec":
            problem = f"a model of kind {kind[:40]!r}, not WhisperSpec"
            raise UserError(problem, path=self._path, remedy="only Whisper can be converted")
        if (revision := self._number("I")) != 3:
            problem = f"revision {revision} of WhisperSpec; only 3 is supported"
            raise UserError(problem, path=self._path, remedy="convert the model again")
        found: dict[str, torch.Tensor] = {}
        for _ in range(self._number("I")):
            name = self._text()
            if name in found:
                self._fail(f"variable {name!r} is duplicated")
            found[name] = self._variable(name)
        aliases: dict[str, torch.Tensor] = {}
        size = 0
        for _ in range(self._number("I")):
            name, of = self._text(), self._text()
            if name in found or name in aliases or of not in found:
                self._fail(f"alias {name!r} of {of!r} is wrong")
            # An alias includes the variable's scale. safetensors refuses tensors that share memory.
            for end in ("", "_scale")[: 1 + (f"{of}_scale" in found)]:
                size += found[f"{of}{end}"].nbytes
                # Checked for each: a few bytes make an alias of any size.
                if size > self._size:
                    self._fail(f"aliases, such as {name!r}, of more bytes than the file")
                aliases[f"{name}{end}"] = found[f"{of}{end}"].clone()
        if self._left:
            self._fail(f"{self._left} bytes after the end of the model")
        return found | aliases

    def _variable(self, name: str) -> torch.Tensor:
        rank = self._number("B")
        if rank > _MAX_RANK:
            self._fail(f"variable {name!r} has {rank} dimensions")
        shape = [self._number("I") for _ in range(rank)]
        kind, size = self._number("B"), self._number("I")
        if kind >= len(_TYPES):
            self._fail(f"variable {name!r} has the unknown type {kind}")
        if size == 0 or size != math.prod(shape) * _TYPES[kind].itemsize:
            self._fail(f"variable {name!r} of shape {shape} has {size} bytes")
        return torch.frombuffer(bytearray(self._take(size)), dtype=_TYPES[kind]).reshape(shape)

    def _text(self) -> str:
        raw = self._take(self._number("H"))
        try:
            text = raw.decode("ascii")
        except UnicodeDecodeError:
            text = ""
        if not text.endswith("\0") or not text[:-1].isprintable():
            self._fail(f"{raw[:20]!r} where a name should be")
        return text[:-1]

    def _number(self, kind: str) -> int:
        return int(struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))[0])

    def _take(self, size: int) -> bytes:
        # Checked before memory is allocated.
        if size > self._left:
            self._fail(f"{size} bytes are expected where {self._left} are left")
        raw = self._file.read(size)
        self._left -= size
        if len(raw) != size:
            self._fail("the file became shorter while it was read")
        return raw

    def _fail(self, problem: str) -> NoReturn:
        raise UserError(problem, path=self._path, remedy=_DAMAGED)


def _scalar(variables: dict[str, torch.Tensor], name: str, path: Path) -> int:
    value = variables.pop(name, None)
    if value is None or value.numel() != 1 or value.is_floating_point():
        problem = f"{name} is missing" if value is None else f"{name} is not a whole number"
        raise UserError(problem, path=path, remedy=_DAMAGED)
    return int(value.item())


def _dequantise(variables: dict[str, torch.Tensor], path: Path) -> None:
    """Turn 8-bit weights, which have a scale for each row, into numbers of the model's type.

    The rounding to this type is far smaller than a step of 8 bits.
    """
    norm = variables.get("decoder/layer_norm/gamma")
    precision = torch.float32 if norm is None else norm.dtype
    for name, value in list(variables.items()):
        # Unknown flags are refused by name elsewhere.
        if value.is_floating_point() or value.dim() == 0:
            continue
        if value.dtype != torch.int8:
            kind = str(value.dtype).removeprefix("torch.")
            problem = f"{name} has type {kind}; float32, float16, bfloat16 and int8 are supported"
            raise UserError(problem, path=path, remedy="convert the model again, to one of these")
        scale = variables.pop(f"{name}_scale", None)
        if scale is None or not scale.is_floating_point() or scale.shape != value.shape[:1]:
            problem = f"{name}_scale is missing or of a wrong shape"
            raise UserError(problem, path=path, remedy=_DAMAGED)
        rows = scale.float().reshape(-1, *[1] * (value.dim() - 1))
        variables[name] = (value.float() / rows).to(precision)


def _renamed(name: str, value: torch.Tensor, path: Path) -> dict[str, torch.Tensor]:
    """Return a variable as one tensor or several, by Hugging Face's names."""
    if name in _OTHERS:
        return {_OTHERS[name]: value}
    found = _LAYER.fullmatch(name)
    if not found or found[3] not in _PARTS:
        problem = f"variable {name!r} does not belong to Whisper"
        raise UserError(problem, path=path, remedy="such a model cannot be converted")
    half, number, part, kind = found.groups()
    targets = _PARTS[part]
    if value.shape[0] % len(targets):
        problem = f"variable {name!r} has the wrong shape {tuple(value.shape)}"
        raise UserError(problem, path=path, remedy=_DAMAGED)
    layer = f"model.{half}.layers.{number}"
    tensors = dict(zip(targets, value.chunk(len(targets)), strict=True))
    if kind == "bias":
        # Whisper has no bias for keys; the file has zeros in its place.
        for target in [target for target in targets if target.endswith("k_proj")]:
            if tensors.pop(target).any():
                problem = f"variable {name!r} has a bias for keys, but Whisper has none"
                raise UserError(problem, path=path, remedy="such a model cannot be converted")
    return {f"{layer}.{target}.{_PLAIN[kind]}": tensor for target, tensor in tensors.items()}


def _sizes(
    tensors: dict[str, torch.Tensor], encoder_heads: int, decoder_heads: int, path: Path
) -> Sizes:
    """Return the model's sizes from some of the shapes; `check` compares all shapes with them."""

    def rows(name: str, dimension: int = 0) -> int:
        value = tensors.get(name)
        if value is None or value.dim() <= dimension:
            problem = f"tensor {name!r} is missing or has too few dimensions"
            raise UserError(problem, path=path, remedy=_DAMAGED)
        return value.shape[dimension]

    def layers(half: str) -> int:
        start = f"model.{half}.layers."
        numbers = {name[len(start) :].split(".")[0] for name in tensors if name.startswith(start)}
        return len(numbers)

    return Sizes(
        mels=rows("model.encoder.conv1.weight", 1),
        width=rows(EMBEDDING, 1),
        encoder_layers=layers("encoder"),
        encoder_heads=encoder_heads,
        encoder_inner=rows("model.encoder.layers.0.fc1.weight"),
        decoder_layers=layers("decoder"),
        decoder_heads=decoder_heads,
        decoder_inner=rows("model.decoder.layers.0.fc1.weight"),
        vocabulary=rows(EMBEDDING),
        source_positions=rows("model.encoder.embed_positions.weight"),
        target_positions=rows("model.decoder.embed_positions.weight"),
    )
