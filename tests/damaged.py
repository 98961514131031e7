"""Damage to one file, by `soak/mutate.py`, for a property that every format has.

A damaged file is refused in one line that names it, or it is read as what it then says.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from commands import ROOT
from hypothesis import strategies as st

from fedtools.core.errors import UserError

sys.path.append(str(ROOT / "tests" / "soak"))
from mutate import mutate

T = TypeVar("T")
SEEDS = st.integers(0, (1 << 32) - 1)
"""One for each damage: other files give other damage for the same seed."""


def damage(path: Path, seed: int, *others: Path) -> str:
    """Damage a file, whose content may become another's, and return a description."""
    return mutate(path, random.Random(seed), [path, *others])


def read_or_refused(read: Callable[[], T], place: Path) -> T | None:
    """Return what is read; None if it is refused in one line that names a file in `place`."""
    try:
        return read()
    except UserError as error:
        said = str(error)
        assert said.startswith(str(place)) and said.isprintable() and len(said) < 1000, said
        return None
