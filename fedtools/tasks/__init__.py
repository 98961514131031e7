"""What a federation can learn: one folder for each task.

`fedtools/tasks/kws/` registers "kws"; nothing else has to know of it. Nothing that is imported here
imports torch: that takes seconds, and a rerun of a grid of finished experiments only asks each
whether there is anything left to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedtools.files.registry import Registry

if TYPE_CHECKING:
    from fedtools.tasks.facts import Facts

TASKS: Registry[Facts] = Registry(__name__, "task")


def facts_of(name: object, where: str | Path) -> Facts:
    """What is known of the task of a name; a `UserError` tells the known ones."""
    return TASKS.get(name, where)
