"""SplitMix64, shared by several test files."""

from __future__ import annotations

import hashlib
import json

MASK = 2**64 - 1


def split_mix(seed: int, round: int, total: int) -> list[int]:
    """Return the random numbers of a round's clients, by SplitMix64 as in its authors' C code."""
    digest = hashlib.sha256(json.dumps([seed, "sample", round]).encode()).digest()
    state, numbers = int.from_bytes(digest[:8], "big"), []
    for _ in range(total):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
    return numbers
