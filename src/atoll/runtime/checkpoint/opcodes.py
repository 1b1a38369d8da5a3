"""Bounds on the cost of reading a pickle, from its opcodes, before it is read.

Ten bytes can make the unpickler allocate gigabytes, for the place of one object in its memo; sixty can make it hash
for hours, if a key is a tuple of two tuples of two tuples. Distributed Checkpoint never writes such opcodes. Only its
opcodes are allowed here, memo places must be in order, and a tuple holds a bounded number of objects.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterable
from typing import Any

from atoll.base.errors import DamageError

LARGEST_TUPLE = 1 << 16
"""Maximum number of objects in a tuple, including those of nested tuples, each counted as often as it occurs."""

_NOTHING = frozenset({"PROTO", "FRAME", "STOP"})
_ONE = frozenset(
    {
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"),
        *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "GLOBAL"),
    }
)
_JOINED = {"STACK_GLOBAL": 2, "REDUCE": 2, "NEWOBJ": 2}
"""Opcodes that combine so many objects into one, without hashing its contents."""
_TAKEN = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
"""Opcodes that add so many objects to the one below."""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def check_opcodes(content: bytes) -> None:
    """Raise DamageError for a pickle that would take more time or memory than its length explains."""
    stack: list[int] = []  # for each object, the number of objects that its hash visits
    marks: list[int] = []
    memo: list[int] = []
    operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(content)
    for opcode, argument, position in operations:
        name = opcode.name
        if name in _ONE:
            stack.append(1)
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [_tuple(stack[-_TUPLES[name] :], position)]
        elif name == "TUPLE":
            start = marks.pop()
            stack[start:] = [_tuple(stack[start:], position)]
        elif name in _JOINED:
            stack[-_JOINED[name] :] = [1]
        elif name in _TAKEN:
            del stack[-_TAKEN[name] :]
        elif name in ("APPENDS", "SETITEMS"):
            del stack[marks.pop() :]
        elif name in ("BINPUT", "LONG_BINPUT"):
            if argument != len(memo):
                raise DamageError(
                    f"memo place {argument} after {len(memo)} at byte {position}: no checkpoint skips any"
                )
            memo.append(stack[-1])
        elif name not in _NOTHING:
            raise DamageError(f"the opcode {name} at byte {position}, which no checkpoint needs: it was not loaded")


def _tuple(members: list[int], position: int | None) -> int:
    found = 1 + sum(members)
    if found > LARGEST_TUPLE:
        raise DamageError(f"a tuple of more than {LARGEST_TUPLE} objects at byte {position}: it was not loaded")
    return found
