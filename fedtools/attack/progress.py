"""A line on stderr for each epoch of an attacker's training, as rounds have one."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


class Epochs:
    """How far a training is, and how long it will take.

    Args:
        title: of what is trained.
        total: epochs.
    """

    def __init__(self, title: str, total: int):
        self._title, self._total, self._begun = title, total, time.monotonic()

    def done(self, number: int, loss: float) -> None:
        """Say that epoch `number`, from 1, is done, with its last loss."""
        seconds = (time.monotonic() - self._begun) / number
        left = tqdm.format_interval(seconds * (self._total - number))
        facts = f"epoch {number}/{self._total}, loss {loss:.3g}, {seconds:.1f} s/epoch, {left} left"
        print(f"{self._title}: {facts}", file=sys.stderr, flush=True)
