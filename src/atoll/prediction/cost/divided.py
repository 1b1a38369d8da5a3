"""Attention where ranks divide sequences: the heads that a rank computes, and the exchange of heads for positions.

over: ranks of a tensor-parallel group that divide the heads, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.prediction.cost.kernels import Exchange, Kernel, Pass
from atoll.prediction.cost.work import Use

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
