"""Raw results as text: a line for each key, and for each row of a list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

WIDE = 120
"""Characters of a mapping that still stands on one line."""


def to_text(raw: Any) -> str:
    """JSON that `json.loads` reads as the same value; a difference of two files shows the rows that changed."""
    return "\n".join(_lines(raw, "")) + "\n"


def _lines(value: Any, indent: str) -> Iterator[str]:
    plain = json.dumps(value)
    if isinstance(value, dict) and value and (len(plain) > WIDE or not indent):
        yield "{"
        last = len(value) - 1
        for at, (key, each) in enumerate(value.items()):
            first, *more = _lines(each, f"{indent} ")
            held = [f"{indent} {json.dumps(key)}: {first}", *more]
            held[-1] += "," if at < last else ""
            yield from held
        yield f"{indent}}}"
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value) and len(plain) > WIDE:
        yield "["
        last = len(value) - 1
        for at, each in enumerate(value):
            yield f"{indent} {json.dumps(each)}{',' if at < last else ''}"
        yield f"{indent}]"
    else:
        yield plain
