"""Progress of long work on stderr: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tqdm import tqdm

# Frames of 10 ms: the unit in which the speed against real time is told.
_FRAME_SECONDS = 0.01
_LOG_EVERY_SECONDS = 30.0


class Progress:
    """Counts steps; tells loss, speed and time left.

    Args:
        title: what is being done, such as "round 7, client au".
        total: steps in all.
        done: steps that a checkpoint had already.
    """

    def __init__(self, title: str, total: int, done: int = 0):
        self._title = title
        self._bar = tqdm(
            total=total, initial=done, desc=title, unit="step", disable=None, leave=False
        )
        self._total, self._done, self._begun = total, done, done
        self._frames = 0
        self._start = self._told = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, frames: int, loss: Callable[[], float]) -> None:
        """One step is done, over so many frames; `loss` is asked for only when it is shown."""
        self._done += 1
        self._frames += frames
        now = time.monotonic()
        if not self._bar.disable:
            if now - self._told > 0.5:
                self._told = now
                self._bar.set_postfix_str(f"loss {loss():.3g}, {self._speed(now)}", refresh=False)
            self._bar.update()
        elif now - self._told > _LOG_EVERY_SECONDS and self._done < self._total:
            self._told = now
            left = (now - self._start) / (self._done - self._begun) * (self._total - self._done)
            print(
                f"{self._title}: step {self._done}/{self._total}, loss {loss():.3g}, "
                f"{self._speed(now)}, {tqdm.format_interval(left)} left",
                file=sys.stderr,
                flush=True,
            )

    def _speed(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        return f"{self._frames * _FRAME_SECONDS / seconds:.0f} x real time"
