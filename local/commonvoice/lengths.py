"""Durations of clips, from clip_durations.tsv or from the audio."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from corpus import Row, read_tsv

from fedtools.audio.wave import AudioError, recording_seconds
from fedtools.core.errors import UserError
from fedtools.core.progress import counted
from fedtools.core.signals import uninterrupted

TABLE = "clip_durations.tsv"
# In seconds. Programs that measure MP3 differ by the encoder's delay, the padding of the last
# frame, and an Info frame mistaken for audio: less than 0.15 s at 16 kHz, 0.29 s at 8 kHz.
TOLERANCE = 0.3
# Below this number of clips, starting another process takes longer than it saves.
_CLIPS_EACH = 200
_FAULTS = {
    "unreadable audio": "unreadable clip",
    "empty file": "clip of zero bytes",
    "no such file": "missing clip",
    "more than two channels": "clip of more than two channels",
}


def measure(rows: list[Row], language: Path, jobs: int, dropped: Counter) -> list[Row]:
    """Set the seconds of every row, from clip_durations.tsv or else from its clip.

    Args:
        rows: what `corpus.usable` returned.
        language: the folder with the table and the clips.
        jobs: number of processes that read clips.
        dropped: reason -> rows, added to.

    Returns:
        The rows, except those whose clip was opened and is unusable.

    Raises:
        UserError: if the table cannot be read.
    """
    listed = _read_table(language / TABLE, {row.clip for row in rows})
    for row in rows:
        row.seconds = listed.get(row.clip, 0.0)
    return open_clips(rows, [row for row in rows if not row.seconds], language, jobs, dropped)


def open_clips(
    rows: list[Row], wanted: list[Row], language: Path, jobs: int, dropped: Counter
) -> list[Row]:
    """Open clips, and drop the rows whose clip is unreadable or differs in length from its row.

    Args:
        rows: all rows.
        wanted: the rows whose clips are opened; their `seconds` are set if they are 0.
        language, jobs, dropped: as for `measure`.

    Returns:
        `rows`, except those whose clip is unusable.
    """
    clips = [str(language / "clips" / row.clip) for row in wanted]
    faulty: set[str] = set()
    with _mapped(clips, jobs) as found:
        for row, seconds in zip(counted(wanted, "open", "clips"), found, strict=True):
            row.opened = True
            if isinstance(seconds, str):
                fault = seconds
            elif not row.seconds:
                row.seconds, fault = seconds, ""
            else:
                fault = _difference(seconds, row.seconds)
            if fault:
                dropped[fault] += 1
                faulty.add(row.clip)
    return [row for row in rows if row.clip not in faulty]


def _difference(seconds: float, listed: float) -> str:
    """Return how a clip's length differs from the table's, or "" if it does not."""
    if abs(seconds - listed) <= TOLERANCE:
        return ""
    return f"clip {'shorter' if seconds < listed else 'longer'} than in {TABLE}"


def length_of(clip: str) -> float | str:
    """Return the length of a clip in seconds, or why it is unusable."""
    try:
        return recording_seconds(clip) or "unreadable clip"
    except AudioError as error:
        return _FAULTS[error.reason]


def _read_table(path: Path, wanted: set[str]) -> dict[str, float]:
    """Read clip -> seconds above 0 of the wanted clips; return {} if there is no table."""
    seconds: dict[str, float] = {}
    if not path.exists():
        return seconds
    for line, cells in enumerate(read_tsv(path, "clip", "duration[ms]"), 2):
        if cells and cells["clip"] in wanted:
            try:
                listed = float(cells["duration[ms]"]) / 1000
            except ValueError:
                listed = math.nan
            if not math.isfinite(listed):
                problem = f"{cells['duration[ms]']!r} is not a number"
                raise UserError(problem, path=path, line=line)
            if listed > 0:
                seconds[cells["clip"]] = listed
    return seconds


@contextmanager
def _mapped(clips: list[str], jobs: int) -> Iterator[Iterator[float | str]]:
    """Compute `length_of` every clip, in order, in as many processes as are of use."""
    jobs = min(jobs, 1 + len(clips) // _CLIPS_EACH)
    if jobs == 1:
        yield map(length_of, clips)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _end_with_parent) as pool:
        try:
            with uninterrupted():
                found = pool.map(length_of, clips, chunksize=50)
            yield found
        except BrokenProcessPool:
            raise UserError("a process that opens clips was killed", remedy="lower --nj") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when its parent has ended, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
