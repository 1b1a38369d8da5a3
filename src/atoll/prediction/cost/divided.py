"""Attention of parts of sequences: the heads that a rank computes, the exchange of heads for positions, and what slices
keep.

over: ranks of a tensor-parallel group that divide the heads, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.prediction.cost.kernels import Exchange, Kernel, Pass
from atoll.prediction.cost.work import Saved, Use

if TYPE_CHECKING:
    from atoll.prediction.cost.transformer import Transformer

HEAD_EXCHANGES = 2
"""Exchanges of heads for positions in an attention's forward."""


def own_heads(sizes: Transformer, use: Use, over: int) -> int:
    """Return the heads of all samples whose scores a rank computes."""
    return use.samples * sizes.heads // (over * use.divide)


def repeats(sizes: Transformer, use: Use, over: int) -> int:
    """Return how often keys and values are repeated, so that each rank that divides sequences has some."""
    groups = (sizes.kv_heads or sizes.heads) // over
    return math.lcm(groups, use.divide) // groups


def exchanged(sizes: Transformer, use: Use, over: int, *, is_back: bool = False) -> Iterator[Kernel]:
    """Return an exchange before attention or behind it (`is_back`), with copies into messages and out of them."""
    if use.divide == 1:
        return
    tensors = 1 if is_back else 3
    width = sizes.attended if is_back else sizes.queries + (sizes.keys + sizes.values) * repeats(sizes, use, over)
    nbytes = use.item * use.tokens * width / over
    yield Pass(2.0 * nbytes, tensors)
    yield Exchange("all-to-all", nbytes, "sequence")
    yield Pass(2.0 * nbytes, use.divide * tensors)


def kept_width(sizes: Transformer, use: Use, over: int) -> int:
    """Return the elements of keys and values of a position that a rank keeps for later slices: of its heads, as often
    as they are repeated."""
    keys = sizes.keys if sizes.latent is None else sizes.queries
    return (keys + sizes.values) * repeats(sizes, use, over) // (over * use.divide)


def saved_of_slice(sizes: Transformer, use: Use, over: int) -> Iterator[Saved]:
    """Return what attention of a slice saves of queries, keys and values. Keys and values are views of those that are
    kept, but where eager attention repeats them for groups of queries."""
    how, is_eager = sizes.implementation, sizes.is_eager(use)
    yield Saved("queries and keys", use.item * use.tokens * sizes.queries // over, "I")
    if not is_eager and how.copies == "all" and use.earlier:
        yield Saved("mask", use.item * use.queries * use.keys, "I")  # which CUDA's kernels do not need
    if is_eager and how.repeats_keys and sizes.queries != sizes.keys:
        yield Saved("values", 2 * use.item * use.samples * use.keys * sizes.queries // (over * use.divide), "I")
