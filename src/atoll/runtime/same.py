"""Check that all ranks have the same software, config, plan and model, before any other communication.

Across machines these differ in practice: one of them has an older checkout, another driver, or lacks a file. Unchecked,
such ranks wait in different collectives, or train on different numbers.

Each rank writes its facts to the store, rank 0 compares them, and all raise the same error. Rank 0 reads one message
per rank and the others read one; large values are compared by digest. Everything is JSON.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import __version__
from atoll.base.digests import digest
from atoll.base.documents import parse_json
from atoll.base.errors import ConfigError
from atoll.runtime.verdict import named

if TYPE_CHECKING:
    from torch.distributed import Store

SOFTWARE = ("atoll", "atoll's source", "torch", "python", "transformers")
DIGEST = "#"
"""Prefix of a value that means nothing to a reader; an error only reports that it differs."""
SHOWN = 160
"""Maximum length of a value in an error."""
_LISTED = 6
"""Maximum number of differences in an error."""


def software() -> dict[str, str]:
    """Return the versions of a rank's software."""
    found = {"atoll": __version__, "atoll's source": _source()}
    found |= {name: str(sys.modules[name].__version__) for name in ("torch", "transformers") if name in sys.modules}
    return found | {"python": ".".join(platform.python_version_tuple()[:2])}


@cache
def _source() -> str:
    """Return a digest of the package's files, because two checkouts have the same version."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    return DIGEST + digest(b"".join(str(file.relative_to(root)).encode() + file.read_bytes() for file in files))


def check_same(store: Store, rank: int, world: int, facts: Mapping[str, str], *, advice: str) -> None:
    """Raise one ConfigError on every rank unless `facts` are equal on all; all ranks call it in the same order.

    advice: what to do if facts other than those of the software differ.
    """
    key = f"atoll/same/{store.add(f'atoll/same/{rank}', 1)}"
    shown = {name: value if len(value) <= SHOWN else DIGEST + digest(value.encode()) for name, value in facts.items()}
    store.set(f"{key}/{rank}", json.dumps(shown))
    if rank == 0:
        said = [parse_json(store.get(f"{key}/{other}")) for other in range(world)]
        store.set(f"{key}/found", json.dumps(describe_differences(said, advice=advice)))
    found = parse_json(store.get(f"{key}/found"))
    if found:
        raise ConfigError(str(found))


def describe_differences(said: Sequence[Mapping[str, str]], *, advice: str) -> str:
    """Return the differences between ranks, or an empty text. If the software differs, omit the others.

    A package that a rank has not loaded is not a difference: a rank loads only what it needs.
    """
    names = list(dict.fromkeys(name for each in said for name in each))
    split = [name for name in names if len({each.get(name) for each in said} - _unsaid(name)) > 1]
    if not split:
        return ""
    other = [name for name in split if name in SOFTWARE]
    advice = "install the same on every machine" if other else advice
    lines = [_line(name, said) for name in other or split]
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"and {len(lines) - _LISTED} more"]
    whole = "\n  ".join(["the ranks are not the same:", *lines])
    return f"{whole}\n{advice}" if len(lines) > 1 else f"the ranks are not the same: {lines[0]}; {advice}"


def _unsaid(name: str) -> set[str | None]:
    return {None} if name in SOFTWARE else set()


def _line(name: str, said: Sequence[Mapping[str, str]]) -> str:
    """Return `torch 2.12.0 on ranks 0 to 3, 2.13.0 on rank 4`."""
    holders: dict[str | None, list[int]] = {}
    for rank, each in enumerate(said):
        if each.get(name) not in _unsaid(name):
            holders.setdefault(each.get(name), []).append(rank)
    if any(value is None or value.startswith(DIGEST) for value in holders):
        first, *others = (named(ranks) for ranks in holders.values())
        return f"{name} differs between {first} and {' and '.join(others)}"
    values = ", ".join(f"{value} on {named(ranks)}" for value, ranks in holders.items())
    return f"{name} {values}"
