"""How long clips are: as clip_durations.tsv tells, and as they are read."""

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
from fedtools.files.errors import UserError
from fedtools.files.progress import counted

TABLE = "clip_durations.tsv"
# In s. Programs that measure MP3 differ by the encoder's delay, what fills the last frame, and an
# Info frame taken for audio: less than 0.15 s at 16 kHz, 0.29 s at 8 kHz.
TOLERANCE = 0.3
# Below so many clips a second process takes longer to start than to be of use.
_CLIPS_EACH = 200
_FAULTS = {
    "unreadable audio": "unreadable clip",
    "empty file": "clip of zero bytes",
    "no such file": "missing clip",
    "more than two channels": "clip of more than two channels",
}


def measure(rows: list[Row], language: Path, jobs: int, dropped: Counter) -> list[Row]:
    """Set the seconds of every row: as clip_durations.tsv tells, or else as the clip is read.

    Args:
        rows: what `corpus.usable` gave.
        language: the folder with the table and the clips.
        jobs: how many processes read clips.
        dropped: reason -> rows, added to.

    Returns:
        The rows without those whose clip was opened and cannot be used.

    Raises:
        UserError: if the table cannot be read.
    """
    told = _read_table(language / TABLE, {row.clip for row in rows})
    for row in rows:
        row.seconds = told.get(row.clip, 0.0)
    return open_clips(rows, [row for row in rows if not row.seconds], language, jobs, dropped)


def open_clips(
    rows: list[Row], wanted: list[Row], language: Path, jobs: int, dropped: Counter
) -> list[Row]:
    """Open clips, and drop those that cannot be read or are not as long as their row tells.

    Args:
        rows: of which some clips are opened.
        wanted: rows whose clips are; their `seconds` are set if they are 0.
        language, jobs, dropped: as for `measure`.

    Returns:
        `rows` without those whose clip cannot be used.
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


def _difference(seconds: float, told: float) -> str:
    """Why a clip is not the one that the table tells of; empty if it is."""
    if abs(seconds - told) <= TOLERANCE:
        return ""
    return f"clip {'shorter' if seconds < told else 'longer'} than {TABLE} tells"


def length_of(clip: str) -> float | str:
    """The length of a clip in seconds, or why it cannot be used."""
    try:
        return recording_seconds(clip) or "unreadable clip"
    except AudioError as error:
        return _FAULTS[error.reason]


def _read_table(path: Path, wanted: set[str]) -> dict[str, float]:
    """Clip -> seconds above 0 of the wanted clips; empty without the table."""
    seconds: dict[str, float] = {}
    if not path.exists():
        return seconds
    for line, cells in enumerate(read_tsv(path, "clip", "duration[ms]"), 2):
        if cells and cells["clip"] in wanted:
            try:
                told = float(cells["duration[ms]"]) / 1000
            except ValueError:
                told = math.nan
            if not math.isfinite(told):
                problem = f"{cells['duration[ms]']!r} is not a number"
                raise UserError(problem, path=path, line=line)
            if told > 0:
                seconds[cells["clip"]] = told
    return seconds


@contextmanager
def _mapped(clips: list[str], jobs: int) -> Iterator[Iterator[float | str]]:
    """`length_of` every clip, in their order, by as many processes as are of use."""
    jobs = min(jobs, 1 + len(clips) // _CLIPS_EACH)
    if jobs == 1:
        yield map(length_of, clips)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _end_with_parent) as pool:
        try:
            yield pool.map(length_of, clips, chunksize=50)
        except BrokenProcessPool:
            raise UserError("a process that opens clips was killed", remedy="lower --nj") from None
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when the one that began it is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
