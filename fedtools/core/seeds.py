"""Random numbers keyed by their use alone: (seed, round, client, purpose).

A global stream would make a client's numbers depend on which clients came before it in the same
process; a key gives the same numbers for any number of jobs, and after a kill and a rerun.
"""

from __future__ import annotations

import hashlib
import json
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy


def seed64(seed: int, *key: str | int) -> int:
    """Return a seed in [0, 2**64) for a key, as `torch.Generator.manual_seed` takes it.

    Args:
        seed: the seed of the whole experiment.
        key: strings and integers, such as the round, the client and the purpose; 1 and "1", and
            ("a", "b") and ("ab",), are different keys.

    Raises:
        TypeError: if a part of the key is neither a string nor an integer.
    """
    return int.from_bytes(_digest(seed, key)[:8], "big")


def generator(seed: int, *key: str | int) -> numpy.random.Generator:
    """Return a new numpy generator for a key; arguments and errors as in `seed64`."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(seed, key), "big")))


def _digest(seed: int, key: tuple[str | int, ...]) -> bytes:
    parts = [part if isinstance(part, str) else operator.index(part) for part in (seed, *key)]
    # JSON quotes strings and separates parts, so that no two keys have the same text.
    return hashlib.sha256(json.dumps(parts).encode("ascii")).digest()
