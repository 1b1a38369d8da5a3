"""How the fuzzer calls a parser of untrusted documents, and how it tells apart the ways in which that ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.base.digests import digest
from atoll.base.errors import AtollError


class Parser(NamedTuple):
    """seeds: documents that are accepted.  refuses: what `read` may raise."""

    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...] = (AtollError,)


Made = Callable[[Path], Parser]
"""Makes a parser that may write in a folder."""


def of_file(name: str, seeds: Sequence[bytes], read: Callable[[Path], object]) -> Made:
    """One that reads a file of a name."""

    def parser(folder: Path) -> Parser:
        path = folder / name

        def read_content(content: bytes) -> object:
            path.write_bytes(content)
            return read(path)

        return Parser(seeds, read_content)

    return parser


def of_text(read: Callable[[str], object], *seeds: str) -> Made:
    """One that reads text, of bytes that may be no UTF-8."""
    return lambda _: Parser(
        [seed.encode() for seed in seeds], lambda content: read(content.decode("utf-8", errors="replace"))
    )


def sealed(body: bytes) -> bytes:
    """A document as `atoll.base.digests.seal` writes it, of a body that may be no JSON."""
    return b'{"content": ' + body + b', "digest": "' + digest(body).encode() + b'"}\n'


def end_of(parser: Parser, content: bytes) -> str:
    """Parse a document; returns "read", "refused", or the name and message of an undocumented exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            try:
                parser.read(content)
            except parser.refuses as error:
                str(error).encode()  # it can be printed
                return "refused"
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            return ascii(f"{type(error).__name__}: {error}")[1:300]
    return "read"
