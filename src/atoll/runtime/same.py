"""Check that all ranks have the same software, config, plan and model, before any other communication.

Across machines these differ in practice: one of them has an older checkout, another driver, a file that was not copied.
Without a word beforehand such ranks wait in different collectives, or train on different numbers.

Each rank leaves what it has in the store, rank 0 compares, and all raise the same error. Rank 0 reads one message of
each rank and the others read one; what is large is compared by its digest. Everything is JSON.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import atoll
from atoll.digests import digest
from atoll.documents import parse_json
from atoll.errors import ConfigError
from atoll.runtime.verdict import named

if TYPE_CHECKING:
    from torch.distributed import Store

SOFTWARE = ("atoll", "atoll's source", "torch", "python", "transformers")
DIGEST = "#"
"""Begins a value that is no use to a reader: all that is said of it is that it differs."""
SHOWN = 160
"""The longest value that is shown."""
LISTED = 6
"""Differences that an error lists."""


def software() -> dict[str, str]:
    """Versions of what a rank runs."""
    found = {"atoll": atoll.__version__, "atoll's source": _source()}
    found |= {name: str(sys.modules[name].__version__) for name in ("torch", "transformers") if name in sys.modules}
    return found | {"python": ".".join(platform.python_version_tuple()[:2])}


@cache
def _source() -> str:
    """A digest of the package's files: two checkouts have the same version."""
    root = Path(atoll.__file__).parent
    files = sorted(root.rglob("*.py"))
    return DIGEST + digest(b"".join(str(file.relative_to(root)).encode() + file.read_bytes() for file in files))


def check_same(store: Store, rank: int, world: int, facts: Mapping[str, str], *, advice: str) -> None:
    """Raise one ConfigError on every rank unless `facts` are the same on all; all ranks call it in one order.

    advice: what to do where others than those of the software differ.
    """
    key = f"atoll/same/{store.add(f'atoll/same/{rank}', 1)}"
    shown = {name: value if len(value) <= SHOWN else DIGEST + digest(value.encode()) for name, value in facts.items()}
    store.set(f"{key}/{rank}", json.dumps(shown))
    if rank == 0:
        said = [parse_json(store.get(f"{key}/{other}")) for other in range(world)]
        store.set(f"{key}/found", json.dumps(difference(said, advice=advice)))
    found = parse_json(store.get(f"{key}/found"))
    if found:
        raise ConfigError(str(found))


def difference(said: Sequence[Mapping[str, str]], *, advice: str) -> str:
    """Return the differences between ranks, or an empty text. If the software differs, omit the rest.

    A package that a rank has not loaded is no difference: a rank loads what its own part needs.
    """
    names = list(dict.fromkeys(name for each in said for name in each))
    split = [name for name in names if len({each.get(name) for each in said} - _unsaid(name)) > 1]
    if not split:
        return ""
    other = [name for name in split if name in SOFTWARE]
    advice = "install the same on every machine" if other else advice
    lines = [_line(name, said) for name in other or split]
    if len(lines) > LISTED:
        lines[LISTED:] = [f"and {len(lines) - LISTED} more"]
    whole = "\n  ".join(["the ranks are not the same:", *lines])
    return f"{whole}\n{advice}" if len(lines) > 1 else f"the ranks are not the same: {lines[0]}; {advice}"


def _unsaid(name: str) -> set[str | None]:
    return {None} if name in SOFTWARE else set()


def _line(name: str, said: Sequence[Mapping[str, str]]) -> str:
    """`torch 2.12.0 on ranks 0 to 3, 2.13.0 on rank 4`."""
    holders: dict[str | None, list[int]] = {}
    for rank, each in enumerate(said):
        if each.get(name) not in _unsaid(name):
            holders.setdefault(each.get(name), []).append(rank)
    if any(value is None or value.startswith(DIGEST) for value in holders):
        first, *others = (named(ranks) for ranks in holders.values())
        return f"{name} differs between {first} and {' and '.join(others)}"
    values = ", ".join(f"{value} on {named(ranks)}" for value, ranks in holders.items())
    return f"{name} {values}"
