"""What becomes of memory that tensors no longer need."""

from __future__ import annotations

import ctypes

# mallopt's numbers in glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_NEVER, _TOP_BYTES = 2**31 - 1, 64 << 20


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensor, for all of this process.

    A step's larger tensors are otherwise given back to the system and asked for again, which
    clears every page each time: features take three times as long, and the activations of a stack
    up to twice. The process stays as large as its largest step. Elsewhere than with glibc it
    does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_TOP_PAD, _TOP_BYTES)
