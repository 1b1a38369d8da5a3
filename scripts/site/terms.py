"""Docstrings explain a name on a line that begins with it: `clip: largest global gradient norm`. As Markdown such lines
would run together, so the reference shows them as a list.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

TERM = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): +(?=\S)")
INLINE = re.compile(r"(?<=[.;])  (?=[a-z_]\w*: )")
"""Several names on one line are two spaces apart."""


class Terms(Extension):
    """Makes lists of the names that docstrings explain."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """The docstring, with each explained name as an item of a list."""
    lines: list[str] = []
    is_inside = False
    for line in INLINE.sub("\n", text).splitlines():
        if found := TERM.match(line):
            if not is_inside:
                lines.append("")
            lines.append(f"- `{found[1]}`: {line[found.end() :]}")
            is_inside = True
        else:
            is_inside = is_inside and bool(line.strip())
            lines.append(f"    {line.strip()}" if is_inside else line)
    return "\n".join(lines)
