"""Progress reports of long work on stderr: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from tqdm import tqdm

# The length of a frame, for the speed in multiples of real time.
_FRAME_SECONDS = 0.01
LOG_EVERY_SECONDS = 30.0
Own = TypeVar("Own", bound="Bar")
Item = TypeVar("Item")


class Bar:
    """A count of finished work, with the time left.

    Args:
        title: the work, such as "round 7, client au".
        total: the total number of steps or words.
        done: the number that an earlier run has done.
        bar: further options of tqdm.
    """

    def __init__(self, title: str, total: int, done: int = 0, **bar: Any):
        self.title = title
        self._bar = tqdm(total=total, initial=done, desc=title, disable=None, **bar)
        self._total, self._done, self._begun = total, done, done
        self._start = self._reported = time.monotonic()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def left(self) -> str:
        """Return the time left, as "01:23"."""
        return _left(self._start, self._done - self._begun, self._total - self._done)

    def say(self, line: str) -> None:
        """Print a permanent line, above the bar if there is one."""
        self._bar.write(line, file=sys.stderr)
        sys.stderr.flush()

    def _is_due(self, seconds: float) -> bool:
        """Return whether the last report is old enough for another, and work is left."""
        now = time.monotonic()
        due = now - self._reported > seconds and self._done < self._total
        if due:
            self._reported = now
        return due


class Progress(Bar):
    """A count of training steps, with loss, speed and time left."""

    def __init__(self, title: str, total: int, done: int = 0):
        super().__init__(title, total, done, unit="step", leave=False)
        self._frames = 0

    def advance(self, frames: int, loss: Callable[[], float]) -> None:
        """Count one step over a number of frames; call `loss` only when it is shown."""
        self._done += 1
        self._frames += frames
        if not self._bar.disable:
            if self._is_due(0.5):
                self._bar.set_postfix_str(self._facts(loss), refresh=False)
            self._bar.update()
        elif self._is_due(LOG_EVERY_SECONDS):
            step = f"step {self._done}/{self._total}"
            self.say(f"{self.title}: {step}, {self._facts(loss)}, {self.left()} left")

    def _facts(self, loss: Callable[[], float]) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        speed = self._frames * _FRAME_SECONDS / seconds
        return f"loss {loss():.3g}, {speed:.0f} x real time"


class Count(Bar):
    """A count of finished units, with the time left.

    Args:
        title, total, done: as in `Bar`.
        unit: the units that are counted, such as "words".
    """

    def __init__(self, title: str, total: int, unit: str, done: int = 0):
        super().__init__(title, total, done, unit=f" {unit}", unit_scale=True, leave=False)
        self._unit = unit

    def advance(self, count: int = 1) -> None:
        """Count a number of units as done."""
        self._done += count
        if not self._bar.disable:
            self._bar.set_description(self.title, refresh=False)
            self._bar.update(count)
        elif self._is_due(LOG_EVERY_SECONDS):
            share = 100 * self._done / self._total
            counted = f"{share:.0f} % of {self._total} {self._unit}"
            self.say(f"{self.title}: {counted}, {self.left()} left")


def counted(
    items: Iterable[Item], title: str, unit: str, total: int | None = None
) -> Iterator[Item]:
    """Iterate over a collection and show the progress; give `total` if it has no length."""
    if total is None:
        assert isinstance(items, Sized)
        total = len(items)
    with Count(title, total, unit) as bar:
        for item in items:
            yield item
            bar.advance()


class Lines:
    """Progress lines, one for each finished epoch or round.

    Args:
        title: the work that is reported on.
        unit: "epoch", or "round".
        last: the number of the last one.
        first: the number of the first one that this process does.
    """

    def __init__(self, title: str, unit: str, last: int, first: int = 1):
        self._title, self._unit, self._last, self._first = title, unit, last, first
        self._start = time.monotonic()

    def done(self, number: int, *facts: str) -> None:
        """Report that an epoch or round is done, with some facts and the time left."""
        done = number - self._first + 1
        seconds = (time.monotonic() - self._start) / done
        left = _left(self._start, done, self._last - number)
        parts = [f"{self._title}: {self._unit} {number}/{self._last}", *facts]
        parts += [f"{seconds:.1f} s/{self._unit}", f"{left} left"]
        print(", ".join(parts), file=sys.stderr, flush=True)


def _left(start: float, done: int, left: int) -> str:
    """Return the time left, as "01:23", extrapolated from the work done since `start`."""
    return tqdm.format_interval((time.monotonic() - start) / max(done, 1) * left)
