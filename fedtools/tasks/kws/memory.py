"""Reuse of memory that tensors have freed."""

from __future__ import annotations

import ctypes

# mallopt's numbers in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER, _TOP_BYTES = 2**31 - 1, 64 << 20


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for later tensors, in the whole process.

    Otherwise the memory of a step's larger tensors goes back to the system and is requested again,
    which clears every page each time: features take three times as long, and the activations of a
    stack up to twice. The process stays as large as its largest step. Without glibc this does
    nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_TOP_PAD, _TOP_BYTES)
