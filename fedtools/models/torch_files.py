"""Reading of untrusted `torch.save` files: only tensors are read, and no code is run."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from fedtools.files.errors import UserError
from fedtools.files.text_files import open_input


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
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"not a file of tensors: {reason}", path=path) from None
