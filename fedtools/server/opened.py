"""Files of messages while they are summed."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedtools.files.errors import UserError
from fedtools.files.messages import Message
from fedtools.files.states import read_at

# At a time, in each of a few threads: fewer than a process may have.
_MOST = 128


class Opened:
    """Files of messages, kept open: opening one for each piece of each tensor would take long."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, BinaryIO] = OrderedDict()

    def read(self, message: Message, name: str, skip: int, block: np.ndarray) -> bool:
        """Fill a block with a part of a client's tensor, and of the next clients' in the file.

        Args:
            name: of the tensor.
            skip: bytes of it before the part.

        Returns:
            False if the file is gone, is not as it was checked, or ends before the block does.
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
