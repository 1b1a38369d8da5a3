"""Bytes that a rank sends in a step, by the layouts' accounting."""

from __future__ import annotations

from typing import Any

from atoll.layouts import Traffic, traffic

BYTES = 4
"""Of a number in fp32."""


def formula(
    layout: Any, *, parameters: int, inter: int, intra: int, microbatches: int, blocks: int | None = None
) -> Traffic:
    """Bytes that a rank sends in a step, by the layouts' accounting.

    blocks: under the breadth-first schedule, where each of them stays whole for all microbatches: all but the last are
    gathered for the forwards and for the backwards, and each is reduced once.
    """
    size = BYTES * parameters
    sizes = {"parameters_bytes": size, "trainable_bytes": size, "inter": inter, "intra": intra}
    if blocks is None:
        return traffic(layout, microbatches=microbatches, **sizes)
    return traffic(layout, microbatches=microbatches, gathers=2 - 1 / blocks, reductions=1, **sizes)
