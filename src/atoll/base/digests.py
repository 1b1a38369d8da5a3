"""Digests, which verify that the bytes read are the bytes written.

128-bit XXH3, the fastest of those measured (`benchmarks/integrity`). It detects flipped bytes, truncated files and
files of another folder. It is not a signature: whoever can write a file can also write its digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from atoll.base import documents

_Buffer: TypeAlias = bytes | bytearray | memoryview

ALGORITHM = "xxh3-128"

_HEAD, _MIDDLE, _END = b'{"content": ', b', "digest": "', b'"}\n'


class Digest:
    """Incremental digest of bytes that arrive in parts."""

    def __init__(self) -> None:
        self._inner = xxhash.xxh3_128()

    def update(self, part: _Buffer) -> None:
        """Add the next bytes."""
        self._inner.update(part)

    @property
    def value(self) -> str:
        """Digest of all bytes, as 32 hexadecimal digits."""
        return self._inner.hexdigest()


def digest(content: _Buffer) -> str:
    """Return the digest of `content`, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def seal(content: Mapping[str, Any]) -> bytes:
    """Return a JSON document of `content` and its digest. Raises TypeError or ValueError if JSON cannot express it."""
    body = json.dumps(content, allow_nan=False).encode()
    return _HEAD + body + _MIDDLE + digest(body).encode() + _END


def unseal(document: bytes) -> dict[str, Any]:
    """Return the content of a sealed document. Raises ValueError unless every byte of it is as `seal` writes an
    object."""
    end = len(document) - len(_END) - 32
    body = document[len(_HEAD) : end - len(_MIDDLE)]
    if document != _HEAD + body + _MIDDLE + digest(body).encode() + _END:
        raise ValueError("its content does not match its digest")
    content = documents.parse_json(body)
    if not isinstance(content, dict):
        raise ValueError(f"its content is a {type(content).__name__}, not an object")
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the content sealed in the file `path`. Raises OSError if it cannot be read, ValueError if its digest
    differs."""
    return unseal(documents.read(path, limit=documents.LARGEST_JSON))
