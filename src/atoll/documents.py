"""Documents that come from outside, JSON and TOML: of a bounded size and depth, or one ValueError.

What is within the bounds can be walked by recursive functions, printed, and turned into floats. Whether it says what
its reader expects is for the reader to check.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LARGEST_JSON = 1 << 30
"""Bytes of the largest JSON document that is read."""
LARGEST_TOML = 16 << 20
"""Bytes of the largest TOML document that is read."""
LARGEST_STREAM = 64 << 20
"""Bytes that are read of what is no file, such as a pipe, whose size is not known beforehand."""
DEEPEST = 100
"""Tables and lists within each other."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
INTEGERS = range(-(1 << 63), 1 << 64)
"""Those of 64 bits, with a sign or without."""


def read_json(path: str | Path, *, limit: int = LARGEST_JSON) -> Any:
    """The value of the JSON document at `path`. Raises OSError where it cannot be read, and what `parse_json` does."""
    return parse_json(read(path, limit=limit), limit=limit)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of the TOML document at `path`. Raises OSError where it cannot be read, and what `parse_toml` does."""
    return parse_toml(read_text(path, limit=LARGEST_TOML))


def read_text(path: str | Path, *, limit: int) -> str:
    """The text of a file of at most `limit` bytes. Raises OSError, or ValueError for a larger one or no UTF-8."""
    return read(path, limit=limit).decode("utf-8").replace("\r\n", "\n")


def read(path: str | Path, *, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises OSError, or ValueError for a larger one."""
    with Path(path).open("rb") as file:
        about = os.fstat(file.fileno())
        if stat.S_ISREG(about.st_mode) and about.st_size <= limit:
            return file.read()
        size = about.st_size
        if not stat.S_ISREG(about.st_mode):
            limit = min(limit, LARGEST_STREAM)
            content = file.read(limit + 1)
            if len(content) <= limit:
                return content
            size = len(content)
    raise ValueError(f"it has {size} bytes or more; at most {limit} are read")


def parse_json(document: str | bytes, *, limit: int = LARGEST_JSON) -> Any:
    """The value of a JSON document. Half of a surrogate pair, which no encoding of text has, becomes a "?".

    Raises ValueError for one that is not JSON, is larger than `limit`, is nested too deeply, or has an integer of more
    than 64 bits.
    """
    if len(document) > limit:
        raise ValueError(f"{len(document)} bytes of JSON; at most {limit} are read")
    text = document if isinstance(document, str) else document.decode("utf-8-sig")
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _SURROGATE.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML document.

    Raises ValueError for one that is not TOML, is larger than `LARGEST_TOML`, is nested too deeply, or has an integer
    of more than 64 bits.
    """
    if len(text) > LARGEST_TOML:
        raise ValueError(f"{len(text)} characters of TOML; at most {LARGEST_TOML} are read")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(tables)
    # Hexadecimal ones have no limit in Python, and then cannot be printed.
    for value in _leaves(tables):
        if isinstance(value, int) and value not in INTEGERS:
            raise ValueError(f"an integer of {value.bit_length()} bits; TOML has those of 64")
    return tables


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else None
    if value is None or value not in INTEGERS:
        raise ValueError(f"an integer of {len(digits)} digits; those of 64 bits are read")
    return value


def _check_depth(value: Any) -> None:
    """Level by level: a function that calls itself would need the depth that is to be found out."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST):
        level = [child for each in level for child in _children(each) if isinstance(child, (dict, list))]
    if level:
        raise _too_deep()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)):
        for child in _children(value):
            yield from _leaves(child)
    else:
        yield value


def _children(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _too_deep() -> ValueError:
    return ValueError(f"nested too deeply; at most {DEEPEST} levels are read")
