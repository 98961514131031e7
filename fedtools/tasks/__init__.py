"""Tasks that a federation can learn, one folder for each.

`fedtools/tasks/kws/` registers "kws"; nothing else needs to know about it. A task has its data,
batches, losses and measures; networks are in `models`, and the federation asks a task and never
looks into it. Nothing imported here imports torch, which takes seconds: a rerun of a grid of
finished experiments only checks whether each has anything left to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.core.registry import Registry

if TYPE_CHECKING:
    from fedtools.tasks.facts import Facts

TASKS: Registry[Facts] = Registry(__name__, "task")


def facts_of(name: object, where: str | Path) -> Facts:
    """Return the facts of a named task; raise a `UserError` that lists the known tasks."""
    return TASKS.get(name, where)
