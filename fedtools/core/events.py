"""Scalars for TensorBoard: `tensorboard --logdir EXP/tensorboard` shows them by round."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from fedtools.core.atomic import atomic_path

_PREFIX = "events.out.tfevents."


def write_scalars(folder: str | Path, part: str, step: int, scalars: Mapping[str, float]) -> None:
    """Write the scalars of one step to their own event file.

    A repeated step replaces its file, so that a killed run leaves no duplicate points.

    Args:
        folder: the log directory of TensorBoard.
        part: distinguishes files of the same step, such as "train" and "valid".
        step: the round.
        scalars: tag -> value.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    now = time.time()
    # TensorBoard reads the files of a folder in the order of their names.
    path = Path(folder) / part / f"{_PREFIX}{step:08d}"
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        event = Event(wall_time=now, step=step, summary=Summary(value=values))
        writer.write(event.SerializeToString())


def step_of(path: Path) -> int | None:
    """Return the step of a file of `write_scalars`, or None for other files."""
    found = re.fullmatch(rf"{re.escape(_PREFIX)}(\d{{8,9}})", path.name, re.ASCII)
    return int(found[1]) if found else None
