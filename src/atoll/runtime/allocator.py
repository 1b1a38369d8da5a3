"""The C library's allocator, which on the CPU stands where CUDA's caching allocator does.

Units, activations and gradients are made and given back many times a step. Left alone, glibc gives each large block
back to the system and takes it anew: most of a gather's time goes into page faults, and much of a loss's backward.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt`'s parameters in malloc.h."""

LARGEST_KEPT = 32 << 20
"""The largest block that glibc may be told to keep, on 64-bit systems."""


def keep_freed_memory() -> bool:
    """Have the process keep blocks of up to `LARGEST_KEPT` bytes that it frees; False where the C library can't."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    kept: int = library.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT)
    trimmed: int = library.mallopt(_TRIM_THRESHOLD, 0x7FFFFFFF)
    return bool(kept and trimmed)
