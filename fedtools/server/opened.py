"""Open files of client messages during aggregation."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedtools.core.errors import UserError
from fedtools.exchange.messages import Message
from fedtools.exchange.states import read_at

# Files open at a time in each thread; all threads together stay below the limit of a process.
_MOST = 128


class Opened:
    """Message files that are kept open, since opening one for every piece of a tensor is slow."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, BinaryIO] = OrderedDict()

    def read(self, message: Message, name: str, skip: int, block: np.ndarray) -> bool:
        """Fill a block with a part of a client's tensor and of the next clients' in the file.

        Args:
            message: the first client's message.
            name: the name of the tensor.
            skip: the number of bytes of the tensor before the part.
            block: the array to fill.

        Returns:
            False if the file is missing, has changed since it was checked, or is too short.
        """
        try:
            file = self._files.get(message.path) or self._open(message)
            return read_at(file.fileno(), block, message.offset(name) + skip)
        except (OSError, UserError):
            return False

    def _open(self, message: Message) -> BinaryIO:
        file = message.open()
        if len(self._files) == _MOST:
            self._files.popitem(last=False)[1].close()
        self._files[message.path] = file
        return file

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            self._files.popitem()[1].close()
