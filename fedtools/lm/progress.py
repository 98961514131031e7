"""Progress over words on stderr: a bar on a terminal, now and then a line in a log."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

LOG_EVERY_SECONDS = 30.0


class WordProgress:
    """Counts words; tells speed and time left.

    Args:
        title: what is being done.
        total: words in all.
        done: those that an earlier run has done.
    """

    def __init__(self, title: str, total: int, done: int = 0):
        self.title = title
        self._bar = tqdm(
            total=total, initial=done, desc=title, unit="word", unit_scale=True, disable=None
        )
        self._total, self._done, self._begun = total, done, done
        self._start = self._told = time.monotonic()

    def __enter__(self) -> WordProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, words: int) -> None:
        """So many more words are done."""
        self._done += words
        if not self._bar.disable:
            self._bar.set_description(self.title, refresh=False)
            self._bar.update(words)
        elif time.monotonic() - self._told > LOG_EVERY_SECONDS and self._done < self._total:
            self._told = time.monotonic()
            share = 100 * self._done / self._total
            self.say(f"{self.title}: {share:.0f} % of {self._total} words, {self.left()} left")

    def left(self) -> str:
        """The time left, as "01:23"."""
        seconds = (time.monotonic() - self._start) / max(self._done - self._begun, 1)
        return tqdm.format_interval(seconds * (self._total - self._done))

    def say(self, line: str) -> None:
        """A line that stays, above the bar where there is one."""
        self._bar.write(line, file=sys.stderr)
