"""Digests: whether the bytes that are read are the bytes that were written.

XXH3 of 128 bits, the fastest of those measured (`benchmarks/integrity`): flipped bytes, lost ends and files of another
folder are found. It is no signature: whoever can write a file can also write its digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from atoll import documents

Buffer: TypeAlias = bytes | bytearray | memoryview

ALGORITHM = "xxh3-128"

_HEAD, _MIDDLE, _END = b'{"content": ', b', "digest": "', b'"}\n'


class Digest:
    """A digest of bytes that come in parts."""

    def __init__(self) -> None:
        self._inner = xxhash.xxh3_128()

    def update(self, part: Buffer) -> None:
        """Add the bytes that follow."""
        self._inner.update(part)

    @property
    def value(self) -> str:
        """32 hexadecimal digits."""
        return self._inner.hexdigest()


def digest(content: Buffer) -> str:
    """The digest of `content`, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def seal(content: Mapping[str, Any]) -> bytes:
    """A JSON document of `content` and its digest. Raises TypeError or ValueError for what JSON cannot express."""
    body = json.dumps(content, allow_nan=False).encode()
    return _HEAD + body + _MIDDLE + digest(body).encode() + _END


def unseal(document: bytes) -> dict[str, Any]:
    """What `seal` was given. Raises ValueError unless every byte of the document is as `seal` writes an object."""
    end = len(document) - len(_END) - 32
    body = document[len(_HEAD) : end - len(_MIDDLE)]
    if document != _HEAD + body + _MIDDLE + digest(body).encode() + _END:
        raise ValueError("its content does not match its digest")
    content = documents.parse_json(body)
    if not isinstance(content, dict):
        raise ValueError(f"its content is a {type(content).__name__}, not an object")
    return content


def read_sealed(path: Path) -> dict[str, Any]:
    """What the file at `path` seals. Raises OSError if it cannot be read, ValueError if its digest does not match."""
    return unseal(documents.read(path, limit=documents.LARGEST_JSON))
