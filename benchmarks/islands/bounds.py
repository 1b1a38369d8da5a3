"""The least that a step can take: its compute, and what must cross the link at the link's rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.layouts import EFFECTIVE, Traffic, traffic

BYTES = 4
"""Of a number in fp32."""


def formula(layout: Any, *, parameters: int, inter: int, intra: int, microbatches: int) -> Traffic:
    """Bytes that a rank sends in a step, by the layouts' accounting."""
    size = BYTES * parameters
    return traffic(
        layout, parameters_bytes=size, trainable_bytes=size, inter=inter, intra=intra, microbatches=microbatches
    )


def bounds(
    compute: Mapping[str, float], *, parameters: int, inter: int, intra: int, microbatches: int, bits: float | None
) -> dict[str, Any]:
    """Seconds of compute; by layout the bytes over an island's link, their seconds, and the larger of both.

    compute: `one_rank` alone and `all_ranks` at once, which share this machine's cores.  bits: the link's a second.
    """
    sizes = {"parameters": parameters, "inter": inter, "intra": intra, "microbatches": microbatches}
    layouts = {}
    for layout in EFFECTIVE:
        crossing = formula(layout, **sizes).inter_bytes * intra
        link = crossing * 8 / bits if bits else 0.0
        layouts[layout.name] = {
            "inter_bytes": crossing,
            "link_seconds": link,
            "lower_seconds": max(link, compute["all_ranks"]),
        }
    return {"compute_seconds": dict(compute), "bits_a_second": bits, "layouts": layouts}
