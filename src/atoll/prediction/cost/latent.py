"""Attention whose queries, keys and values come from latent vectors (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Sizes of the latent vectors.

    queries: of the queries' vector; 0 if they are not compressed.  keys: of that of keys and values.  rotary: elements
    of a key that positions rotate, which all heads share.  values: elements of a head's values.
    """

    queries: int
    keys: int
    rotary: int
    values: int

    def linear(self, hidden: int, heads: int, width: int) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of the linear layers. width: of a head's queries and keys."""
        queries = heads * width
        first = {"queries' latent": (hidden, self.queries), "queries": (self.queries, queries)}
        return {
            **(first if self.queries else {"queries": (hidden, queries)}),
            "keys' latent": (hidden, self.keys + self.rotary),
            "keys and values": (self.keys, heads * (width - self.rotary + self.values)),
            "out": (heads * self.values, hidden),
        }

    @property
    def norms(self) -> int:
        """Elements of the latent vectors, which are normalized."""
        return self.queries + self.keys

    @property
    def normalized(self) -> Iterator[tuple[str, int]]:
        """The latent vectors by name, with their elements."""
        if self.queries:
            yield "queries' latent", self.queries
        yield "keys' latent", self.keys
