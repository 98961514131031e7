"""Sizes in a config.json, compared with the weights before a model of these sizes is built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtools.core.errors import UserError

# No number in a configuration of a model that speech recognition uses is larger.
_MOST = 1_000_000
_LAYER = re.compile(r"(.+\.(?:layers|conv_layers))\.([0-9]{1,6})\..+")
# Key -> name of a weight, and the dimension that the key gives.
_WHISPER = {
    "d_model": ("encoder.layer_norm.weight", 0),
    "encoder_ffn_dim": ("encoder.layers.0.fc1.weight", 0),
    "decoder_ffn_dim": ("decoder.layers.0.fc1.weight", 0),
    "max_source_positions": ("encoder.embed_positions.weight", 0),
    "max_target_positions": ("decoder.embed_positions.weight", 0),
    "vocab_size": ("decoder.embed_tokens.weight", 0),
    "num_mel_bins": ("encoder.conv1.weight", 1),
}
_WAVE = {
    "hidden_size": ("encoder.layer_norm.weight", 0),
    "intermediate_size": ("encoder.layers.0.feed_forward.intermediate_dense.weight", 0),
}
# Key -> the layers that it counts.
_WHISPER_LAYERS = {"encoder_layers": "encoder.layers", "decoder_layers": "decoder.layers"}
_WAVE_LAYERS = {"num_hidden_layers": "encoder.layers"}
# Keys with a value for each convolution -> the dimension of its weight.
_CONVOLUTIONS = {"conv_dim": 0, "conv_kernel": 2}


def check_sizes(
    kind: str, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], path: Path
) -> None:
    """Raise a `UserError` if sizes in a configuration are not those of the weights.

    Args:
        kind: the type of the model.
        config: the content of config.json.
        shapes: name of a weight, without the prefix of a model with a head -> its shape.
        path: of config.json.
    """
    for name, number in _numbers(config):
        if abs(number) > _MOST:
            raise UserError(f"{name} is {number:.3g}, more than any model has", path=path)
    is_whisper = kind == "whisper"
    layers: dict[str, int] = {}
    for name in shapes:
        if found := _LAYER.fullmatch(name):
            layers[found[1]] = max(layers.get(found[1], 0), int(found[2]) + 1)
    expected: dict[str, object] = {
        key: shapes[weight][dimension]
        for key, (weight, dimension) in (_WHISPER if is_whisper else _WAVE).items()
        if len(shapes.get(weight, ())) > dimension
    }
    for key, counted in (_WHISPER_LAYERS if is_whisper else _WAVE_LAYERS).items():
        expected[key] = layers.get(counted, 0)
    if not is_whisper:
        expected |= _convolutions(shapes, layers.get("feature_extractor.conv_layers", 0))
        strides = config.get("conv_stride", [])
        if not isinstance(strides, list) or not all(map(_is_stride, strides)):
            raise UserError("conv_stride: not numbers from 1 to 1000", path=path)
    for key, size in expected.items():
        if key in config and (type(config[key]) is not type(size) or config[key] != size):
            problem = f"{key} is {str(config[key])[:40]}, but {size} by the weights"
            raise UserError(problem, path=path, remedy="download the folder again")


def _convolutions(shapes: Mapping[str, Sequence[int]], count: int) -> dict[str, list[int]]:
    """Return the values for each convolution by the weights."""
    names = [f"feature_extractor.conv_layers.{number}.conv.weight" for number in range(count)]
    of_each = [shapes.get(name, ()) for name in names]
    if any(len(shape) != 3 for shape in of_each):
        return {}
    return {key: [shape[at] for shape in of_each] for key, at in _CONVOLUTIONS.items()}


def _is_stride(value: object) -> bool:
    return type(value) is int and 1 <= value <= 1000


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested values, each with the key that it belongs to."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, name or str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)
    elif isinstance(value, int | float):
        yield name, value
