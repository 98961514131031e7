"""Reading of untrusted `torch.save` files: only tensors are read, and no code is run."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fedtools.core.errors import UserError
from fedtools.core.text_files import open_input

_CONVERT = "take the model's own PyTorch file, or its Hugging Face folder"
_FOLDER = "a Hugging Face folder needs no import: name it as model.path"
_SAVE = "save its tensors alone: torch.save(model.state_dict(), FILE)"
# Offset of a mark, the mark, the format, and what to do with it.
_FORMATS = (
    (0, b"lmgg", "in whisper.cpp's format (GGML)", _CONVERT),
    (0, b"GGUF", "in llama.cpp's format (GGUF)", _CONVERT),
    (8, b'{"', "a safetensors file", _FOLDER),
    (0, b"\x89HDF", "an HDF5 file", _CONVERT),
    (0, b"\x93NUMPY", "a NumPy array", _CONVERT),
    (0, b"\x1f\x8b", "compressed (gzip)", "decompress it with: gunzip"),
    (257, b"ustar", "a tar archive", "unpack it with: tar -xf, and name the file in it"),
    (0, b"<!DOCTYPE", "a web page", "download the file itself"),
    (0, b"<html", "a web page", "download the file itself"),
)
_HEAD = 512
# PyTorch's errors name the first object that is no tensor.
_OBJECT = re.compile(r"(?:GLOBAL|Unsupported (?:global|class|operand))[: ]+(?:GLOBAL )?([\w.]+)")


def load_tensors(path: Path) -> Any:
    """Read a file of tensors, numbers and names, in lists and mappings.

    Raises:
        UserError: if the file cannot be read, is damaged, or holds anything else.
    """
    with open_input(path) as file:
        try:
            if zipfile.is_zipfile(file):
                # torch.save does not compress; a compressed file might not fit in memory.
                with zipfile.ZipFile(file) as archive:
                    size = sum(entry.file_size for entry in archive.infolist())
                if size > os.fstat(file.fileno()).st_size:
                    raise ValueError(f"a compressed archive of {size} bytes")
            file.seek(0)
            # Tensors only: a pickle could run any code.
            content = torch.load(file, map_location="cpu", weights_only=True)
            if any(one.is_nested for one in _tensors(content)):
                raise ValueError("it holds a nested tensor")
            return content
        except Exception as error:
            problem, remedy = _reason(file, error)
            raise UserError(f"not a file of tensors: {problem}", path=path, remedy=remedy) from None


def _tensors(content: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists and mappings."""
    if torch.is_tensor(content):
        yield content
    elif isinstance(content, list | tuple | Mapping):
        for one in content.values() if isinstance(content, Mapping) else content:
            yield from _tensors(one)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors in safetensors' format, with the metadata that transformers asks for.

    Raises:
        OSError: if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        # The library's error of a full disk is no OSError.
        if not (found := re.search(r"os error (\d+)", str(error))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None


def _reason(file: BinaryIO, error: Exception) -> tuple[str, str]:
    """Return why a file cannot be read, and what to do; PyTorch advises to run code in the file."""
    file.seek(0)
    head = file.read(_HEAD)
    for place, mark, name, remedy in _FORMATS:
        if head[place : place + len(mark)] == mark:
            return f"it is {name}", remedy
    if found := _OBJECT.search(str(error)):
        return f"it holds an object of {found[1]}, and such files could run code", _SAVE
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    # Of other bytes, what they mean as a pickle is no reason.
    if "weights_only" in reason or head[:1] not in (b"\x80", b"P"):
        reason = "it is no checkpoint of PyTorch, or is damaged"
    return reason, "download it again"
