"""Settings of the C library's allocator, which takes the role of CUDA's caching allocator on the CPU.

Units, activations and gradients are allocated and freed many times a step. By default, glibc returns each large block
to the system and requests it again: page faults then take most of a gather's time, and much of a loss's backward.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of `mallopt` in malloc.h."""

LARGEST_KEPT = 32 << 20
"""Largest block that glibc can be told to keep, on 64-bit systems."""


def keep_freed_memory() -> bool:
    """Make the process keep freed blocks of up to `LARGEST_KEPT` bytes. Return False if the C library cannot.

    Memory that other code of the process frees stays with it as well.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    kept: int = library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
    trimmed: int = library.mallopt(_TRIM_THRESHOLD, 0x7FFFFFFF)
    return bool(kept and trimmed)
