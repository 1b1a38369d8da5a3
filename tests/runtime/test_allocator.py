"""What glibc keeps, asked of glibc."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, sys
from atoll.runtime.allocator import LARGEST_KEPT, keep_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
library.mallinfo2.restype = Info

def is_mapped(nbytes):
    before = library.mallinfo2().hblks
    block = library.malloc(nbytes)
    found = library.mallinfo2().hblks > before
    library.free(block)
    return found

def kept(nbytes):
    block = library.malloc(nbytes)
    held = library.mallinfo2().arena
    library.free(block)
    return library.mallinfo2().arena == held

sizes = [1 << 20, LARGEST_KEPT - (1 << 20), LARGEST_KEPT + (1 << 20)]
if sys.argv[1] == "kept":
    assert keep_freed_memory()
print(json.dumps([LARGEST_KEPT >> 20, [is_mapped(size) for size in sizes], kept(sizes[1])]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not a glibc of 2021 or later")
@pytest.mark.parametrize(("manner", "mapped"), [("left", True), ("kept", False)])
def test_blocks_of_up_to_32_mib_stay_with_the_process(manner: str, mapped: bool) -> None:
    """Left alone, glibc maps the first large block by itself. What it has freed since moves its threshold."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, manner], capture_output=True, text=True, check=True)
    largest_mib, mappings, _ = json.loads(done.stdout)
    assert largest_mib == 32
    assert mappings[0] == mapped
    if manner == "kept":
        assert json.loads(done.stdout)[1:] == [[False, False, True], True]
