"""Ports of this machine that nobody else gets while a test uses them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_ports(names: str) -> Iterator[dict[str, int]]:
    """Yield a port for each name: bound and not listening, so that an island can listen there at any time."""
    held = [socket.socket() for _ in names]
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("127.0.0.1", 0))
    try:
        yield {name: each.getsockname()[1] for name, each in zip(names, held, strict=True)}
    finally:
        for each in held:
            each.close()
