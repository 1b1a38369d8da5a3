"""Bytes that a rank sends in a step, by the layouts' accounting."""

from __future__ import annotations

from typing import Any

from atoll.plans.layouts import Traffic, traffic

BYTES = 4
"""Of a number in fp32."""


def formula(layout: Any, *, parameters: int, inter: int, intra: int, microbatches: int) -> Traffic:
    """Bytes that a rank sends in a step of microbatches one after the other, in fp32."""
    size = BYTES * parameters
    return traffic(
        layout, microbatches=microbatches, parameters_bytes=size, trainable_bytes=size, inter=inter, intra=intra
    )
