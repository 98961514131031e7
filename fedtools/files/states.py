"""Model states on disk: safetensors files, checked before anything in them is believed.

A state is a set of named tensors of float32, float64, int64 or bool. Files come from clients, so
the header is read here, with bounds, before memory is allocated or a tensor is looked at. Files
carry no metadata: the library writes it in the order of a hash map, and bytes would differ.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedtools.files.atomic import atomic_write
from fedtools.files.errors import UserError

if TYPE_CHECKING:
    import torch

Spec = dict[str, tuple[tuple[int, ...], str]]
"""name -> (shape, numpy's name of the type), what a state must hold."""

# In the order in which safetensors sorts tensors, so that our files are those of the library.
_CODES = {"int64": "I64", "float64": "F64", "float32": "F32", "bool": "BOOL"}
_TYPES = {code: name for name, code in _CODES.items()}
_RANK = {name: rank for rank, name in enumerate(_CODES)}

# A model of ten thousand tensors has a header of about one MiB.
_MAX_HEADER = 4 << 20
_REMEDY = "the file is damaged, or no safetensors file"


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a safetensors file lies, in bytes.

    `offsets` count from the start of the file, `size` is its length, and `strides` is the size of
    one row of dimension 0 of each tensor.
    """

    spec: Spec
    offsets: dict[str, int]
    strides: dict[str, int]
    size: int


def spec_of(tensors: Mapping[str, np.ndarray | torch.Tensor]) -> Spec:
    """The shapes and types of a state's tensors, sorted by name.

    Raises:
        UserError: naming the tensor, if its type cannot be in a state.
    """
    return {
        name: (tuple(tensors[name].shape), _kind(name, tensors[name])) for name in sorted(tensors)
    }


def row_bytes(spec: Spec) -> int:
    """The bytes of a state's tensors, without any header."""
    return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in spec.values())


def as_array(name: str, tensor: np.ndarray | torch.Tensor) -> np.ndarray:
    """A tensor on the processor, in C order, without copying where it is there already.

    Raises:
        UserError: naming the tensor, if its type cannot be in a state.
    """
    _kind(name, tensor)
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().numpy()
    return np.asarray(tensor, order="C")


def save_state(path: str | Path, tensors: Mapping[str, np.ndarray | torch.Tensor]) -> None:
    """Write a state atomically; the same tensors always give the same bytes.

    Args:
        path: the safetensors file.
        tensors: name -> tensor of any shape; none at all is a state too.

    Raises:
        UserError: naming the tensor, if its type cannot be in a state.
    """
    from safetensors.numpy import save

    arrays = {name: as_array(name, tensor) for name, tensor in tensors.items()}
    # Not the library's own writing: of a full disk it tells neither the file nor in one line.
    with atomic_write(path, "wb") as file:
        file.write(save(arrays))


def load_state(path: str | Path, spec: Spec | None = None) -> dict[str, np.ndarray]:
    """Read a state whole.

    Args:
        path: the safetensors file.
        spec: what it must hold; by default anything that a state may hold.

    Returns:
        name -> array, sorted by name.

    Raises:
        UserError: naming the file and, where it is one, the tensor, if the file is missing,
            damaged, or holds other tensors than `spec`.
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
    """Fail with a `UserError` naming the file and the first tensor that has a NaN or Inf."""
    for name, value in state.items():
        if not np.isfinite(as_array(name, value)).all():
            raise UserError(f"NaN or Inf in tensor {_short(name)}", path=path)


def check_spec(found: Spec, expected: Spec, path: str | Path) -> None:
    """Fail with a `UserError` naming the file and the first tensor that is not as expected."""
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


def make_header(spec: Spec) -> tuple[bytes, Layout]:
    """The start of a safetensors file for these tensors, as the library writes it, and its layout.

    For files too large to be held in memory: write the header, then every tensor at its offset.
    """
    names = sorted(spec, key=lambda name: (_RANK[spec[name][1]], name))
    entries, begins, end = {}, {}, 0
    for name in names:
        shape, kind = spec[name]
        begins[name], end = end, end + row_bytes({name: spec[name]})
        entries[name] = {
            "dtype": _CODES[kind],
            "shape": list(shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    by_name = {name: spec[name] for name in sorted(spec)}
    offsets = {name: start + begins[name] for name in by_name}
    layout = Layout(by_name, offsets, _strides(by_name), start + end)
    return len(text).to_bytes(8, "little") + text, layout


def read_layout(path: str | Path) -> Layout:
    """Read and check the header of a safetensors file; nothing else of it is read.

    Raises:
        UserError: naming the file, if it is missing or no plain file, if its header is too long,
            malformed, or names a type that no state has, or if the tensors do not fill the file
            exactly, without holes or overlaps.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError("not a plain file", path=path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER:
                raise UserError(f"a header of {length} bytes", path=path, remedy=_REMEDY)
            if status.st_size < 8 or 8 + length > status.st_size:
                raise UserError("cut off in the header", path=path, remedy=_REMEDY)
            text = file.read(length)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", path=path) from None
    return _layout(_parse(text, path), 8 + length, status.st_size, path)


def read_at(descriptor: int, array: np.ndarray, offset: int) -> bool:
    """Fill a C-ordered array from a position in a file; False if the file ends before it."""
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


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError("a key comes twice")
        return dict(pairs)

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise UserError("the header is not what it should be", path=path, remedy=_REMEDY)
    entries.pop("__metadata__", None)
    return entries


def _layout(entries: dict[str, Any], start: int, size: int, path: Path) -> Layout:
    spans = []
    spec: Spec = {}
    for name, entry in entries.items():
        values = _entry(entry)
        if values is None:
            raise UserError(f"the header's {_short(name)} is wrong", path=path, remedy=_REMEDY)
        shape, kind, begin, end = values
        if math.prod(shape) * np.dtype(kind).itemsize != end - begin:
            problem = f"tensor {_short(name)} has another size than its shape"
            raise UserError(problem, path=path, remedy=_REMEDY)
        spec[name] = (shape, kind)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            problem = f"a hole or an overlap before tensor {_short(name)}"
            raise UserError(problem, path=path, remedy=_REMEDY)
        position = end
    if start + position != size:
        problem = f"{size} bytes long, its header says {start + position}"
        raise UserError(problem, path=path, remedy="the file is cut off or damaged")
    return Layout(spec, {name: start + begin for begin, _, name in spans}, _strides(spec), size)


def _strides(spec: Spec) -> dict[str, int]:
    return {name: row_bytes({name: (shape[1:], kind)}) for name, (shape, kind) in spec.items()}


def _entry(entry: Any) -> tuple[tuple[int, ...], str, int, int] | None:
    """Shape, type, begin and end of one entry of a header; None if it is malformed."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return None
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _TYPES:
        return None
    # numpy has no more than 64 dimensions; bool is an int to isinstance.
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(_natural, shape)):
        return None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_natural, offsets)):
        return None
    return tuple(shape), _TYPES[code], offsets[0], offsets[1]


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _short(value: Any) -> str:
    """A value that someone else chose, made safe and short enough for a message of one line."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:96]} ..."
