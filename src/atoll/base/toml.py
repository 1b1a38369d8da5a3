"""Plain values -> TOML text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return TOML text with one `[table]` per entry, none for the name "". Keys without a value (None) are left out."""
    parts = []
    for name, table in tables.items():
        lines = [f"{key} = {value_to_toml(value)}" for key, value in table.items() if value is not None]
        parts.append("\n".join([*([f"[{name}]"] if name else []), *lines]) + "\n")
    return "\n".join(parts)


def nested_to_toml(tables: Mapping[str, Any]) -> str:
    """Return TOML text of tables within tables, to any depth: one `[table]` with a dotted name for each with its own
    values.

    A table precedes those within it.
    """
    flat: dict[str, dict[str, Any]] = {}
    _flatten(tables, (), flat)
    return to_toml(flat)


def _flatten(tables: Mapping[str, Any], path: tuple[str, ...], into: dict[str, dict[str, Any]]) -> None:
    own = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    if own:
        into[".".join(path)] = own
    for key, value in tables.items():
        if isinstance(value, Mapping):
            _flatten(value, (*path, key), into)


def value_to_toml(value: bool | int | float | str | list[Any] | tuple[Any, ...] | Mapping[str, Any]) -> str:
    """Return one value as TOML; a table is written in one line."""
    if isinstance(value, Mapping):
        known = {key: item for key, item in value.items() if item is not None}
        items = ", ".join(f"{json.dumps(key)} = {value_to_toml(item)}" for key, item in known.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(value_to_toml(item) for item in value)}]"
    if isinstance(value, str):
        # JSON escapes the same characters in the same way, except DEL, which TOML does not allow bare.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return _in_lines(text) if "\n" in value else text
    return repr(value)


def _in_lines(text: str) -> str:
    """Return a string of one line as several lines; TOML drops the first line break."""
    parts = text.split("\\\\")  # an escape is one unit
    return '""' + "\\\\".join(part.replace("\\n", "\n") for part in parts).replace('"', '"\n', 1) + '""'
