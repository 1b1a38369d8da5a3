"""Changes of a document that keep most of it: bytes, numbers, words, lines, and values of a JSON document."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

LARGEST = 1 << 16
"""Bytes up to which a document grows."""
VALUES: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 10**12, 10**18, 10**30, 10**400, 0.5, 1e-300, 1e308, float("inf"), float("nan"), True, None,
    "", "\ud800", "\0", "../../etc/passwd", "a" * 5000, "9" * 5000, [], {}, [[]], [None], {"": {}}, [1, [2, [3, [4]]]],
)  # fmt: skip
NUMBERS = (
    b"-1", b"0", b"1", b"65536", b"999999", b"99999999", b"1000000000000000000", b"9" * 30, b"9" * 5000, b"1e308",
    b"1e-300", b"1e999", b"nan", b"inf", b"0x" + b"F" * 5000, "\u0663".encode(),
)  # fmt: skip
WORDS = (
    b"\r", b"\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b'"', b"[", b"{", b"}", b"]", b"=", b",", b".", b"#",
    b"true", b"null", b"[[a]]\n", b"'''", b'"""', b"\\", b"-", "\u2028".encode(),
)  # fmt: skip

_NUMBER = re.compile(rb"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def change(content: bytes, chance: random.Random) -> bytes:
    """A changed document, in one to four places."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        content = chance.choice(CHANGES)(content, chance)[:LARGEST]
    return content


def _flip(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return content
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _part(content: bytes, chance: random.Random) -> tuple[int, int]:
    begin = chance.randint(0, len(content))
    return begin, min(len(content), begin + chance.choice((1, 4, 16, 64, 1024)))


def _cut(content: bytes, chance: random.Random) -> bytes:
    begin, end = _part(content, chance)
    return content[:begin] + content[end:]


def _repeat(content: bytes, chance: random.Random) -> bytes:
    begin, end = _part(content, chance)
    times = chance.choice((2, 3, 100, 10_000))
    return content[:begin] + content[begin:end] * min(times, LARGEST // max(1, end - begin)) + content[end:]


def _insert(content: bytes, chance: random.Random) -> bytes:
    at = chance.randint(0, len(content))
    word = chance.choice(WORDS) * chance.choice((1, 1, 1, 2, 1000, 50_000))
    return content[:at] + word[:LARGEST] + content[at:]


def _number(content: bytes, chance: random.Random) -> bytes:
    found = list(_NUMBER.finditer(content))
    if not found:
        return content
    where = chance.choice(found)
    return content[: where.start()] + chance.choice(NUMBERS) + content[where.end() :]


def _lines(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _value(content: bytes, chance: random.Random) -> bytes:
    """Another value, or another key, somewhere in a JSON document."""
    try:
        document = json.loads(content)
        places = list(_places(document))
    except (ValueError, RecursionError):
        return _number(content, chance)
    if not places:
        return json.dumps(chance.choice(VALUES)).encode()
    where, key = chance.choice(places)
    if chance.random() < 0.2:
        if isinstance(where, dict):
            where[chance.choice(("", "other", "\ud800", *where))] = where.pop(key)
        else:
            where.insert(key, where[key])
    else:
        where[key] = chance.choice((*VALUES, *(each[at] for each, at in places[:20])))
    try:
        return json.dumps(document).encode()
    except (ValueError, RecursionError):  # a value within itself, or an integer that cannot be printed
        return content


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip, _cut, _repeat, _insert, _number, _lines, _value, _value, _value,
)  # fmt: skip
