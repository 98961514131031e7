"""Model states on disk: safetensors files, validated before they are used.

A state is a set of named tensors of float32, float64, int64 or bool. Files come from clients, so
the header is read here, with bounds, before memory is allocated or a tensor is read. Files have at
most one metadatum: the library would write several in the order of a hash map, and bytes would
differ.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fedtools.core.atomic import atomic_write
from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input

if TYPE_CHECKING:
    import torch

Spec = dict[str, tuple[tuple[int, ...], str]]
"""The tensors that a state must hold: name -> (shape, numpy's name of the type)."""

# In the order in which safetensors sorts tensors, so that our files equal those of the library.
_CODES = {"int64": "I64", "float64": "F64", "float32": "F32", "int32": "I32", "bool": "BOOL"}
_TYPES = {code: name for name, code in _CODES.items()}
_RANK = {name: rank for rank, name in enumerate(_CODES)}

# A model of ten thousand tensors has a header of about one MiB.
_MAX_HEADER = 4 << 20
# No file is larger, and sizes up to this one fit into 64 bits.
_MAX_BYTES = 1 << 62
_METADATA = "__metadata__"
_REMEDY = "the file is damaged, or no safetensors file"


@dataclass(frozen=True)
class Layout:
    """The positions of the tensors in a safetensors file, in bytes.

    `offsets` count from the start of the file, `size` is its length, and `strides` has the size of
    one row of dimension 0 of each tensor.
    """

    spec: Spec
    offsets: dict[str, int]
    strides: dict[str, int]
    size: int


def spec_of(tensors: Mapping[str, np.ndarray | torch.Tensor]) -> Spec:
    """Return the shapes and types of a state's tensors, sorted by name.

    Raises:
        UserError: naming the tensor, if a state cannot hold its type.
    """
    return {
        name: (tuple(tensors[name].shape), _kind(name, tensors[name])) for name in sorted(tensors)
    }


def row_bytes(spec: Spec) -> int:
    """Return the size of a state's tensors in bytes, without any header."""
    return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in spec.values())


def as_array(name: str, tensor: np.ndarray | torch.Tensor) -> np.ndarray:
    """Return a tensor as an array in C order, without a copy if it is on the CPU in that order.

    Raises:
        UserError: naming the tensor, if a state cannot hold its type.
    """
    _kind(name, tensor)
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().numpy()
    return np.asarray(tensor, order="C")


def save_state(path: str | Path, tensors: Mapping[str, np.ndarray | torch.Tensor]) -> None:
    """Write a state atomically; the same tensors always give the same bytes.

    Args:
        path: the safetensors file.
        tensors: name -> tensor of any shape; a state may be empty.

    Raises:
        UserError: naming the tensor, if a state cannot hold its type.
    """
    from safetensors.numpy import save

    arrays = {name: as_array(name, tensor) for name, tensor in tensors.items()}
    # The library's own writing reports a full disk without the file, and in several lines.
    with atomic_write(path, "wb") as file:
        file.write(save(arrays))


def load_state(path: str | Path, spec: Spec | None = None) -> dict[str, np.ndarray]:
    """Read a whole state.

    Args:
        path: the safetensors file.
        spec: the tensors that it must hold; by default any.

    Returns:
        name -> array, sorted by name.

    Raises:
        UserError: naming the file, and the tensor if there is one, if the file is missing, damaged,
            or holds other tensors than `spec`.
    """
    layout = read_layout(path)
    if spec is not None:
        check_spec(layout.spec, spec, path)
    arrays = {}
    with open(path, "rb") as file:
        for name, (shape, kind) in sorted(layout.spec.items()):
            arrays[name] = np.empty(shape, kind)
            if not read_at(file.fileno(), arrays[name], layout.offsets[name]):
                raise UserError(f"tensor {name!r} is cut off", path=path, remedy=_REMEDY)
    return arrays


def check_finite(state: Mapping[str, np.ndarray | torch.Tensor], path: str | Path) -> None:
    """Raise a `UserError` naming the file and the first tensor that has a NaN or Inf."""
    for name, value in state.items():
        if not np.isfinite(as_array(name, value)).all():
            raise UserError(f"NaN or Inf in tensor {_short(name)}", path=path)


def check_spec(found: Spec, expected: Spec, path: str | Path) -> None:
    """Raise a `UserError` naming the file and the first tensor that is not as expected."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise UserError(f"tensor {_short(name)} is missing", path=path)
        if name not in expected:
            raise UserError(f"tensor {_short(name)} does not belong there", path=path)
        if found[name] != expected[name]:
            theirs, ours = (
                f"{kind} of shape {_short(list(shape))}"
                for shape, kind in (found[name], expected[name])
            )
            raise UserError(f"tensor {_short(name)} is {theirs}, expected {ours}", path=path)


def make_header(spec: Spec, note: str = "") -> tuple[bytes, Layout]:
    """Return the header of a safetensors file, as the library writes it, and the file's layout.

    For files that are too large for memory: write the header, then every tensor at its offset.

    Args:
        spec: the tensors.
        note: what the file holds, for readers; its metadata.
    """
    entries = _entries(spec)
    text = _json(({_METADATA: {"content": note}} if note else {}) | entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, _layout(spec, entries, 8 + len(text))


def stacked_layout(layout: Layout) -> Layout:
    """Return the layout of the same bytes as tensors with a row, the only one, on dimension 0."""
    spec = {name: ((1, *shape), kind) for name, (shape, kind) in layout.spec.items()}
    strides = {
        name: math.prod(shape) * np.dtype(kind).itemsize
        for name, (shape, kind) in layout.spec.items()
    }
    return replace(layout, spec=spec, strides=strides)


def read_layout(path: str | Path) -> Layout:
    """Read and check the header of a safetensors file, without reading the tensors.

    Except for metadata, it must be exactly the header that the library writes for these tensors:
    then there are no holes, overlaps or wrong sizes, and all readers agree on the content.

    Raises:
        UserError: naming the file, if it is missing or no regular file, if its header is too long,
            is not the library's, or names a type that no state has, or if the tensors do not fill
            the file exactly.
    """
    with open_input(path) as file:
        return layout_of(file, path)


def layout_of(file: BinaryIO, path: str | Path) -> Layout:
    """Read and check the header of an open file, as `read_layout`; `path` is its name in errors."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > _MAX_HEADER:
        raise UserError(f"a header of {length} bytes", path=path, remedy=_REMEDY)
    text = file.read(length)
    try:
        found = json.loads(text.decode("utf-8"))
        metadata = {key: found.pop(key) for key in (_METADATA,) if key in found}
        declared = {name: _shape_and_kind(entry) for name, entry in found.items()}
        sound = all(map(_is_metadata, metadata.values()))
    except (ValueError, RecursionError, AttributeError, TypeError):
        sound = False
    if not sound:
        raise UserError("the header is not what it should be", path=path, remedy=_REMEDY)
    spec = {name: one for name, one in declared.items() if one is not None}
    wrong = [name for name in found if name not in spec]
    entries = {} if wrong else _entries(spec)
    if _json(metadata | entries) != text.rstrip(b" "):
        wrong = wrong or [name for name in found if found[name] != entries[name]] or ["order"]
        raise UserError(f"the header's {_short(wrong[0])} is wrong", path=path, remedy=_REMEDY)
    layout = _layout(spec, entries, 8 + length)
    if layout.size != size:
        problem = f"{size} bytes long, its header says {layout.size}"
        raise UserError(problem, path=path, remedy="the file is cut off or damaged")
    return layout


def read_at(descriptor: int, array: np.ndarray, offset: int) -> bool:
    """Fill a C-ordered array from a position in a file; return False if the file is too short."""
    if not array.size:
        return True
    left = memoryview(array.reshape(-1).view(np.uint8))
    while left:
        done = os.preadv(descriptor, [left], offset)
        if not done:
            return False
        left, offset = left[done:], offset + done
    return True


def write_at(descriptor: int, array: np.ndarray, offset: int) -> None:
    """Write a C-ordered array to a position in a file."""
    if not array.size:
        return
    left = memoryview(array.reshape(-1).view(np.uint8))
    while left:
        done = os.pwrite(descriptor, left, offset)
        left, offset = left[done:], offset + done


def _kind(name: str, tensor: np.ndarray | torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _CODES:
        raise UserError(
            f"tensor {name!r} is {kind}", remedy=f"states hold {', '.join(_CODES)}: convert it"
        )
    return kind


def _json(header: Mapping[str, Any]) -> bytes:
    # The library writes no name that is not Unicode, so such a name need not survive.
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _entries(spec: Spec) -> dict[str, dict[str, Any]]:
    """Return the header's entries of all tensors, in the order of the file."""
    entries, end = {}, 0
    for name in sorted(spec, key=lambda name: (_RANK[spec[name][1]], name)):
        shape, kind = spec[name]
        begin, end = end, end + row_bytes({name: spec[name]})
        offsets = [begin, end]
        entries[name] = {"dtype": _CODES[kind], "shape": list(shape), "data_offsets": offsets}
    return entries


def _layout(spec: Spec, entries: Mapping[str, Mapping[str, Any]], start: int) -> Layout:
    """Return the layout of a file whose tensors begin at the byte `start`."""
    ends = {name: [start + place for place in entries[name]["data_offsets"]] for name in entries}
    offsets = {name: begin for name, (begin, _) in ends.items()}
    strides = {name: row_bytes({name: (shape[1:], kind)}) for name, (shape, kind) in spec.items()}
    return Layout(spec, offsets, strides, max((end for _, end in ends.values()), default=start))


def _shape_and_kind(entry: Any) -> tuple[tuple[int, ...], str] | None:
    """Return the shape and type of a header's entry; None if a state cannot hold them."""
    shape, code = (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (0, 0)
    # numpy has no more than 64 dimensions; bool is an int to isinstance.
    if not isinstance(shape, list) or len(shape) > 32 or not isinstance(code, str):
        return None
    if code not in _TYPES or not all(type(size) is int and size >= 0 for size in shape):
        return None
    # Checked one by one, because a product of such numbers may have more digits than Python prints.
    # A dimension of 0 counts as 1, because numpy limits the product of the others.
    room = _MAX_BYTES // np.dtype(_TYPES[code]).itemsize
    for size in shape:
        if max(size, 1) > room:
            return None
        room //= max(size, 1)
    return tuple(shape), _TYPES[code]


def _is_metadata(value: Any) -> bool:
    """Return whether a value is valid metadata of the format: texts by name."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _short(value: Any) -> str:
    """Return an untrusted value as text that is safe and short enough for a one-line message."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:96]} ..."
