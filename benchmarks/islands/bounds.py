"""The least that a step can take: its compute, and what must cross the link at the link's rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.layouts import EFFECTIVE, Traffic, traffic

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


def bounds(
    compute: Mapping[str, float],
    *,
    parameters: int,
    inter: int,
    intra: int,
    microbatches: int,
    bits: float | None,
    blocks: int,
) -> dict[str, Any]:
    """Seconds of compute; by layout, and by layout under the breadth-first schedule, the bytes over an island's link,
    their seconds, and the larger of both.

    compute: `one_rank` alone and `all_ranks` at once, which share this machine's cores.  bits: the link's a second.
    """
    sizes = {"parameters": parameters, "inter": inter, "intra": intra, "microbatches": microbatches}
    layouts = {}
    for layout in EFFECTIVE:
        for name, each in ((layout.name, None), (f"{layout.name}-breadth", blocks)):
            crossing = formula(layout, blocks=each, **sizes).inter_bytes * intra
            link = crossing * 8 / bits if bits else 0.0
            layouts[name] = {
                "inter_bytes": crossing,
                "link_seconds": link,
                "lower_seconds": max(link, compute["all_ranks"]),
            }
    return {"compute_seconds": dict(compute), "bits_a_second": bits, "layouts": layouts}
