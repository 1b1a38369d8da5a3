"""External documents (JSON, TOML, YAML) of bounded size and depth. A document beyond the bounds raises ValueError.

A document within the bounds can be walked by recursive functions, printed, and converted to floats. Its reader
checks the contents.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LARGEST_JSON = 1 << 30
"""Largest JSON document that is read, in bytes."""
LARGEST_TOML = 16 << 20
"""Largest TOML document that is read, in bytes."""
LARGEST_STREAM = 64 << 20
"""Largest stream that is read, such as a pipe, whose size is not known in advance. In bytes."""
LARGEST_YAML = 1 << 16
"""Largest YAML document that is read, in characters; a megabyte takes many seconds."""
DEEPEST = 100
"""Largest depth of nested tables and lists."""
_LONGEST_INTEGER = 40
"""Most digits of an integer that is rounded."""
LARGEST_COUNT = (1 << 31) - 1
"""Largest count of ranks, stages or steps."""
LARGEST_BYTES = (1 << 63) - 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
INTEGERS = range(-(1 << 63), 1 << 64)
"""Signed and unsigned 64-bit integers."""


def read_json(path: str | Path, *, limit: int = LARGEST_JSON, rounds: bool = False) -> Any:
    """Return the value of the JSON document at `path`. Raises OSError, and the errors of `parse_json`."""
    return parse_json(read(path, limit=limit), limit=limit, rounds=rounds)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of the TOML document at `path`. Raises OSError, and the errors of `parse_toml`."""
    return parse_toml(read_text(path, limit=LARGEST_TOML))


def read_text(path: str | Path, *, limit: int) -> str:
    """Return the text of a file of at most `limit` bytes, without a byte order mark.

    Raises OSError, or ValueError for a larger file or invalid UTF-8.
    """
    return read(path, limit=limit).decode("utf-8-sig").replace("\r\n", "\n")


def read(path: str | Path, *, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes. Raises OSError, or ValueError for a larger file."""
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


def parse_json(document: str | bytes, *, limit: int = LARGEST_JSON, rounds: bool = False) -> Any:
    """Return the value of a JSON document. Half of a surrogate pair, which has no encoding, becomes "?".

    rounds: integers of more than 64 bits, and of at most `_LONGEST_INTEGER` digits, become floats. Tokenizers write
    int(1e30) for "no limit".

    Raises ValueError if the document is not JSON, is larger than `limit`, is nested too deeply, or has an integer of
    more than 64 bits.
    """
    if len(document) > limit:
        raise ValueError(f"{len(document)} bytes of JSON; at most {limit} are read")
    text = document if isinstance(document, str) else document.decode("utf-8-sig")
    try:
        value = json.loads(text, parse_int=_number if rounds else _integer)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    if _SURROGATE.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises ValueError if the document is not TOML, is larger than `LARGEST_TOML`, is nested too deeply, or has an
    integer of more than 64 bits.
    """
    if len(text) > LARGEST_TOML:
        raise ValueError(f"{len(text)} characters of TOML; at most {LARGEST_TOML} are read")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    _check_depth(tables)
    _check_integers(tables)
    return tables


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document of plain values.

    Raises ValueError if the document is not YAML, is larger than `LARGEST_YAML`, is nested too deeply, or refers to
    parts of itself, and ImportError without PyYAML.
    """
    import yaml

    if len(text) > LARGEST_YAML:
        raise ValueError(f"{len(text)} characters of YAML; at most {LARGEST_YAML} are read")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_tokens(yaml.scan(text, loader))
        value = yaml.load(text, loader)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also invalid dates and numbers
        raise ValueError(str(error)) from error
    except RecursionError:
        raise _too_deep() from None
    _check_depth(value)
    _check_integers(value)
    if not _has_words(value):
        raise ValueError("a key that is not a string")
    return value


def _check_tokens(tokens: Iterable[Any]) -> None:
    """Raise ValueError for a document that must not be loaded.

    A document with references to itself may expand to far more than its size, and libyaml's loader recurses in C
    without a limit: 60,000 brackets end the process.
    """
    depth = 0
    for token in tokens:
        name = type(token).__name__
        if name in {"AnchorToken", "AliasToken"}:
            raise ValueError("anchors and aliases are not read; write the values out")
        depth += name.endswith(("SequenceStartToken", "MappingStartToken"))
        depth -= name.endswith(("SequenceEndToken", "MappingEndToken", "BlockEndToken"))
        if depth > DEEPEST:
            raise _too_deep()


def finite(value: Any) -> float:
    """Return a finite number of a document. Raises ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{_shown(value)} is not a finite number")
    return float(value)


def whole_number(value: Any, *, least: int = 0, limit: int = LARGEST_COUNT) -> int:
    """Return a whole number of a document from `least` to `limit`. Raises ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
        raise ValueError(f"{_shown(value)} is not a whole number from {least} to {limit}")
    return value


def string(value: Any) -> str:
    """Return a string of a document. Raises ValueError for any other value."""
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is no string")
    return value


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _number(digits: str) -> int | float:
    """Return an integer of 64 bits, or a float near a larger one."""
    is_large = len(digits) > 20 or int(digits) not in INTEGERS
    return float(digits) if is_large and len(digits) <= _LONGEST_INTEGER else _integer(digits)


def _integer(digits: str) -> int:
    value = int(digits) if len(digits) <= 20 else None
    if value is None or value not in INTEGERS:
        raise ValueError(f"an integer of {len(digits)} digits; only 64-bit integers are supported")
    return value


def _check_integers(value: Any) -> None:
    """Raise ValueError for large integers. Python parses hexadecimal ones of any size, and then cannot print them."""
    for leaf in _leaves(value):
        if isinstance(leaf, int) and leaf not in INTEGERS:
            raise ValueError(f"an integer of {leaf.bit_length()} bits; only 64-bit integers are supported")


def _check_depth(value: Any) -> None:
    """Check the depth level by level: a recursive function would need as much depth as the document has."""
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


def _has_words(value: Any) -> bool:
    """Return True if all keys are strings. YAML allows any type."""
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return False
    return not isinstance(value, (dict, list)) or all(map(_has_words, _children(value)))


def _children(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _too_deep() -> ValueError:
    return ValueError(f"nested too deeply; at most {DEEPEST} levels are read")
